"""The one module over torch's private dispatcher API: tables, key sets, thread-local state, kernels, registration.

Everything here reads or edits the dispatcher of the running process; nothing outside this module touches a private
name of torch. :func:`missing_apis` says what a torch version lacks.
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
from typing import Any

import torch

SUPPORTED = "2.10 to 2.15"

_PRIVATE = (
    "DispatchKey",
    "DispatchKeySet",
    "DisableTorchFunctionSubclass",
    "TensorBase",
    "_ForceDispatchKeyGuard",
    "_current_autograd_node",
    "_dispatch_dump_table",
    "_dispatch_get_all_op_names",
    "_dispatch_get_computed_kernel_for_dispatch_key",
    "_dispatch_key_for_device",
    "_dispatch_keys",
    "_dispatch_keyset_full_after",
    "_dispatch_library",
    "_dispatch_tls_local_exclude_set",
    "_dispatch_tls_local_include_set",
    "_get_schema",
    "_storage_address",
)

# "CPU: fallthrough registered at /build/…/File.cpp:12 [backend fallback]"
_LINE = re.compile(r"^(\w+): (fallthrough )?registered at (.+):(\d+) \[(.+)\]$")
# Build machines and installations put their own folders before these.
_SOURCE_ROOT = re.compile(r"^.*/(?=(?:aten/src|torch/csrc|build/aten/src|c10|torchgen|torch)/)")


def missing_apis() -> list[str]:
    """The private names that this package needs and this torch does not have."""
    missing = [f"torch._C.{name}" for name in _PRIVATE if not hasattr(torch._C, name)]
    hooks = ("set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy")
    missing += [f"torch._C._dynamo.eval_frame.{n}" for n in hooks if not hasattr(torch._C._dynamo.eval_frame, n)]
    missing += [] if hasattr(torch._C._profiler, "_RecordFunctionFast") else ["torch._C._profiler._RecordFunctionFast"]
    missing += [] if hasattr(torch._library.custom_ops, "OPDEFS") else ["torch._library.custom_ops.OPDEFS"]
    missing += [] if hasattr(torch._C._FunctionBase, "_sequence_nr") else ["torch._C._FunctionBase._sequence_nr"]
    missing += [] if hasattr(torch._C._autograd, "_profiler_enabled") else ["torch._C._autograd._profiler_enabled"]
    if not missing:
        kernel = kernel_of("aten::add.Tensor", "CPU")
        missing += [] if hasattr(kernel, "call_boxed") else ["torch._C._SafeKernelFunction.call_boxed"]
        missing += [] if table("aten::add.Tensor") else ["the line format of torch._C._dispatch_dump_table"]
        strong = torch.result_type(torch.ones((), dtype=torch.float16), wrapped_number(0.5)) != torch.float16
        missing += ["wrapped numbers among saved tensors (grad_fn._saved_other)"] if strong else []
    return missing


def require_apis() -> None:
    """Refuse a torch whose dispatcher API moved.

    Raises:
        RuntimeError: naming what is missing and the versions that are supported.
    """
    if missing := missing_apis():
        raise RuntimeError(
            f"torch {torch.__version__} has no {', '.join(missing)}; dispatcher_trace supports torch {SUPPORTED}"
        )


@dataclass(frozen=True)
class Registration:
    """What one cell of an operator's dispatch table holds.

    Attributes:
        kind: in the dispatcher's own words: ``kernel``, ``autograd kernel``, ``math kernel`` (composite, differentiable
            through its parts), ``default backend kernel`` (composite, with a derivative of its own), ``backend
            fallback``.
        fallthrough: True where the dispatcher skips the key.
        file: source file of the registration, from the source tree's root on.
        line: line in it; 0 for a Python registration that gave none.
    """

    kind: str
    fallthrough: bool
    file: str
    line: int

    @property
    def torch_python(self) -> bool:
        """Whether the kernel is a Python function of torch's own, registered at this very key.

        Such a cell cannot be shimmed and put back. Torch keeps Python kernels in a second map, by operator and key,
        which it consults while a Python mode is active and which a removed registration does not leave: after the shims
        are gone, a fake tensor would find one of them there in place of, for example, a meta kernel. A kernel that a
        table shows under an alias key (``torch.library.custom_op``: composite, autograd) has its entry there under the
        alias, so a shim at the key itself collides with nothing.
        """
        return self.kind == "kernel" and self.file.startswith("torch/") and self.file.endswith(".py")

    @property
    def where(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"


_ANY_BACKEND = re.compile(r"^StartOf(\w+)(?:FunctionalityBackends|Backends)$")

# Read once: torch makes the mapping anew at every read, and an installation looks up 65,000 keys.
_KEYS: Mapping[str, Any] = torch._C.DispatchKey.__members__

Table = Mapping[str, Registration]


def tensor_constructor(name: str) -> Callable[..., Any]:
    """The method of torch's own tensor base class that makes a tensor of a Python subclass."""
    constructor: Callable[..., Any] = getattr(torch._C.TensorBase, name)
    return constructor


def without_subclass_code() -> AbstractContextManager[None]:
    """A context in which reading an attribute of a tensor subclass runs none of the subclass's own code."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return guard


def storage_address(tensor: torch.Tensor) -> int:
    """Where the tensor's storage is kept; 0 for a tensor without one.

    ``untyped_storage()`` would say the same, but leave a Python object behind that counts as a second owner: autograd
    then adds gradients out of place where it would have added them in place.
    """
    try:
        address: int = torch._C._storage_address(tensor)  # type: ignore[attr-defined]
        return address
    except (RuntimeError, NotImplementedError):  # sparse, nested and functorch's tensors have none to show
        return 0


def sequence_number(node: Any) -> int:
    """The number that an autograd node got when it was made, in the order of its thread."""
    number: int = node._sequence_nr()
    return number


def operators() -> list[str]:
    """Every registered operator with its overload, ``aten::add.Tensor``, sorted."""
    return sorted(torch._C._dispatch_get_all_op_names())


def table(operator: str) -> Table:
    """The dispatch table of one operator: key name to registration; empty for an unknown operator."""
    return _parse_table(torch._C._dispatch_dump_table(operator))


def custom_kernel_at(operator: str) -> str:
    """``file:line`` of the function that ``torch.library.custom_op`` made the operator from; empty for others.

    The table names the line of torch that registers all such operators.
    """
    definition = torch._library.custom_ops.OPDEFS.get(operator.partition(".")[0])
    if definition is None:
        return ""
    code = inspect.unwrap(definition._init_fn).__code__
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno}"


@functools.lru_cache(maxsize=8192)
def _parse_table(text: str) -> Table:
    """Cached by the dump's text, so that a changed registration is never served from an old entry."""
    cells = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            key, fallthrough, file, number, kind = match.groups()
            cells[key] = Registration(kind, fallthrough is not None, _SOURCE_ROOT.sub("", file), int(number))
    return cells


def dumps() -> dict[str, str]:
    """The dispatcher's own dump of every operator's table, to compare before and after."""
    return {operator: torch._C._dispatch_dump_table(operator) for operator in operators()}


def is_operator(operator: str) -> bool:
    """Whether the dispatcher knows that name with that overload."""
    return bool(torch._C._dispatch_dump_table(operator))


def table_of(operator: str) -> Table:
    """The static dispatch table of an operator.

    Raises:
        ValueError: for an operator that does not exist, with near names.
    """
    if not is_operator(operator):
        near = near_names(operator, operators())
        raise ValueError(f"no operator {operator!r}{near}")
    return table(operator)


_MOST_NEAR_NAMES = 6


def near_names(wanted: str, known: Sequence[str]) -> str:
    """``; near names: a, b`` or nothing, for an error message.

    Names are compared without namespace too, so that ``add.tensor`` finds ``aten::add.Tensor``.
    """
    folded: dict[str, str] = {}
    for name in known:
        folded[name.lower()] = name
        folded.setdefault(name.partition("::")[2].lower(), name)
    close = difflib.get_close_matches(wanted.lower(), folded, n=5, cutoff=0.6)
    # Without its overload an operator is nearer than any other name, however many letters the overload has.
    overloads = [name for key, name in folded.items() if key.partition(".")[0] == wanted.lower()]
    names = list(dict.fromkeys([*overloads, *(folded[match] for match in close)]))[:_MOST_NEAR_NAMES]
    return f"; near names: {', '.join(names)}" if names else ""


def schema(operator: str) -> Any:
    """The operator's ``torch._C.FunctionSchema``."""
    name, _, overload = operator.partition(".")
    return torch._C._get_schema(name, overload)


def known_key(name: str) -> bool:
    """Whether Python can name that dispatch key; a few keys of the table are not bound."""
    return name in _KEYS


def kernel_of(operator: str, key: str) -> Any:
    """The kernel that the table holds for (operator, key); its ``call_boxed(keyset, *args, **kwargs)`` runs it."""
    member = _KEYS[key]
    return torch._C._dispatch_get_computed_kernel_for_dispatch_key(operator, member)


def registrar(namespace: str) -> Any:
    """A library handle: ``impl(name, key, function, True)`` registers a Python kernel that is handed the key set.

    Its ``reset()`` takes back everything it registered. It is the object below ``torch.library.Library``, whose own
    ``impl`` spends most of its time on book-keeping that 60,000 registrations have no use for.
    """
    return torch._C._dispatch_library("IMPL", namespace, "")


# -- key sets ---------------------------------------------------------------------------------------------------------
# A key set travels through this package as the integer of its bits: comparable, hashable, and JSON.

KeyBits = int


def key_set(bits: KeyBits) -> Any:
    """The ``DispatchKeySet`` of these bits."""
    return torch._C.DispatchKeySet.from_raw_repr(bits)


def bits_of(*names: str) -> KeyBits:
    """The bits of the set that holds these keys."""
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(_KEYS[name]).raw_repr()
    return bits


@functools.lru_cache(maxsize=65536)
def key_names(bits: KeyBits) -> tuple[str, ...]:
    """The keys of a set, highest priority first.

    A set is functionality bits and backend bits; like the dispatcher this gives each per-backend functionality the
    highest backend present, so two backends in one set show as the higher.
    """
    names = []
    remaining = key_set(bits)
    while (key := remaining.highestPriorityTypeId()) != torch._C.DispatchKey.Undefined:
        if known_key(key.name):  # a few keys have no name in Python
            # A functionality in a set without any backend, as in what a thread excludes.
            names.append(_ANY_BACKEND.sub(r"\1", key.name))
        without = remaining.remove(key)
        if without.raw_repr() == remaining.raw_repr():
            break
        remaining = without
    return tuple(names)


def keys_of(tensor: torch.Tensor) -> KeyBits:
    """The dispatch keys that a tensor carries."""
    return torch._C._dispatch_keys(tensor).raw_repr()


@functools.lru_cache(maxsize=1024)
def as_inference_tensor(keys: KeyBits) -> KeyBits:
    """The keys of a tensor had it been made under ``torch.inference_mode``: without autograd and ADInplaceOrView."""
    for key in key_names(keys):
        if key == "ADInplaceOrView" or key.startswith("Autograd"):
            keys = without(keys, key)
    return keys


def tls_included() -> KeyBits:
    """The keys that this thread adds to every key set."""
    return torch._C._dispatch_tls_local_include_set().raw_repr()


def tls_excluded() -> KeyBits:
    """The keys that this thread takes out of every key set."""
    return torch._C._dispatch_tls_local_exclude_set().raw_repr()


def computed(carried: KeyBits, included: KeyBits, excluded: KeyBits) -> KeyBits:
    """The dispatcher's formula for a call: (carried ∪ included) − excluded (``computeDispatchKeySet`` in c10)."""
    return ((key_set(carried) | key_set(included)) - key_set(excluded)).raw_repr()


@functools.lru_cache(maxsize=65536)
def without(bits: KeyBits, key: str) -> KeyBits:
    """The set without one key; backend bits stay."""
    return key_set(bits).remove(_KEYS[key]).raw_repr()


@functools.lru_cache(maxsize=65536)
def below(bits: KeyBits, key: str) -> KeyBits:
    """The part of a set that has lower priority than ``key``."""
    return (key_set(bits) & torch._C._dispatch_keyset_full_after(_KEYS[key])).raw_repr()


def backend_key(device_type: str) -> str:
    """``"cuda"`` → ``"CUDA"``."""
    return torch._C._dispatch_key_for_device(device_type)


def running_node() -> Any:
    """The autograd node whose backward runs on this thread, or None."""
    return torch._C._current_autograd_node()


# -- torch.compile ----------------------------------------------------------------------------------------------------


def hide_from_compiler(function: Callable[..., Any]) -> None:
    """Have Dynamo leave every call of this function's code alone, and whatever Python it calls in turn."""
    hooks = torch._C._dynamo.eval_frame
    skip = hooks._FrameAction.SKIP
    hooks.set_code_exec_strategy(function.__code__, hooks._FrameExecStrategy(skip, skip))


# -- the profiler -----------------------------------------------------------------------------------------------------

OWN_WORK = "dispatcher_trace's own work"


def own_work() -> AbstractContextManager[Any]:
    """A span of that name in a running profile: operators inside it are the tracer's, not the user's."""
    return torch._C._profiler._RecordFunctionFast(OWN_WORK)


def profiler_enabled() -> bool:
    """Whether a profiler is running in this process."""
    return torch._C._autograd._profiler_enabled()


# -- numbers that stand for tensors -----------------------------------------------------------------------------------

# What making a wrapped number calls with that very number.
WRAPPING_OPERATORS = ("aten::mul.Tensor", "aten::to.dtype", "aten::_to_copy", "aten::copy_")


def differentiating() -> bool:
    """Whether the innermost functorch transform of this thread is ``grad``, ``vjp`` or ``jvp``."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    return interpreter is not None and interpreter.key() in (kinds.Grad, kinds.Jvp)


def plain_number(value: complex, wrapped: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A zero-dimensional tensor that does among these operands what a wrapped number does; None if there is none.

    It has to promote them to the same dtype and reach the kernel with the same value. Among operands with dimensions
    one of the widest dtype of its kind is as weak as a wrapped number. Among zero-dimensional ones it has to have the
    dtype that the operation has anyway, and, as kernels compute half precision in single, to hold the value exactly.

    Args:
        value: the number.
        wrapped: the same as a wrapped number.
        operands: the other tensors of the call.
    """
    with _outside_transforms():
        like = [torch.empty((1,) * min(operand.dim(), 1), dtype=operand.dtype) for operand in operands]
        meant = _promoted(like, wrapped)
        for dtype in (wrapped.dtype, meant):
            plain = torch.tensor(value, dtype=dtype)
            half = dtype in (torch.float16, torch.bfloat16)
            if _promoted(like, plain) == meant and not (half and plain.item() != value):
                return plain
    return None


def _promoted(operands: Sequence[torch.Tensor], number: torch.Tensor) -> torch.dtype:
    return functools.reduce(torch.promote_types, [torch.result_type(operand, number) for operand in operands])


def wrapped_number(value: complex) -> torch.Tensor:
    """The tensor that torch's C++ makes of a Python number: zero dimensions, and weak in type promotion.

    A Python kernel is handed such an argument as a plain number, and ``call_boxed`` refuses a number where the schema
    says Tensor. A zero-dimensional tensor in its place would change results: ``x / 2.0`` with a zero-dimensional
    float32 ``x`` stays float32 only because the wrapped 2.0 is weak. Torch has no public way to make one; the tensor
    that a multiplication saved for its backward is one. :data:`WRAPPING_OPERATORS` must not be shimmed while this runs.

    Args:
        value: int, float, bool or complex.
    """
    with _outside_transforms(), torch.inference_mode(False), torch.enable_grad():
        factor = torch.ones((), dtype=torch.float64, device="cpu", requires_grad=True)
        return (factor * value).grad_fn._saved_other  # type: ignore[union-attr]


Symbol = torch.SymInt | torch.SymFloat | torch.SymBool
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
Number = complex | Symbol


def wrapped_symbol(symbol: Symbol) -> torch.Tensor:
    """The tensor that torch's C++ makes of a size that is not known yet (``x * x.shape[0]`` under symbolic tracing).

    It is a wrapped number of the symbol's kind whose value nobody reads: whoever unwraps it takes the symbol from an
    attribute of its Python object. As for :func:`wrapped_number`, :data:`WRAPPING_OPERATORS` must not be shimmed.

    Args:
        symbol: what the number is.
    """
    stand_in = {torch.SymInt: 7777777, torch.SymFloat: float("nan"), torch.SymBool: True}[type(symbol)]
    number = wrapped_number(stand_in)
    number._wrapped_number = symbol  # type: ignore[attr-defined]
    return number


def _outside_transforms() -> AbstractContextManager[None]:
    """The thread state of ordinary code, without what functorch and modes include or exclude."""
    guard: Callable[..., Any] = torch._C._ForceDispatchKeyGuard
    return guard(key_set(bits_of("BackendSelect", "ADInplaceOrView")), key_set(0))
