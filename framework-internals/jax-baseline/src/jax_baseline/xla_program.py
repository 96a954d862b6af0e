"""What XLA makes of a function: compiled, profiled, its arrays taken, read as a :class:`Program`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_baseline.hlo import Kernel, Module, Shape, kernels, parse
from jax_baseline.hlo.kernels import quote
from jax_baseline.hlo.taps import return_everything
from jax_baseline.profile import kernel_seconds
from jax_baseline.programs import Program, Step, Tensor, short_place
from jax_baseline.step_reading import COMMAND_BUFFERS_OFF
from jax_baseline.xla_private import complete_text, kept_arguments, run_text

_NAMES = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


def compile_program(
    function: Callable[..., Any], arguments: Sequence[Any], *, gradients: bool, repeats: int, values: bool = True
) -> Program:
    """Compile a function for its arguments, and read it.

    Args:
        function: of arrays and trees of arrays; not yet jitted.
        arguments: on one device; not consumed.
        gradients: whether the function takes gradients; if not, all of it counts as the forward phase.
        repeats: how often to time it; 0 for not at all.
        values: take the arrays that kernels leave in memory, which compiles the module once more.
    """
    jitted = jax.jit(function)
    start = time.perf_counter()
    lowered = jitted.lower(*arguments)
    # Kernels that are replayed as a CUDA graph have no names in a profile.
    options = COMMAND_BUFFERS_OFF if jax.default_backend() == "gpu" else None
    compiled = lowered.compile(compiler_options=options)
    compile_seconds = time.perf_counter() - start
    module = parse(compiled.as_text())
    found = kernels(module)
    taken, notes = _take_values(compiled, found, arguments) if values else ({}, ())
    times = (
        kernel_seconds(lambda: compiled(*arguments), [one.name for one in found], repeats=repeats) if repeats else {}
    )
    return Program(
        "XLA",
        tuple(_step(module, kernel, taken, times, gradients) for kernel in found),
        _time_whole(lambda: compiled(*arguments), repeats) if repeats else None,
        compile_seconds,
        tuple(_result(index, leaf) for index, leaf in enumerate(jax.tree.leaves(compiled(*arguments)))),
        notes,
    )


def program_from_text(text: str, *, gradients: bool) -> Program:
    """Read a module that was compiled elsewhere; nothing of it is measured."""
    module = parse(text)
    return Program("XLA", tuple(_step(module, kernel, {}, {}, gradients) for kernel in kernels(module)), None, 0.0)


def moments(array: jax.Array) -> tuple[float, ...] | None:
    """Sums over an array that no permutation changes, in float64: see :func:`jax_baseline.alignment.same_values`."""
    if array.size == 0 or jnp.issubdtype(array.dtype, jnp.complexfloating):
        return None
    with jax.enable_x64(True):
        return (float(array.size), *(float(part) for part in _sums(array)))


@jax.jit
def _sums(array: jax.Array) -> tuple[jax.Array, ...]:
    wide = array.astype(jnp.float64).ravel()
    return wide.sum(), jnp.abs(wide).sum(), (wide**2).sum(), (wide**3).sum(), wide.max(), wide.min()


def _take_values(
    compiled: Any, found: Sequence[Kernel], arguments: Sequence[Any]
) -> tuple[dict[str, tuple[float, ...] | None], tuple[str, ...]]:
    """Moments of what kernels leave in memory, by name; none, with a note, if XLA cannot take its own text again."""
    text, names = return_everything(complete_text(compiled), {kernel.name for kernel in found})
    flat = jax.tree.leaves(arguments)
    try:
        results = run_text(text, [flat[index] for index in kept_arguments(compiled)])
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0][:200]
        return {}, (f"values were not taken, XLA does not compile its optimised text again ({first})",)
    return {name: moments(array) for name, array in zip(names, results, strict=True)}, ()


def _step(
    module: Module,
    kernel: Kernel,
    taken: Mapping[str, tuple[float, ...] | None],
    times: Mapping[str, float],
    gradients: bool,
) -> Step:
    total = kernel.total
    return Step(
        name=kernel.name,
        kind=kernel.description,
        category=kernel.category,
        ops=kernel.ops,
        phase=kernel.phase if gradients else "forward",
        label=kernel.label.scopes,
        labels=tuple(label.scopes for label in kernel.labels),
        place=short_place(kernel.place.file, kernel.place.line) if kernel.place else "",
        calls=kernel.calls,
        bytes_read=total.bytes_read,
        bytes_written=total.bytes_written,
        flops=total.flops,
        seconds=times.get(kernel.name),
        source=quote(module, kernel),
        writes=_writes(kernel, taken),
    )


def _writes(kernel: Kernel, taken: Mapping[str, tuple[float, ...] | None]) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(
            kernel.name if len(kernel.shapes) == 1 else f"{kernel.name}[{index}]",
            _dtype(shape),
            shape.dimensions,
            shape.bytes,
            taken.get(kernel.name) if len(kernel.shapes) == 1 else None,
        )
        for index, shape in enumerate(kernel.shapes)
    )


def _dtype(shape: Shape) -> str:
    """HLO's name as NumPy's: f32 → float32, pred → bool."""
    letters = shape.dtype.rstrip("0123456789")
    return (
        f"{_NAMES[letters]}{shape.dtype[len(letters) :]}" if letters in _NAMES else shape.dtype.replace("pred", "bool")
    )


def _result(index: int, array: jax.Array) -> Tensor:
    return Tensor(f"result {index}", str(array.dtype), array.shape, array.nbytes, moments(array))


def _time_whole(run: Callable[[], Any], repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)
