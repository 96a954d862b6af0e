"""What one step of a model computes and what it changes, so that two versions of the model can be compared.

A step may change more than it returns: arguments, parameters, buffers, attributes of modules, globals of the user's
files. Of these an observation has what is not the same after the step as before.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compile_bench.capture.collector import user_code_filter
from compile_bench.measure.accuracy import flat, has_rounding, output_names, vector
from compile_bench.targets.case import Case
from compile_bench.targets.overlay import user_modules
from compile_bench.targets.randomness import seed_everything
from compile_bench.targets.regional import reachable
from compile_bench.targets.target import FunctionModel, Target, tensors_in

# Where a program keeps more values than this, the last ones are looked at: a list grows at its end.
_MOST_VALUES = 100
_DEEPEST = 20
# Other classes may compute what they hold.
_MAPPINGS = (dict, defaultdict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, deque)
_OWN = vars(nn.Module()).keys()
# Larger tensors are told apart by the sum of their bits, which takes a tenth of the time.
_MOST_HASHED = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_READABLE = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
)
_PLAIN = (int, float, complex, str, type(None))  # bool is an int


@dataclass(frozen=True)
class State:
    """Where the attributes of a model's modules and the globals of the user's files hold numbers, and where tensors."""

    numbers: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observation:
    """The results of one step of a model."""

    # Outputs, gradients, also of arguments, and floating-point numbers that the step changed, as vectors of float64.
    values: dict[str, Tensor]
    signature: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of every output tensor
    state: State  # what attributes and globals hold after the step
    # What is equal or not, as text: integers, truth values, texts and lengths that Python holds.
    facts: dict[str, str] = field(default_factory=dict)
    # The same of tensors without floating-point numbers, where rounding may decide, as in argmax.
    chosen: dict[str, str] = field(default_factory=dict)


def observe(target: Target, call: Callable[..., Any], model: nn.Module, case: Case, *, graded: bool) -> Observation:
    """The results of one call; ``graded`` for arguments that need a gradient. The target's own arguments stay."""
    modules = _modules(model)
    _forget_gradients(modules)
    seed_everything(0)
    train = case.train and not target.is_step
    leaves: dict[int, Tensor] = {}

    def differentiable(value: Tensor) -> Tensor:
        """A copy, into which the model may write."""
        if not value.is_floating_point():
            return value
        return leaves.setdefault(id(value), value.detach().clone().requires_grad_()).clone()

    files = _files()  # what is imported while the step is compiled is not its state
    asked = target.with_own_arguments()
    with torch.set_grad_enabled(case.train or target.is_step):  # a step may do its own backward pass
        asked = asked.mapped(differentiable) if graded else asked
        before = {place: _mark(value) for place, value in _contents(modules, files, asked).items()}
        output = asked.forward(call)
    values, facts, chosen = _of_output(output)
    if train:
        asked.backward(output)
        values |= {name: vector(gradient).clone() for name, gradient in _gradients(modules, leaves.values()).items()}
        named = zip(output_names(output), tensors_in(output), strict=True)
        facts |= {f"{name}.requires_grad": str(tensor.requires_grad) for name, tensor in named}
    _forget_gradients(modules)
    for place, value in _contents(modules, files, asked).items():
        if place not in before or before[place] != _mark(value):
            _add(value, place, values, facts, chosen)
    signature = tuple((tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors_in(output))
    return Observation(values, signature, _state_of(modules, files), facts, chosen)


def _of_output(output: Any) -> tuple[dict[str, Tensor], dict[str, str], dict[str, str]]:
    values: dict[str, Tensor] = {}
    facts: dict[str, str] = {}
    chosen: dict[str, str] = {}
    for name, tensor in zip(output_names(output), tensors_in(output), strict=True):
        if has_rounding(tensor):
            values[name] = vector(tensor)
        else:
            chosen[name] = _text(tensor)
    others = (leaf for leaf in pytree.tree_leaves(output) if not isinstance(leaf, Tensor))
    for number, leaf in enumerate(others, 1):
        if isinstance(leaf, _PLAIN):
            _add(leaf, f"value {number} of the output", values, facts, chosen)
    if not values:
        flat(output)  # raises the error that says so
    return values, facts, chosen


def _add(value: Any, place: str, values: dict[str, Tensor], facts: dict[str, str], chosen: dict[str, str]) -> None:
    """Add what a step changed to the values, if it is a number with a rounding error, or to what is equal or not."""
    if isinstance(value, Tensor):
        if not has_rounding(value):
            chosen[place] = _text(value)
        elif bool(value.isfinite().all()):
            values[place] = vector(value).clone()
    elif isinstance(value, float) and math.isfinite(value):
        values[place] = torch.tensor([value], dtype=torch.float64, device="cpu")
    else:
        facts[place] = repr(value)


def _text(tensor: Tensor) -> str:
    """A tensor without floating-point numbers as text; one without dimensions like the number that it stands for."""
    if not tensor.ndim:
        return repr(tensor.item())
    digest = hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {digest[:8]}"


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose state a step may change, by path; those that a function reaches by its names among them."""
    if not isinstance(model, FunctionModel):
        return {"": model}
    others = [value for value in reachable(model.function) if isinstance(value, nn.Module) and value is not model]
    return {f"{type(module).__name__} {number}": module for number, module in enumerate(others, 1)}


def _forget_gradients(modules: Mapping[str, nn.Module]) -> None:
    for module in modules.values():
        module.zero_grad(set_to_none=True)


def _gradients(modules: Mapping[str, nn.Module], leaves: Iterable[Tensor]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {
        f"{path}.{name}".lstrip("."): parameter
        for path, module in modules.items()
        for name, parameter in module.named_parameters()
    }
    named |= {f"argument {number}": leaf for number, leaf in enumerate(leaves)}
    return {name: tensor.grad for name, tensor in named.items() if tensor.grad is not None}


def _mark(value: Any) -> Any:
    """What tells a value from the one that it becomes."""
    if not isinstance(value, Tensor):
        return repr(value)
    with torch.no_grad():
        bits = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
        bits = bits.resolve_neg().contiguous()
        bits = bits.view(torch.uint8) if bits.dtype == torch.bool else bits.view(_BITS[bits.element_size()])
        mark = zlib.crc32(bits.cpu().numpy().tobytes()) if bits.numel() <= _MOST_HASHED else int(bits.sum())
    return tuple(value.shape), value.dtype, mark


def _files() -> dict[str, ModuleType]:
    """The user's files, without those that Inductor writes and loads."""
    modules = user_modules(user_code_filter())
    return {
        name: module
        for name, module in modules.items()
        if module.__spec__ is not None and str(module.__file__).endswith(".py")
    }


def _contents(modules: Mapping[str, nn.Module], files: Mapping[str, ModuleType], target: Target) -> dict[str, Any]:
    """All numbers, texts and tensors that outlive a step, by place."""
    walk = _walk(modules, files)
    for path, module in _named(modules):
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            walk.visit(tensor, f"{path}.{name}")
    for number, value in enumerate((*target.args, *target.kwargs.values())):
        walk.visit(value, f"argument {number} after the call")
    return walk.contents


def _state_of(modules: Mapping[str, nn.Module], files: Mapping[str, ModuleType]) -> State:
    """Parameters and buffers are left out."""
    contents = {re.sub(r"\[-\d+\]", "[…]", place): value for place, value in _walk(modules, files).contents.items()}
    numbers = [place for place, value in contents.items() if isinstance(value, (int, float, complex))]
    return State(tuple(numbers), tuple(place for place, value in contents.items() if isinstance(value, Tensor)))


def _named(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with its path; without one, the name of its class."""
    seen: set[nn.Module] = set()
    for start, outer in modules.items():
        for path, module in outer.named_modules(seen):
            yield ".".join(filter(None, (start, path))) or type(module).__name__, module


def _walk(modules: Mapping[str, nn.Module], files: Mapping[str, ModuleType]) -> _Walk:
    """What the modules' attributes and the globals of the user's files hold."""
    walk = _Walk(frozenset(files))
    for path, module in _named(modules):
        for name, value in vars(module).items():
            if name not in _OWN:
                walk.visit(value, f"{path}.{name}")
    for file, namespace in files.items():
        for name, value in vars(namespace).items():
            if not name.startswith("__"):  # Dynamo's own among them
                walk.visit(value, f"{file}.{name}")
    return walk


class _Walk:
    """Collects what containers and objects of the user's classes hold, by place."""

    def __init__(self, modules: Collection[str]) -> None:
        self.contents: dict[str, Any] = {}
        self._modules = modules
        self._visited: dict[int, Any] = {}  # keeps what was visited, so that no other object gets its id

    def visit(self, value: Any, place: str, depth: int = 0) -> None:
        if isinstance(value, Tensor):
            if type(value) in (Tensor, nn.Parameter, nn.Buffer) and _has_bits(value):
                self.contents[place] = value
        elif isinstance(value, _PLAIN):
            self.contents[place] = value
        elif id(value) not in self._visited and depth < _DEEPEST:
            self._visited[id(value)] = value
            for inner, name in self._inside(value):
                self.visit(inner, f"{place}{name}", depth + 1)

    def _inside(self, value: Any) -> Iterator[tuple[Any, str]]:
        """What a container or an object holds, each with what its place adds."""
        if type(value) in (*_MAPPINGS, *_SEQUENCES):
            yield len(value), ", its length"
        if type(value) in _MAPPINGS:
            for number, (key, inner) in enumerate(islice(reversed(value.items()), _MOST_VALUES), 1):
                # Another key may be the number of an object, which differs from run to run.
                yield inner, f"[{key!r}]" if isinstance(key, str) else f"[-{number}]"
        elif type(value) in _SEQUENCES:
            for number, inner in enumerate(islice(reversed(value), _MOST_VALUES), 1):
                yield inner, f"[-{number}]"
        elif type(value).__module__ in self._modules and not isinstance(value, nn.Module):
            for name, inner in getattr(value, "__dict__", {}).items():
                yield inner, f".{name}"


def _has_bits(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be read as they are."""
    plain = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    return plain and tensor.dtype in _READABLE
