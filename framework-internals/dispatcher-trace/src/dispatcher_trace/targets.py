"""What to trace, as a command line names it: tensor specifications, expressions, functions in files."""

from __future__ import annotations

import ast
import builtins
import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import torch

from benchkit import UserError
from benchkit.command import user_file
from benchkit.errors import first_line
from dispatcher_trace.records import DTYPE_NAMES, dtype_name
from dispatcher_trace.render import near_names

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SPEC = re.compile(r"^(?P<name>[^\W\d]\w*)=(?P<dtype>\w+)\[(?P<shape>[\d,\s]*)\](?:@(?P<device>[\w:]+))?$")
_DEVICE = re.compile(r"^(cpu|cuda)(:\d+)?$")
# Results of which the code has not run when they are returned.
_UNRUN: dict[type, str] = {
    GeneratorType: "a generator",
    CoroutineType: "a coroutine",
    AsyncGeneratorType: "an asynchronous generator",
}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to make: ``a=bf16[256,256]@cuda``.

    Attributes:
        name: the variable.
        dtype: of the tensor.
        shape: sizes; empty for a tensor without dimensions.
        device: where it is made.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str

    @classmethod
    def parse(cls, text: str, device: str = "cpu") -> TensorSpec:
        """Read a specification.

        Args:
            text: ``a=bf16[256,256]`` or ``a=bf16[256,256]@cuda``.
            device: where the specification names none.

        Raises:
            UserError: saying what is wrong with it.
        """
        match = _SPEC.match(text.strip())
        if match is None:
            raise UserError(
                f"--tensor takes NAME=DTYPE[SIZES] or NAME=DTYPE[SIZES]@DEVICE (a=bf16[256,256]@cuda), got {text!r}"
            )
        dtype = parse_dtype(match["dtype"], "--tensor")
        try:
            shape = tuple(int(size) for size in match["shape"].split(",")) if match["shape"].strip() else ()
        except ValueError:
            raise UserError(
                f"--tensor: sizes are whole numbers between commas, got [{match['shape']}] in {text!r}"
            ) from None
        if keyword.iskeyword(match["name"]):
            raise UserError(f"--tensor: expected a variable's name, got Python's keyword {match['name']!r} in {text!r}")
        if match["device"]:
            _check_device(match["device"], text)
        return cls(match["name"], dtype, shape, match["device"] or device)

    def make(self, *, requires_grad: bool = False) -> torch.Tensor:
        """A tensor of seeded random numbers: normal for floating point, 0 to 9 for integers.

        Raises:
            UserError: where torch makes no such tensor: of this dtype, or as large.
        """
        generator = torch.Generator().manual_seed(0)
        continuous = self.dtype.is_floating_point or self.dtype.is_complex
        try:
            if continuous:
                numbers = torch.randn(self.shape, generator=generator, dtype=torch.float32)
            else:
                numbers = torch.randint(0, 10, self.shape, generator=generator)
            tensor = numbers.to(self.device, self.dtype)
        except (RuntimeError, TypeError) as error:  # a TypeError for a size that 64 bits do not hold
            raise UserError(
                f"--tensor: torch cannot make {self} ({first_line(error)}); take smaller sizes, or a dtype of "
                f"{', '.join(DTYPES)}"
            ) from error
        return tensor.requires_grad_(requires_grad) if continuous else tensor

    def __str__(self) -> str:
        return f"{self.name}={dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]@{self.device}"


def parse_tensors(texts: Sequence[str], device: str) -> list[TensorSpec]:
    """Read the specifications of one command line, each of a variable of its own.

    Args:
        texts: as :meth:`TensorSpec.parse` takes them.
        device: where a specification names none.

    Raises:
        UserError: for one that cannot be read, or two of the same name.
    """
    specs: dict[str, TensorSpec] = {}
    for text in texts:
        spec = TensorSpec.parse(text, device)
        if spec.name in specs:
            raise UserError(
                f"--tensor: {spec.name!r} is given twice, as {specs[spec.name]} and as {spec}; "
                "give each tensor a name of its own, or leave one out"
            )
        specs[spec.name] = spec
    return list(specs.values())


def _check_device(device: str, text: str) -> None:
    """Refuse a device that ``@`` cannot name, or a GPU that is not there."""
    kind, _, index = device.partition(":")
    if _DEVICE.match(device) is None:
        raise UserError(
            f"--tensor: the device after @ is cpu, cuda or cuda:N, got {device!r} in {text!r}; "
            "without @ it is --device's"
        )
    gpus = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= gpus:
        raise UserError(
            f"--tensor: {text!r} asks for GPU {index or 0}, and torch {torch.__version__} sees {gpus} GPUs; use @cpu"
            + (f" or @cuda:0 to @cuda:{gpus - 1}" if gpus else "")
        )


def parse_dtype(text: str, option: str) -> torch.dtype:
    """``bf16`` or ``bfloat16`` → ``torch.bfloat16``.

    Raises:
        UserError: naming the option and the dtypes there are.
    """
    dtype = DTYPES.get(text, getattr(torch, text, None))
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{option}: unknown dtype {text!r}; one of {', '.join(DTYPES)}")
    return dtype


def expression(source: str, names: Sequence[str] = ()) -> Callable[..., Any]:
    """A function of the tensors of these names that evaluates an expression, with ``torch`` and ``F`` in scope.

    Raises:
        UserError: for an expression that is not Python, or one with a name that nothing defines.
    """
    try:
        tree = ast.parse(source, "<expression>", "eval")
    except SyntaxError as error:
        raise UserError(f"cannot read the expression {source!r}: {error.msg}") from None
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    _refuse_unknown_names(tree, {*scope, *names, *vars(builtins)})
    # A function that torch.compile can read, which a call of eval() would not be.
    code = compile(f"lambda {', '.join(names)}: ({source}\n)", "<expression>", "eval")
    function: Callable[..., Any] = eval(code, scope)  # noqa: S307 # the user's own expression, from the command line
    return function


def _refuse_unknown_names(tree: ast.AST, known: set[str]) -> None:
    nodes = list(ast.walk(tree))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    used = dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name))
    unknown = [name for name in used if name not in known | bound]
    if unknown:
        raise UserError(
            f"the expression uses {', '.join(unknown)}, which no --tensor names; "
            f"add --tensor {unknown[0]}=f32[4,4], with its own dtype and sizes"
        )


def load_function(target: str, names: Sequence[str] = ()) -> Callable[..., Any]:
    """The function that ``FILE.py:FUNCTION`` names, or ``FILE.py:OBJECT.METHOD``; the file is imported.

    Args:
        target: which one.
        names: of the arguments that it will be called with.

    Raises:
        UserError: for a target without a colon, a file that is not there or raises, or a function that is not in it.
    """
    path, name = _file_and_function(target)
    module = user_file.load_file(path, "traced_")
    function = user_file.find(module, name)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = near_names(name, functions) if functions else ""
        raise UserError(f"{path} has no function {name!r}{near}")
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError as error:
        given = f"--tensor {', '.join(names)}" if names else "no --tensor"
        raise UserError(f"{target} cannot be called with {given}: {error}") from None
    return function


@contextmanager
def neighbours_of(target: str) -> Iterator[None]:
    """Inside, what is traced can import the modules beside its file, as when the file is run, and its own package.

    Args:
        target: ``FILE.py:FUNCTION``.

    Raises:
        UserError: for a target without a colon, or a file that is not there.
    """
    with user_file.importable(_file_and_function(target)[0]):
        yield


def _file_and_function(target: str) -> tuple[Path, str]:
    path_text, colon, name = target.rpartition(":")
    if not colon or not name:
        raise UserError(f"expected FILE.py:FUNCTION, got {target!r}")
    path = Path(path_text)
    if not path.is_file():
        raise UserError(f"no file {path_text!r}; expected FILE.py:FUNCTION, the file from here ({Path.cwd()})")
    return path, name


@dataclass(frozen=True)
class Conditions:
    """Under what a callable runs.

    Attributes:
        device: ``cpu`` or ``cuda``: where factory functions without a device put tensors, and autocast's device.
        autocast: its dtype, or None.
        inference_mode: whether to run under ``torch.inference_mode``.
        backward: whether to go on with ``sum().backward()`` of what the callable returns; a complex tensor's real and
            imaginary parts are summed.
        vmap: map over the first dimension of every tensor given.
        compile: run what ``torch.compile`` makes of the callable.
    """

    device: str = "cpu"
    autocast: torch.dtype | None = None
    inference_mode: bool = False
    backward: bool = False
    vmap: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        if self.backward and self.inference_mode:
            raise UserError("--backward and --inference-mode exclude each other: inference mode records no graph")

    def prepare(self, function: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> Callable[[], Any]:
        """Everything that comes before the call to be traced; what is returned makes that call and returns its result.

        With ``compile`` the callable runs once here, so that the trace holds the compiled call and not the compiler.

        Raises:
            UserError: when there is nothing to map over, or (from what is returned) nothing to go backward from, or a
                generator or coroutine came back, of which nothing ran.
        """
        if self.vmap:
            function = _mapped(function, tensors)
        if self.compile:
            function = torch.compile(function)
            self._run(function, tensors)
        return lambda: self._run(function, tensors)

    def _run(self, function: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> Any:
        for tensor in tensors.values():
            tensor.grad = None  # of an earlier call
        with ExitStack() as stack:
            for context in self._contexts():
                stack.enter_context(context)
            result = function(**tensors)
        _refuse_unrun(result)
        if self.backward:
            roots = [tensor for tensor in _tensors(result) if tensor.requires_grad]
            if not roots:
                raise UserError(
                    f"--backward: found no tensor that requires a gradient in the result, of type "
                    f"{type(result).__name__}; return one, alone or in tuples, lists, dictionaries and dataclasses"
                )
            torch.autograd.backward([_sum(root) for root in roots])
        return result

    def _contexts(self) -> list[AbstractContextManager[Any]]:
        contexts: list[AbstractContextManager[Any]] = []
        if self.device != "cpu":
            contexts.append(torch.device(self.device))
        if self.autocast is not None:
            contexts.append(torch.autocast(self.device, dtype=self.autocast))
        if self.inference_mode:
            contexts.append(torch.inference_mode())
        return contexts


def _mapped(function: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> Callable[..., Any]:
    if not tensors or any(tensor.dim() == 0 for tensor in tensors.values()):
        raise UserError(
            "--vmap maps over the first dimension of each --tensor: give at least one, each with a dimension"
        )
    names = list(tensors)

    def over_values(*values: torch.Tensor) -> Any:
        return function(**dict(zip(names, values, strict=True)))

    mapped = torch.vmap(over_values, randomness="different")
    return lambda **given: mapped(*given.values())


def _refuse_unrun(result: Any) -> None:
    kind = _UNRUN.get(type(result))
    if kind is None:
        return
    if isinstance(result, CoroutineType):
        result.close()  # or Python warns that it was never awaited
    raise UserError(
        f"the traced code returned {kind}, of which nothing ran; trace a function that runs it: "
        "list(…) of a generator, asyncio.run(…) of a coroutine"
    )


def _sum(root: torch.Tensor) -> torch.Tensor:
    """A real number to go backward from, which a complex sum is not."""
    return torch.view_as_real(root.resolve_conj()).sum() if root.is_complex() else root.sum()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):  # as the outputs of Hugging Face's models are, which are dataclasses too
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
