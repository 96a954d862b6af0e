"""What a change may do that outputs and gradients do not show for the inputs of a trial."""

from __future__ import annotations

import difflib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compile_bench.capture.collector import user_code_filter
from compile_bench.targets.overlay import Overlay, user_modules

# Where a program keeps more values than this, the last ones are looked at: a list grows at its end.
_MOST_VALUES = 100
_DEEPEST = 20
# Other classes may compute what they hold.
_MAPPINGS = (dict, defaultdict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, deque)


class SidesCompared(TorchFunctionMode):
    """Inside, both sides of every ``torch.where`` that an overlay adds have to be alike in shape and dtype.

    ``torch.where`` broadcasts its sides and promotes their dtypes. The branch that it replaces gave one of them as is.
    """

    def __init__(self, overlay: Overlay) -> None:
        super().__init__()
        self.difference = ""  # the first one, in one sentence; empty if there is none
        self._lines = {(file, line) for file, content in overlay.items() for line in _changed_lines(file, content)}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, and look at the sides if it chooses between the sides of a branch."""
        result = func(*args, **(kwargs or {}))
        if func is torch.where and len(args) == 3 and not self.difference:
            caller = sys._getframe(1)
            if (caller.f_code.co_filename, caller.f_lineno) in self._lines:
                self.difference = _unlike(args[1:], result)
        return result


def _unlike(sides: tuple[Any, ...], chosen: Tensor) -> str:
    first, other = (_described(side) for side in sides)
    if first == other and first in ("a number", _described(chosen)) and (first != "a number" or not chosen.ndim):
        return ""
    return f"the branch gives {first} or {other}, and torch.where gives {_described(chosen)}"


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "a number"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _changed_lines(file: str, content: bytes) -> Iterator[int]:
    matcher = difflib.SequenceMatcher(None, Path(file).read_bytes().splitlines(), content.splitlines(), autojunk=False)
    for tag, _, _, start, end in matcher.get_opcodes():
        if tag != "equal":
            yield from range(start + 1, end + 1)


@dataclass(frozen=True)
class State:
    """Where the attributes of a model's modules and the globals of the user's files hold numbers, and where tensors."""

    numbers: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()


def state_of(model: nn.Module) -> State:
    """The state of a model; parameters and buffers are left out."""
    modules, own = user_modules(user_code_filter()), vars(nn.Module()).keys()
    owners = [(type(module).__name__, vars(module), own) for module in model.modules()]
    owners += [(name, vars(module), {}.keys()) for name, module in modules.items()]
    walk = _Walk(frozenset(modules))
    for owner, values, left_out in owners:
        for name, value in values.items():
            if name not in left_out:
                walk.visit(value, f"{owner}.{name}")
    return State(tuple(walk.numbers), tuple(walk.tensors))


class _Walk:
    """Collects the places of numbers and tensors in containers and in objects of the user's classes."""

    def __init__(self, modules: Collection[str]) -> None:
        self.numbers: dict[str, None] = {}
        self.tensors: dict[str, None] = {}
        self._modules = modules
        self._visited: dict[int, Any] = {}  # keeps what was visited, so that no other object gets its id

    def visit(self, value: Any, place: str, depth: int = 0) -> None:
        if isinstance(value, Tensor):
            self.tensors[place] = None
        elif isinstance(value, (int, float, complex)):
            self.numbers[place] = None
        elif id(value) not in self._visited and depth < _DEEPEST:
            self._visited[id(value)] = value
            for inner, name in self._inside(value):
                self.visit(inner, f"{place}{name}", depth + 1)

    def _inside(self, value: Any) -> Iterator[tuple[Any, str]]:
        """What a container or an object holds, each with what its place adds."""
        if type(value) in _MAPPINGS:
            for key, inner in islice(reversed(value.items()), _MOST_VALUES):
                yield inner, f"[{key!r}]" if isinstance(key, str) else "[…]"
        elif type(value) in _SEQUENCES:
            for inner in islice(reversed(value), _MOST_VALUES):
                yield inner, "[…]"
        elif type(value).__module__ in self._modules and not isinstance(value, nn.Module):
            for name, inner in getattr(value, "__dict__", {}).items():
                yield inner, f".{name}"
