"""Compiles a function with JAX and its torch counterpart with Inductor, each in a separate process.

The function is the loss of the baseline, or a pair of functions of the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchkit import UserError
from benchkit.command import user_file
from benchkit.device import Device
from benchkit.processes import ChildFailure, RemoteObject
from jax_baseline.diff.programs import Program, Rounding
from jax_baseline.gpt.devices import process_environment, require_jax_device
from jax_baseline.user_code import errors_of, load_function, require_32_bits
from native_build import missing_inductor
from torch_baseline.config import GPTConfig, Precision

TorchCall = tuple[Program, Callable[[], Rounding]]
JaxCall = tuple[Callable[..., Any], Sequence[Any], bool]  # the function, its arguments, whether it computes gradients

_SEED = 0  # of weights and tokens
# Norm weights of one and biases of zero make many tensors equal. Noise distinguishes them.
_JITTER = 0.05


@dataclass(frozen=True)
class ModelSpec:
    """The loss of the baseline and its gradients; 0 repeats time nothing."""

    model: GPTConfig
    batch_size: int
    dtype: Precision
    attention: str
    device: Device
    repeats: int


@dataclass(frozen=True)
class FunctionSpec:
    """A function of the user."""

    function: str  # ``path/to/file.py:name``
    inputs: str  # ``path/to/file.py:name`` of a function that returns the arguments as NumPy arrays
    gradients: bool  # whether to compute the gradients too. The function then returns a scalar
    device: Device
    repeats: int


class JaxProgram:
    """Compiles with XLA. It lives in a separate process."""

    def __init__(self, spec: ModelSpec | FunctionSpec) -> None:
        self._importable = importable_neighbours(spec)
        import jax

        made = _jax_model(spec) if isinstance(spec, ModelSpec) else _jax_function(spec)
        self._function, self._arguments, self._gradients = made
        # None is what _jax_function replaces; the model's own step always uses "highest".
        chosen = jax.config.jax_default_matmul_precision if isinstance(spec, FunctionSpec) else None
        self._precision = chosen or "highest"
        self._repeats = spec.repeats
        # A sketch depends on the layout, and the layouts of the model's gradients differ between the frameworks.
        self._sketched = isinstance(spec, FunctionSpec)
        self._compiled: Any = None

    def program(self) -> Program:
        """Compile and run the function."""
        from jax_baseline.diff.xla.program import CompiledFunction

        self._compiled = CompiledFunction(self._function, self._arguments, gradients=self._gradients)
        program = self._compiled.program(repeats=self._repeats, sketched=self._sketched)
        return replace(program, precision=self._precision)

    def rounding(self) -> Rounding:
        """Run the function operation by operation with rounding noise."""
        import jax
        import jax.numpy as jnp

        from jax_baseline.diff.runs import measure
        from jax_baseline.gpt.compilation import ROUND_AS_WRITTEN
        from jax_baseline.parity.pairs.pair import in_jax
        from jax_baseline.parity.rounding import jax_in_float64, with_noise

        def results(arguments: Sequence[Any], seed: int | None, *, wide: bool, ties: bool = False) -> list[NDArray]:
            if seed is None:
                function = jax.jit(self._function, compiler_options=ROUND_AS_WRITTEN)
            else:
                function = with_noise(self._function, seed, exact_constants=not wide, ties=ties)
            return [np.asarray(leaf) for leaf in jax.tree.leaves(function(*arguments))]

        def run(arrays: Sequence[NDArray], seed: int | None, *, wide: bool, ties: bool = False) -> list[NDArray]:
            if not wide:
                return results(self._arguments, seed, wide=False)
            with jax.enable_x64(True), jax_in_float64():
                return results(in_jax(arrays, jnp.float64), seed, wide=True, ties=ties)

        if not self._sketched:
            return measure(run, (), narrow_only=True)
        return measure(run, [np.asarray(array) for array in self._arguments], kinks=not self._gradients)

    def values(self) -> dict[str, tuple[float, ...] | None]:
        """Return the moments of the tensors that the kernels write, by name."""
        return self._compiled.values()


class TorchProgram:
    """Compiles with Inductor. It lives in a separate process."""

    def __init__(self, spec: ModelSpec | FunctionSpec) -> None:
        import jax_baseline.diff.inductor.program  # noqa: F401 - imports torch while JAX starts

        self._importable = importable_neighbours(spec)
        self._spec = spec
        self._rounding: Callable[[], Rounding] = Rounding

    def program(self) -> Program:
        """Compile and run the function. The program has the values of its tensors."""
        made = _torch_model(self._spec) if isinstance(self._spec, ModelSpec) else _torch_function(self._spec)
        import torch

        program, self._rounding = made
        return replace(program, precision=torch.get_float32_matmul_precision())

    def rounding(self) -> Rounding:
        """Run the function eagerly with rounding noise."""
        return self._rounding()


def compile_both(
    jax_spec: ModelSpec | FunctionSpec, torch_spec: ModelSpec | FunctionSpec, *, rounding: bool = False
) -> tuple[Program, Program]:
    """Compile and run both functions one after the other, each in a separate process.

    Returns the program of XLA and the program of Inductor; with ``rounding`` they say what rounding does to their
    results.

    Raises:
        UserError: If a specification cannot be compiled, or a function of the user fails.
    """
    if (reason := missing_inductor(torch_spec.device)) is not None:
        raise UserError(reason)
    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:  # both processes import at the same time, and then work one at a time
            starting = [pool.submit(_start, JaxProgram, jax_spec), pool.submit(_start, TorchProgram, torch_spec)]
        for started in starting:
            if started.exception() is None:
                stack.enter_context(started.result())
        jax_program, torch_program = (started.result() for started in starting)
        xla = _with_values(jax_program.call("program"), jax_program)
        if rounding:
            xla = replace(xla, rounding=jax_program.call("rounding"))
        jax_program.close()  # it releases the memory of the device
        inductor = torch_program.call("program")
        return xla, replace(inductor, rounding=torch_program.call("rounding")) if rounding else inductor


def _start(program: type[JaxProgram | TorchProgram], spec: ModelSpec | FunctionSpec) -> RemoteObject:
    # The model's size is chosen by what is free. A function of the user takes what it needs.
    alone = isinstance(spec, ModelSpec)
    environment = process_environment("cpu" if program is TorchProgram else spec.device, alone=alone)
    return RemoteObject(program, {"spec": spec}, environment=environment)


def importable_neighbours(spec: ModelSpec | FunctionSpec) -> ExitStack:
    """Keep the modules beside the user's file importable, for functions that import modules when they run."""
    stack = ExitStack()
    if isinstance(spec, FunctionSpec):
        stack.enter_context(user_file.importable(Path(spec.function.rpartition(":")[0])))
    return stack


def _with_values(program: Program, jax_program: RemoteObject) -> Program:
    """Add the values of XLA's tensors. If XLA cannot compile its text again, a note gives the reason."""
    try:
        return program.with_values(jax_program.call("values"))
    except ChildFailure as error:
        lines = [line.strip() for line in error.details.splitlines() if re.search("[Ee]rror|Check failed", line)]
        # This package's own errors are sentences. XLA's are of its compiler, and name causes that are not the reader's.
        own = re.match(r"(?:Value|Runtime)Error: (.+)", (lines or [str(error)])[-1])
        why = own[1][:200] if own else "XLA does not compile its optimised text again"
        note = f"values in memory could not be read ({why}), so kernels are matched by label only"
        return replace(program, notes=(note,))


def load_inputs(reference: str) -> tuple[NDArray, ...]:
    """Call ``file.py:name``, which must return a tuple of NumPy arrays that both frameworks can represent.

    The copies are row-major: torch does not accept negative strides, and the function may write into them.

    Raises:
        UserError: If the result is anything else.
    """
    function = load_function(reference, what="the inputs")
    with errors_of(reference):
        made = function()
    arrays = made if isinstance(made, tuple) else (made,)
    for index, array in enumerate(arrays):
        _require_in_both(array, f"{reference}: element {index}")
    return tuple(np.array(array, order="C") for array in arrays)


def _require_in_both(array: object, what: str) -> None:
    if not isinstance(array, np.ndarray):
        raise UserError(f"{what} of the returned tuple must be a NumPy array, got {type(array).__name__}")
    if array.dtype not in (np.float32, np.float16, np.int32, np.int64, np.bool_):
        raise UserError(
            f"{what} is {array.dtype}; return float32, float16, int32, bool, or int64 with values in the range of "
            "int32 (JAX converts 64 bits to 32)"
        )
    require_32_bits(array, what)


def _weights_and_batch(spec: ModelSpec) -> tuple[dict[str, NDArray], tuple[NDArray, ...]]:
    from torch_baseline.data import batch, load_corpus
    from torch_baseline.model import init_numpy

    generator = np.random.default_rng(_SEED)
    weights = {
        name: array + np.float32(_JITTER) * generator.standard_normal(array.shape, np.float32)
        if array.ndim == 1
        else array
        for name, array in init_numpy(spec.model, _SEED).items()
    }
    return weights, batch(load_corpus().train, _SEED, 0, spec.batch_size, spec.model.block_size)


def _torch_model(spec: ModelSpec) -> TorchCall:
    import jax
    import torch

    from jax_baseline.diff.inductor.labels import labelled_loss
    from jax_baseline.diff.inductor.program import compile_program, values_of
    from jax_baseline.diff.runs import measure, torch_arrays
    from jax_baseline.gpt.transfer import weight_map
    from jax_baseline.parity.rounding import torch_noise
    from torch_baseline.model import GPT

    weights, tokens = _weights_and_batch(spec)
    model = GPT(spec.model)
    model.load_numpy(weights)
    model.to(spec.device)
    if spec.dtype == "float64":
        model.double()
    parameters = dict(model.named_parameters())
    order = [source.torch_name for source in jax.tree.leaves(weight_map(spec.model))]
    batch = [torch.from_numpy(part).to(spec.device) for part in tokens]
    loss_of = labelled_loss(model, spec.dtype, spec.device)

    def results(of: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        for parameter in parameters.values():
            parameter.grad = None
        loss = of(*batch)
        loss.backward()
        return [loss.detach(), *(grad for name in order if (grad := parameters[name].grad) is not None)]

    def eager(arrays: Sequence[NDArray], seed: int | None, *, wide: bool, ties: bool = False) -> list[NDArray]:
        with torch_noise(seed):
            return torch_arrays(results(loss_of))

    program = compile_program(partial(results, torch.compile(loss_of)), device=spec.device, repeats=spec.repeats)
    if spec.dtype not in ("float32", "float64"):
        program = replace(program, values=values_of(results(loss_of), sketched=False))
    return program, partial(measure, eager, (), narrow_only=True)


def _jax_model(spec: ModelSpec) -> JaxCall:
    import jax
    import jax.numpy as jnp

    from jax_baseline.gpt.model import with_attention
    from jax_baseline.gpt.optim import master_dtype
    from jax_baseline.gpt.train import make_gradient
    from jax_baseline.gpt.transfer import from_torch
    from torch_baseline.config import TrainConfig

    require_jax_device(spec.device)
    if spec.dtype == "float64":
        jax.config.update("jax_enable_x64", True)  # this process does nothing else
    weights, tokens = _weights_and_batch(spec)
    training = TrainConfig(dtype=spec.dtype)
    function = make_gradient(spec.model, training, parts=with_attention(spec.attention))
    params = from_torch(weights, spec.model, master_dtype(training))
    batch = [jnp.asarray(part.astype(np.int32)) for part in tokens]
    return function, (params, *batch), True


def _torch_function(spec: FunctionSpec) -> TorchCall:
    import torch

    from jax_baseline.diff.inductor.program import compile_program, values_of
    from jax_baseline.diff.runs import measure, torch_arrays
    from jax_baseline.parity.rounding import FloatingTypes, torch_in_float64, torch_noise

    torch.backends.cudnn.allow_tf32 = False  # torch's default for convolutions; JAX's are in float32 here
    function = load_function(spec.function, what="the torch function")
    arrays = load_inputs(spec.inputs)
    wanted = _differentiated(arrays, spec)

    def tensors(arrays: Sequence[NDArray], *, wide: bool = False) -> list[torch.Tensor]:
        """New tensors, because the function may write into its arguments."""
        copies = (torch.from_numpy(array).to(spec.device, copy=True) for array in arrays)
        typed = (tensor.double() if wide and tensor.is_floating_point() else tensor for tensor in copies)
        return [tensor.requires_grad_(index in wanted) for index, tensor in enumerate(typed)]

    def results(of: Callable[..., Any], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        result = of(*arguments)
        if not wanted:
            return _leaves(result, torch.Tensor, spec.function)
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            raise UserError(f"{spec.function}: with --gradients the function must return one scalar")
        result.backward()
        # If the result does not depend on an argument, its gradient is zeros in JAX and None in torch.
        gradients = ((arguments[index], arguments[index].grad) for index in wanted)
        return [
            result.detach(),
            *(torch.zeros_like(tensor) if gradient is None else gradient for tensor, gradient in gradients),
        ]

    def eager(arrays: Sequence[NDArray], seed: int | None, *, wide: bool, ties: bool = False) -> list[NDArray]:
        arguments = tensors(arrays, wide=wide)
        with torch_noise(seed, not wide, ties), torch_in_float64() if wide else nullcontext():
            return torch_arrays(results(function, arguments))

    with errors_of(spec.function), FloatingTypes() as seen:
        results(function, tensors(arrays))
    compiled, arguments = torch.compile(function), list[torch.Tensor]()

    def prepare() -> None:
        arguments[:] = tensors(arrays)

    program = compile_program(
        lambda: results(compiled, arguments), device=spec.device, repeats=spec.repeats, sketched=True, prepare=prepare
    )
    if not (seen.names <= {"float32"} or seen.names <= {"float64"}):
        # Inductor's kernels compute in float32, and a cast to bfloat16 and back inside of one is no cast.
        program = replace(program, values=values_of(results(function, tensors(arrays)), sketched=True))
    return program, partial(measure, eager, arrays, kinks=not spec.gradients)


def _jax_function(spec: FunctionSpec) -> JaxCall:
    import jax
    import jax.numpy as jnp

    from jax_baseline.parity.rounding import in_torchs_precision

    require_jax_device(spec.device)
    of_user = load_function(spec.function, what="the JAX function")

    def function(*arguments: Any) -> Any:
        with in_torchs_precision():
            return of_user(*arguments)

    arrays = load_inputs(spec.inputs)
    wanted = _differentiated(arrays, spec)
    arguments = [jnp.asarray(array.astype(np.int32) if array.dtype == np.int64 else array) for array in arrays]
    with errors_of(spec.function):
        result = jax.eval_shape(function, *arguments)
    if wanted:
        if getattr(result, "shape", None) != ():
            raise UserError(f"{spec.function}: with --gradients the function must return one scalar, got {result}")
        function = jax.value_and_grad(function, argnums=wanted)
    return function, arguments, spec.gradients


def _differentiated(arrays: Sequence[NDArray], spec: FunctionSpec) -> tuple[int, ...]:
    """Return the indices of the arguments with gradients; none unless gradients are requested."""
    if not spec.gradients:
        return ()
    floating = tuple(index for index, array in enumerate(arrays) if np.issubdtype(array.dtype, np.floating))
    if not floating:
        kinds = ", ".join(str(array.dtype) for array in arrays) or "nothing"
        raise UserError(
            f"{spec.inputs}: --gradients needs a float32 or float16 argument, got {kinds}; add one, or leave out "
            "--gradients"
        )
    return floating


def _leaves(value: Any, kind: type, reference: str) -> list[Any]:
    """Flatten the result of a function like JAX does: dictionaries in the order of their keys, without None."""
    if value is None:
        return []
    if isinstance(value, kind):
        return [value]
    if not isinstance(value, (tuple, list, dict)):
        raise UserError(
            f"{reference} must return tensors, alone or in tuples, lists and dictionaries; got {type(value).__name__}"
        )
    parts: Sequence[Any] = [value[key] for key in sorted(value)] if isinstance(value, dict) else value
    return [leaf for part in parts for leaf in _leaves(part, kind, reference)]
