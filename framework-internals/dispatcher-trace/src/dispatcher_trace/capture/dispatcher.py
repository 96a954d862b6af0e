"""The dispatcher of this process, through torch's private API: tables, kernels, registration, autograd nodes.

Together with :mod:`~dispatcher_trace.capture.key_sets` and :mod:`~dispatcher_trace.capture.wrapped_numbers` this is
where the package uses private names of torch. :func:`missing_apis` names those that a torch version lacks.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dispatcher_trace.capture import wrapped_numbers
from dispatcher_trace.capture.key_sets import bits_of, key_member, key_set

_T = TypeVar("_T")

SUPPORTED = "2.10 to 2.15"

_PRIVATE = (
    "DispatchKey",
    "DispatchKeySet",
    "DisableTorchFunction",
    "TensorBase",
    "_ForceDispatchKeyGuard",
    "_current_autograd_node",
    "_dispatch_dump_table",
    "_dispatch_find_dangling_impls",
    "_dispatch_get_all_op_names",
    "_dispatch_get_computed_kernel_for_dispatch_key",
    "_dispatch_has_kernel_for_any_dispatch_key",
    "_dispatch_has_kernel_for_dispatch_key",
    "_dispatch_key_for_device",
    "_dispatch_keys",
    "_dispatch_keyset_full_after",
    "_dispatch_library",
    "_dispatch_tls_local_exclude_set",
    "_dispatch_tls_local_include_set",
    "_get_schema",
    "_pop_torch_dispatch_stack",
    "_push_on_torch_dispatch_stack",
    "_storage_address",
)

# "CPU: fallthrough registered at /build/…/File.cpp:12 [backend fallback]"
_LINE = re.compile(r"^(\w+): (fallthrough )?registered at (.+):(\d+) \[(.+)\]$")
# Build machines and installations put their own folders before these.
_SOURCE_ROOT = re.compile(r"^.*/(?=(?:aten/src|torch/csrc|build/aten/src|c10|torchgen|torch)/)")
_MAX_NEAR_NAMES = 6


def missing_apis() -> list[str]:
    """The private names that this package needs and this torch does not have."""
    missing = [f"torch._C.{name}" for name in _PRIVATE if not hasattr(torch._C, name)]
    hooks = ("set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy")
    missing += [f"torch._C._dynamo.eval_frame.{n}" for n in hooks if not hasattr(torch._C._dynamo.eval_frame, n)]
    missing += [] if hasattr(torch._C._profiler, "_RecordFunctionFast") else ["torch._C._profiler._RecordFunctionFast"]
    missing += [] if hasattr(torch._library.custom_ops, "OPDEFS") else ["torch._library.custom_ops.OPDEFS"]
    missing += [] if hasattr(torch._C._FunctionBase, "_sequence_nr") else ["torch._C._FunctionBase._sequence_nr"]
    forward = hasattr(torch.autograd.forward_ad, "_current_level")
    missing += [] if forward else ["torch.autograd.forward_ad._current_level"]
    missing += [] if hasattr(torch._C._autograd, "_profiler_enabled") else ["torch._C._autograd._profiler_enabled"]
    missing += [] if hasattr(torch._ops, "get_cached_ops") else ["torch._ops.get_cached_ops"]
    if not missing:
        kernel = kernel_of("aten::add.Tensor", "CPU")
        missing += [] if hasattr(kernel, "call_boxed") else ["torch._C._SafeKernelFunction.call_boxed"]
        missing += [] if table("aten::add.Tensor") else ["the line format of torch._C._dispatch_dump_table"]
        missing += [] if a_wrapped_number() is not None else [f"the question for {wrapped_numbers.ASKED_FOR}"]
    return missing


def require_apis() -> None:
    """Refuse a torch without the private API that this package needs.

    Raises:
        RuntimeError: Naming what is missing and the supported versions.
    """
    if missing := missing_apis():
        raise RuntimeError(
            f"torch {torch.__version__} has no {', '.join(missing)}; dispatcher_trace supports torch {SUPPORTED}"
        )


# -- tables and kernels -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registration:
    """One cell of an operator's dispatch table.

    Attributes:
        kind: The dispatcher's own term: ``kernel``, ``autograd kernel``, ``math kernel`` (composite; differentiable
            through the operators that it calls), ``default backend kernel`` (composite; has its own derivative),
            ``backend fallback``.
        fallthrough: Whether the dispatcher skips the key.
        file: Source file of the registration, relative to the root of the source tree.
        line: Line in the file; 0 for a Python registration without one.
        unwatched: Whether a trace leaves the kernel without a shim although its key is watched.
    """

    kind: str
    fallthrough: bool
    file: str
    line: int
    unwatched: bool = False

    @property
    def python(self) -> bool:
        """Whether the kernel is a Python function that is registered at this very key.

        A kernel that the table shows under an alias key (``torch.library.custom_op``: composite, autograd) is none:
        torch's second map has it under the alias (:mod:`~dispatcher_trace.capture.python_kernels`), so a shim at the
        key itself does not collide with it.
        """
        return self.kind == "kernel" and self.file.endswith(".py")

    @property
    def torchs_own(self) -> bool:
        """Whether a Python kernel is torch's own (meta kernels, ``prims``), and not given to ``torch.library``."""
        return self.file.startswith("torch/") and not self.file.startswith(("torch/library.py", "torch/_library/"))

    @property
    def where(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"


Table = Mapping[str, Registration]


def operators() -> list[str]:
    """All defined operators with their overloads (``aten::add.Tensor``), sorted.

    One that has only kernels is left out: the library that defined it is gone.
    """
    undefined = {dump.partition("\n")[0].removeprefix("name: ") for dump in torch._C._dispatch_find_dangling_impls()}
    return sorted(set(torch._C._dispatch_get_all_op_names()) - undefined)


def defined(operator: str) -> bool:
    """Whether there is an operator of that name with its overload."""
    try:
        schema(operator)
    except RuntimeError:
        return False
    return True


def table(operator: str) -> Table:
    """The dispatch table of an operator, by the names of the keys; empty for an unknown operator."""
    lines = torch._C._dispatch_dump_table(operator).splitlines()
    return dict(cell for cell in map(_cell, lines) if cell is not None)


def table_of(operator: str) -> Table:
    """The dispatch table of an operator, by the names of the keys.

    Raises:
        ValueError: If there is no such operator; the message has near names.
    """
    try:
        known = table(operator)
    except RuntimeError:  # torch cannot read the name
        known = {}
    if not known:
        # What Python calls torch.ops.aten.add.Tensor, or torch.add
        name = operator.strip().removeprefix("torch.").removeprefix("ops.").removesuffix(".default")
        namespace, _, rest = name.partition(".")
        names = operators()
        if any(other.startswith(f"{namespace}::") for other in names):
            name = f"{namespace}::{rest}"
        raise ValueError(f"no operator {operator!r}{near_names(name, names)}")
    return known


def near_names(wanted: str, known: Sequence[str]) -> str:
    """``; near names: a, b`` for an error message, or nothing.

    Names are also compared without namespace, so that ``add.tensor`` finds ``aten::add.Tensor``.
    """
    by_key: dict[str, str] = {}
    for name in known:
        by_key[name.lower()] = name
        by_key.setdefault(name.partition("::")[2].lower(), name)
    close = difflib.get_close_matches(wanted.lower(), by_key, n=5, cutoff=0.6)
    # The overloads of an operator come first: difflib would count the letters of a long overload against them.
    overloads = [name for key, name in by_key.items() if key.partition(".")[0] == wanted.lower()]
    names = list(dict.fromkeys([*overloads, *(by_key[match] for match in close)]))[:_MAX_NEAR_NAMES]
    return f"; near names: {', '.join(names)}" if names else ""


def custom_kernel_at(operator: str) -> str:
    """``file:line`` of the function that ``torch.library.custom_op`` made the operator from; empty for others.

    The dispatch table names the line of torch that registers all such operators.
    """
    definition = torch._library.custom_ops.OPDEFS.get(operator.partition(".")[0])
    if definition is None:
        return ""
    code = inspect.unwrap(definition._init_fn).__code__
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno}"


@functools.lru_cache(maxsize=2**17)
def _cell(line: str) -> tuple[str, Registration] | None:
    """Key and cell of a line of a dump. Most lines, those of backend fallbacks, are the same for all operators."""
    if (match := _LINE.match(line)) is None:
        return None
    key, fallthrough, file, number, kind = match.groups()
    return key, Registration(kind, fallthrough is not None, _SOURCE_ROOT.sub("", file), int(number))


def dumps() -> dict[str, str]:
    """The dispatcher's own dump of every table, by operator, to compare before and after."""
    return {operator: torch._C._dispatch_dump_table(operator) for operator in operators()}


def schema(operator: str) -> Any:
    """The operator's ``torch._C.FunctionSchema``."""
    name, _, overload = operator.partition(".")
    return torch._C._get_schema(name, overload)


def kernel_of(operator: str, key: str) -> Any:
    """The kernel at (operator, key); its ``call_boxed(keyset, *args, **kwargs)`` runs it."""
    return torch._C._dispatch_get_computed_kernel_for_dispatch_key(operator, key_member(key))


NO_FILE = "/dev/null"


def registrar(namespace: str) -> Any:
    """A library handle: ``impl(name, key, function, True)`` registers a Python kernel that gets the key set.

    The table shows its kernels as registered at :data:`NO_FILE`. Its ``reset()`` removes everything that it registered.
    It is the object inside ``torch.library.Library``, whose own ``impl`` would spend most of 60,000 registrations on
    bookkeeping that they do not need.
    """
    return torch._C._dispatch_library("IMPL", namespace, "")


# -- tensors and autograd nodes ---------------------------------------------------------------------------------------


def without_torch_function() -> AbstractContextManager[None]:
    """A context in which reading an attribute of a tensor runs no ``__torch_function__`` of a subclass or a mode."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return guard


def own_fact(name: str) -> Callable[[torch.Tensor], Any]:
    """What reads an attribute of a tensor, or calls a method without arguments, past what subclasses have of that name.

    Args:
        name: Of torch's tensor base class.
    """
    member = inspect.getattr_static(torch._C.TensorBase, name)
    read: Callable[[torch.Tensor], Any] = member if callable(member) else member.__get__
    return read


class AskedForSubclassCode(RuntimeError):
    """Instead of a question to the ``__torch_dispatch__`` of a subclass."""


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, *_: Any) -> Any:
        raise AskedForSubclassCode


_refusing = _Refusing()  # type: ignore[no-untyped-call]


def without_torch_dispatch(read: Callable[[torch.Tensor], _T], tensor: torch.Tensor) -> _T:
    """What a function reads from a tensor where a question to the ``__torch_dispatch__`` of a subclass raises.

    A subclass may answer itself what its sizes, strides and device are. Its code would run at each hop, and could
    raise. A mode is asked before it.

    Raises:
        AskedForSubclassCode: Instead of the question.
    """
    try:  # around the first line too: the handler of a signal may raise when it returns
        torch._C._push_on_torch_dispatch_stack(_refusing)
        return read(tensor)
    finally:
        torch._C._pop_torch_dispatch_stack(None)


@functools.cache
def a_wrapped_number() -> torch.Tensor | None:
    """The tensor of some number; None if torch no longer asks it for the number that Python gets.

    To be called first without shims.
    """
    tensor = wrapped_numbers.wrapped_number()
    wrapped_numbers.watch_conversions()
    try:
        number = kernel_of("aten::zero_", "CPU").call_boxed(key_set(bits_of("CPU")), tensor)  # returns the tensor
        return wrapped_numbers.tensors_of([number])[0]
    finally:
        wrapped_numbers.stop_watching()


def storage_address(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage object; 0 for a tensor without storage.

    ``untyped_storage()`` would also make a Python object that counts as a second owner of the storage. Autograd then
    adds gradients out of place instead of in place.
    """
    try:
        address: int = torch._C._storage_address(tensor)  # type: ignore[attr-defined]
        return address
    except (RuntimeError, NotImplementedError):  # sparse, nested and functorch tensors
        return 0


def running_node() -> Any:
    """The autograd node whose backward runs on this thread, or None."""
    return torch._C._current_autograd_node()


def node_name(node: Any) -> str:
    """The name of an autograd node, from its type: ``ctx.name = …`` in a function of the user's hides the method."""
    name: str = type(node).name(node)
    return name.removeprefix("torch::autograd::")


def sequence_number(node: Any) -> int:
    """The sequence number of an autograd node: the order in which its thread made the nodes."""
    number: int = type(node)._sequence_nr(node)
    return number


# -- torch.compile and the profiler -----------------------------------------------------------------------------------


def hide_from_compiler(function: Callable[..., Any]) -> None:
    """Make Dynamo skip every call of this function's code, and all Python code that the function calls."""
    hooks = torch._C._dynamo.eval_frame
    skip = hooks._FrameAction.SKIP
    hooks.set_code_exec_strategy(function.__code__, hooks._FrameExecStrategy(skip, skip))


OWN_WORK = "dispatcher_trace's own work"


def own_work() -> AbstractContextManager[Any]:
    """A span named :data:`OWN_WORK` in a running profile: the operators inside it are the tracer's, not the user's."""
    return torch._C._profiler._RecordFunctionFast(OWN_WORK)


def profiler_enabled() -> bool:
    """Whether a profiler runs in this process."""
    return torch._C._autograd._profiler_enabled()
