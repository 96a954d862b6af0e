"""Compiles a function with XLA, profiles it, and returns it as a :class:`~jax_baseline.diff.programs.Program`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jax_baseline.diff.programs import KernelLaunch, Program, Tensor, short_location, sketch
from jax_baseline.diff.xla.private import complete_text, kept_arguments, run_text
from jax_baseline.gpt.compilation import ROUND_AS_WRITTEN, compile_step, profiled
from jax_baseline.hlo import Kernel, Module, Shape, kernels, parse
from jax_baseline.hlo.exposed_intermediates import expose_intermediates
from jax_baseline.hlo.kernels import quote
from jax_baseline.hlo.profile import kernel_seconds, median_seconds

AnyArray = Shaped[Array, "..."]

_FLOATS = re.compile(r"\b(b?f\d+\w*)\[")  # in a jaxpr: bf16[8,32]
_NAMES = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


class CompiledFunction:
    """A function compiled by XLA.

    The arguments, on one device, are not donated. Without gradients, every kernel is in the forward phase.
    """

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], *, gradients: bool) -> None:
        # Where there are none it is the default device, which need not belong to JAX's default backend.
        (device,) = jnp.asarray(next(iter(jax.tree.leaves(arguments)), 0)).devices()
        jitted = jax.jit(function)
        compiled = compile_step(jitted, *arguments, options=profiled(device.platform))
        self._compiled, self._compile_seconds = compiled.step, compiled.seconds
        # Kernels and times are of the program that users have, which may round less than it says.
        floats = set(_FLOATS.findall(str(jitted.trace(*arguments).jaxpr)))  # which has no constants, as StableHLO has
        rounds_less = not (floats <= {"f32"} or floats <= {"f64"})
        self._as_written = compiled.lowered.compile(ROUND_AS_WRITTEN) if rounds_less else compiled.step
        self._arguments, self._gradients = arguments, gradients
        self._module = parse(compiled.text)
        self._kernels = kernels(self._module)

    def program(self, *, repeats: int, sketched: bool = False) -> Program:
        """Return the program without the values of its intermediate tensors.

        0 repeats time nothing.
        """
        run = partial(self._compiled, *self._arguments)
        names = [kernel.name for kernel in self._kernels]
        times = kernel_seconds(run, names, repeats=repeats) if repeats else {}
        results = self._as_written(*self._arguments)
        return Program(
            "XLA",
            tuple(_launch(self._module, kernel, times, self._gradients) for kernel in self._kernels),
            median_seconds(run, repeats) if repeats else None,
            self._compile_seconds,
            tuple(_result(index, leaf, sketched) for index, leaf in enumerate(jax.tree.leaves(results))),
        )

    def values(self) -> dict[str, tuple[float, ...] | None]:
        """Return the moments of the tensors that the kernels write, by name.

        The optimised text is changed to return these tensors, and compiled again.

        Raises:
            ValueError: If the program calls a library function that the text alone does not define.
        """
        text, names = expose_intermediates(complete_text(self._compiled), {kernel.name for kernel in self._kernels})
        flat = jax.tree.leaves(self._arguments)
        results = run_text(text, [flat[index] for index in kept_arguments(self._compiled)])
        return {name: moments(array) for name, array in zip(names, results, strict=True)}


def moments(array: AnyArray) -> tuple[float, ...] | None:
    """Return the sums of :func:`jax_baseline.diff.alignment.same_values` over an array, in float64."""
    if array.size == 0 or jnp.issubdtype(array.dtype, jnp.complexfloating):
        return None
    with jax.enable_x64(True):
        return (float(array.size), *(float(part) for part in _sums(array)))


@jax.jit
def _sums(array: AnyArray) -> tuple[Float[Array, ""], ...]:
    wide = array.astype(jnp.float64).ravel()
    return wide.sum(), jnp.abs(wide).sum(), (wide**2).sum(), (wide**3).sum(), wide.max(), wide.min()


def _launch(module: Module, kernel: Kernel, times: Mapping[str, float], gradients: bool) -> KernelLaunch:
    total = kernel.total
    return KernelLaunch(
        name=kernel.name,
        kind=kernel.description,
        category=kernel.category,
        ops=kernel.ops,
        phase=kernel.phase if gradients else "forward",
        label=kernel.label.scopes,
        labels=tuple(label.scopes for label in kernel.labels),
        location=short_location(kernel.location.file, kernel.location.line) if kernel.location else "",
        calls=kernel.calls,
        bytes_read=total.bytes_read,
        bytes_written=total.bytes_written,
        flops=total.flops,
        seconds=times.get(kernel.name),
        source=quote(module, kernel),
        writes=tuple(Tensor(name, _dtype(shape), shape.dimensions, shape.bytes) for name, shape in kernel.writes),
    )


def _dtype(shape: Shape) -> str:
    """Translate HLO's name to NumPy's: f32 → float32, pred → bool."""
    letters = shape.dtype.rstrip("0123456789")
    return (
        f"{_NAMES[letters]}{shape.dtype[len(letters) :]}" if letters in _NAMES else shape.dtype.replace("pred", "bool")
    )


def _result(index: int, array: AnyArray, sketched: bool) -> Tensor:
    sums = sketch(np.asarray(array)) if sketched else None
    return Tensor(f"result {index}", str(array.dtype), array.shape, array.nbytes, moments(array), sums)
