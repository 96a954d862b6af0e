"""The two sides of a comparison, each compiled in a process of its own: of the baseline, or of any two functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchkit import UserError, user_file
from benchkit.device import Device
from benchkit.processes import ChildFailure, RemoteObject
from jax_baseline.diff.programs import Program
from native_build import missing_inductor
from torch_baseline.config import GPTConfig, Precision

JaxCall = tuple[Callable[..., Any], Sequence[Any], bool]  # the function, its arguments, whether it takes gradients

# Norms of ones and biases of zeros make many tensors equal; a little noise tells them apart.
_JITTER = 0.05


@dataclass(frozen=True)
class ModelSide:
    """The baseline's loss and its gradients.

    Attributes:
        model: fields of :class:`GPTConfig`.
        batch_size: sequences.
        dtype: of the matrix products.
        attention: of JAX.
        device: where it runs.
        repeats: how often it is timed.
        seed: of weights and tokens.
    """

    model: Mapping[str, Any]
    batch_size: int
    dtype: Precision
    attention: str
    device: Device
    repeats: int
    seed: int = 0


@dataclass(frozen=True)
class FunctionSide:
    """A function of the user's.

    Attributes:
        function: ``path/to/file.py:name``.
        inputs: ``path/to/file.py:name`` of a function that returns its arguments as NumPy arrays.
        gradients: whether it returns a scalar whose gradients are taken as well.
        device: where it runs.
        repeats: how often it is timed.
    """

    function: str
    inputs: str
    gradients: bool
    device: Device
    repeats: int


class JaxSide:
    """What the worker of XLA's side holds."""

    def __init__(self, kind: str, spec: Mapping[str, Any]) -> None:
        self._neighbours = _with_neighbours(kind, spec)
        made = _jax_model(spec) if kind == "model" else _jax_function(spec)
        self._function, self._arguments, self._gradients = made
        self._repeats = spec["repeats"]
        self._sketched = kind == "function"  # of the model each framework lays the gradients out in its own way
        self._compiled: Any = None

    def program(self) -> dict[str, Any]:
        """Compile, run and read it; the fields of a :class:`Program`."""
        from jax_baseline.diff.xla_program import CompiledFunction

        self._compiled = CompiledFunction(self._function, self._arguments, gradients=self._gradients)
        return self._compiled.program(repeats=self._repeats, sketched=self._sketched).as_plain()

    def values(self) -> dict[str, tuple[float, ...] | None]:
        """The moments of what its kernels leave in memory, by name."""
        return self._compiled.values()


class TorchSide:
    """What the worker of Inductor's side holds."""

    def __init__(self, kind: str, spec: Mapping[str, Any]) -> None:
        import jax_baseline.diff.inductor_program  # noqa: F401 - torch is there when the first answer is waited for

        self._neighbours = _with_neighbours(kind, spec)
        self._program = _torch_model if kind == "model" else _torch_function
        self._spec = spec

    def program(self) -> dict[str, Any]:
        """Compile, run and read it; the fields of a :class:`Program`, values included."""
        return self._program(self._spec).as_plain()


def compile_both(jax_side: ModelSide | FunctionSide, torch_side: ModelSide | FunctionSide) -> tuple[Program, Program]:
    """Compile, run and read both sides, one after the other, each in a process of its own.

    Returns:
        XLA's program and Inductor's.

    Raises:
        UserError: for what the user can mend.
    """
    if (reason := missing_inductor(torch_side.device)) is not None:
        raise UserError(reason)
    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:  # both import their framework at the same time; then one works at a time
            starting = [pool.submit(_start, JaxSide, jax_side), pool.submit(_start, TorchSide, torch_side)]
        for started in starting:
            if started.exception() is None:
                stack.enter_context(started.result())
        jax_worker, torch_worker = (started.result() for started in starting)
        xla = _with_values(Program.from_plain(jax_worker.call("program")), jax_worker)
        jax_worker.close()  # and with it what it holds of the device
        return xla, Program.from_plain(torch_worker.call("program"))


def _start(side: type[JaxSide | TorchSide], spec: ModelSide | FunctionSide) -> RemoteObject:
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if spec.device == "cpu" or side is TorchSide:
        environment["JAX_PLATFORMS"] = "cpu"
    arguments = {"kind": "model" if isinstance(spec, ModelSide) else "function", "spec": asdict(spec)}
    return RemoteObject(side, arguments, environment=environment)


def _with_neighbours(kind: str, spec: Mapping[str, Any]) -> ExitStack:
    """What keeps the modules beside a user's file importable, for functions that import when they are called."""
    stack = ExitStack()
    if kind == "function":
        stack.enter_context(user_file.importable(Path(spec["function"].rpartition(":")[0])))
    return stack


def _with_values(program: Program, worker: RemoteObject) -> Program:
    """Take the values on XLA's side; a note says why where XLA does not take its own text again, or dies of it."""
    try:
        return program.with_values(worker.call("values"))
    except ChildFailure as error:
        lines = [line.strip() for line in error.details.splitlines() if re.search("[Ee]rror|Check failed", line)]
        why = (lines or [str(error)])[-1].removeprefix("ValueError: ")[:200]  # our own: a sentence without it
        note = f"values in memory could not be read ({why}), so kernels are matched by labels alone"
        return replace(program, notes=(note,))


def load_function(reference: str, *, what: str) -> Callable[..., Any]:
    """Import ``path/to/file.py:name``.

    Args:
        reference: file and name, or ``path/to/file.py:object.method``.
        what: the function is for, in the error.

    Raises:
        UserError: if there is no such file or name, or it cannot be imported or called.
    """
    path, separator, name = reference.rpartition(":")
    if not separator or not path.endswith(".py") or not name:
        raise UserError(f"{what} must be given as file.py:function, got {reference!r}")
    if not Path(path).is_file():
        raise UserError(f"{what}: there is no file {path}")
    try:
        module = user_file.load_file(Path(path), "_jax_baseline_user_")
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    function = user_file.find(module, name)
    if not callable(function):
        public = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise UserError(f"{what}: {path} has no function {name!r}; it has {', '.join(public) or 'none'}")
    return function


@contextmanager
def blame(reference: str) -> Iterator[None]:
    """Let what a user's function raises be said of that function, in one line.

    Raises:
        UserError: in the place of anything else.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = (str(error).strip() or "no message").splitlines()[0][:300]
        # torch's function was given what JAX traces with.
        swapped = "; name torch's function first and JAX's second" if "Tracer" in text else ""
        raise UserError(f"{reference} raised {type(error).__name__}: {text}{swapped}") from error


def load_inputs(reference: str) -> tuple[NDArray, ...]:
    """Call ``file.py:name``, which must return a tuple of NumPy arrays whose values both frameworks can hold.

    Returns:
        Copies of them, laid out row by row: torch takes no negative strides, and what it writes into is not the user's.

    Raises:
        UserError: if not.
    """
    function = load_function(reference, what="the inputs")
    with blame(reference):
        made = function()
    arrays = made if isinstance(made, tuple) else (made,)
    for index, array in enumerate(arrays):
        _require_in_both(array, f"{reference}: element {index}")
    return tuple(np.array(array, order="C") for array in arrays)


def _require_in_both(array: object, what: str) -> None:
    if not isinstance(array, np.ndarray):
        raise UserError(f"{what} of the tuple that is returned must be a NumPy array, got {type(array).__name__}")
    if array.dtype not in (np.float32, np.float16, np.int32, np.int64, np.bool_):
        raise UserError(
            f"{what} is {array.dtype}; give float32, float16, int32, bool, or int64 with values that int32 holds (JAX "
            "makes 64 bits 32)"
        )
    if array.dtype == np.int64 and array.size:
        held = np.iinfo(np.int32)
        outside = [value for value in (array.min(), array.max()) if not held.min <= value <= held.max]
        if outside:
            raise UserError(f"{what} is int64 and holds {outside[0]}; JAX makes it int32: give numbers that this holds")


def _weights_and_batch(spec: ModelSide) -> tuple[GPTConfig, dict[str, NDArray], tuple[NDArray, ...]]:
    from torch_baseline.data import batch, load_corpus
    from torch_baseline.model import init_numpy

    config = GPTConfig(**spec.model)
    generator = np.random.default_rng(spec.seed)
    weights = {
        name: array + np.float32(_JITTER) * generator.standard_normal(array.shape, np.float32)
        if array.ndim == 1
        else array
        for name, array in init_numpy(config, spec.seed).items()
    }
    return config, weights, batch(load_corpus(None).train, spec.seed, 0, spec.batch_size, config.block_size)


def _torch_model(plain: Mapping[str, Any]) -> Program:
    import jax
    import torch

    from jax_baseline.diff.inductor_program import compile_program
    from jax_baseline.diff.torch_labels import labelled_loss
    from jax_baseline.gpt.transfer import weight_map
    from torch_baseline.model import GPT

    spec = ModelSide(**plain)
    config, weights, tokens = _weights_and_batch(spec)
    model = GPT(config)
    model.load_numpy(weights)
    model.to(spec.device)
    if spec.dtype == "float64":
        model.double()
    parameters = dict(model.named_parameters())
    order = [source.torch_name for source in jax.tree.leaves(weight_map(config))]
    batch = [torch.from_numpy(part).to(spec.device) for part in tokens]
    loss_of = torch.compile(labelled_loss(model, spec.dtype, spec.device))

    def run() -> list[torch.Tensor]:
        for parameter in parameters.values():
            parameter.grad = None
        loss = loss_of(*batch)
        loss.backward()
        return [loss.detach(), *(grad for name in order if (grad := parameters[name].grad) is not None)]

    return compile_program(run, device=spec.device, repeats=spec.repeats)


def _jax_model(plain: Mapping[str, Any]) -> JaxCall:
    import jax
    import jax.numpy as jnp

    from jax_baseline.gpt.model import ATTENTIONS
    from jax_baseline.gpt.optim import master_dtype
    from jax_baseline.gpt.train import make_gradient, require_jax_device
    from jax_baseline.gpt.transfer import from_torch
    from torch_baseline.config import TrainConfig

    spec = ModelSide(**plain)
    require_jax_device(spec.device)
    if spec.attention not in ATTENTIONS:
        raise UserError(f"the attention must be one of {', '.join(ATTENTIONS)}, got {spec.attention!r}")
    if spec.dtype == "float64":
        jax.config.update("jax_enable_x64", True)  # in this process, which is the comparison's alone
    config, weights, tokens = _weights_and_batch(spec)
    training = TrainConfig(dtype=spec.dtype)
    try:
        function = make_gradient(config, training, attention=ATTENTIONS[spec.attention])
    except ValueError as error:  # a dtype that this loop does not have
        raise UserError(str(error)) from error
    params = from_torch(weights, config, master_dtype(training))
    batch = [jnp.asarray(part.astype(np.int32)) for part in tokens]
    return function, (params, *batch), True


def _torch_function(plain: Mapping[str, Any]) -> Program:
    import torch

    from jax_baseline.diff.inductor_program import compile_program

    spec = FunctionSide(**plain)
    function = load_function(spec.function, what="the torch function")
    arrays = load_inputs(spec.inputs)
    originals = [torch.from_numpy(array).to(spec.device) for array in arrays]
    wanted = _differentiated(arrays, spec)
    arguments: list[torch.Tensor] = []

    def prepare() -> None:
        """Copies, which the function may write into."""
        arguments[:] = [one.clone().requires_grad_(index in wanted) for index, one in enumerate(originals)]

    prepare()
    with blame(spec.function):
        function(*arguments)
    compiled = torch.compile(function)

    def run() -> list[torch.Tensor]:
        result = compiled(*arguments)
        if not wanted:
            return _leaves(result, torch.Tensor, spec.function)
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            raise UserError(f"{spec.function}: with --gradients the function must return one scalar")
        result.backward()
        inputs = [arguments[index] for index in wanted]
        # JAX's gradient of an argument that the result does not depend on is zeros, torch's is None.
        return [result.detach(), *(torch.zeros_like(one) if one.grad is None else one.grad for one in inputs)]

    return compile_program(run, device=spec.device, repeats=spec.repeats, sketched=True, prepare=prepare)


def _jax_function(plain: Mapping[str, Any]) -> JaxCall:
    import jax
    import jax.numpy as jnp

    from jax_baseline.gpt.train import require_jax_device

    spec = FunctionSide(**plain)
    require_jax_device(spec.device)
    function = load_function(spec.function, what="the JAX function")
    arrays = load_inputs(spec.inputs)
    wanted = _differentiated(arrays, spec)
    arguments = [jnp.asarray(array.astype(np.int32) if array.dtype == np.int64 else array) for array in arrays]
    with blame(spec.function):
        result = jax.eval_shape(function, *arguments)
    if wanted:
        if getattr(result, "shape", None) != ():
            raise UserError(f"{spec.function}: with --gradients the function must return one scalar, got {result}")
        function = jax.value_and_grad(function, argnums=wanted)
    return function, arguments, spec.gradients


def _differentiated(arrays: Sequence[NDArray], spec: FunctionSide) -> tuple[int, ...]:
    """The places of the arguments whose gradients are taken; none unless they are asked for.

    Raises:
        UserError: if they are asked for and no argument can have one.
    """
    if not spec.gradients:
        return ()
    floating = tuple(index for index, array in enumerate(arrays) if np.issubdtype(array.dtype, np.floating))
    if not floating:
        kinds = ", ".join(str(array.dtype) for array in arrays) or "nothing"
        raise UserError(
            f"{spec.inputs}: --gradients takes those of float32 or float16 arguments, got {kinds}; give one, or leave "
            "out --gradients"
        )
    return floating


def _leaves(value: Any, kind: type, reference: str) -> list[Any]:
    """What the function of this name returned, flat, as JAX flattens it: dictionaries by their keys, None is nothing.

    Raises:
        UserError: for anything but tensors in tuples, lists and dictionaries.
    """
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
