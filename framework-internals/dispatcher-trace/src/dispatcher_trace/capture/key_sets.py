"""Dispatch key sets, as the integers of their bits (comparable, hashable, JSON), and the keys that a trace watches."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch

KeyBits = int

PYTHON_DISPATCHER = "PythonDispatcher"

_ANY_BACKEND = re.compile(r"^StartOf(\w+)(?:FunctionalityBackends|Backends)$")

# Read once: torch makes a new mapping at every access, and an installation looks up 65,000 keys.
_KEYS: Mapping[str, Any] = torch._C.DispatchKey.__members__


def known_key(name: str) -> bool:
    """Whether Python has a name for that dispatch key; a few keys of the tables have none."""
    return name in _KEYS


def key_member(name: str) -> Any:
    """The ``torch._C.DispatchKey`` of that name."""
    return _KEYS[name]


def key_set(bits: KeyBits) -> Any:
    """The ``DispatchKeySet`` of these bits."""
    return torch._C.DispatchKeySet.from_raw_repr(bits)


def bits_of(*names: str) -> KeyBits:
    """The bits of the set of these keys."""
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(_KEYS[name]).raw_repr()
    return bits


@functools.lru_cache(maxsize=65536)
def key_names(bits: KeyBits) -> tuple[str, ...]:
    """The keys of a set, highest priority first.

    A set has functionality bits and backend bits. Like the dispatcher, this combines each per-backend functionality
    with the highest backend in the set, so two backends in one set show as the higher one.
    """
    names = []
    remaining = key_set(bits)
    while (key := remaining.highestPriorityTypeId()) != torch._C.DispatchKey.Undefined:
        if known_key(key.name):
            # A set without any backend, such as a thread's exclude set, has the functionality under another name.
            names.append(_ANY_BACKEND.sub(r"\1", key.name))
        without = remaining.remove(key)
        if without.raw_repr() == remaining.raw_repr():
            break
        remaining = without
    return tuple(names)


def keys_of(tensor: torch.Tensor) -> KeyBits:
    """The dispatch keys of a tensor."""
    return torch._C._dispatch_keys(tensor).raw_repr()


def tls_included() -> KeyBits:
    """The include set of this thread: the keys that it adds to every key set."""
    return torch._C._dispatch_tls_local_include_set().raw_repr()


def tls_excluded() -> KeyBits:
    """The exclude set of this thread: the keys that it removes from every key set."""
    return torch._C._dispatch_tls_local_exclude_set().raw_repr()


def computed(carried: KeyBits, included: KeyBits, excluded: KeyBits) -> KeyBits:
    """The key set of a call: (carried ∪ included) − excluded (``computeDispatchKeySet`` in c10).

    Args:
        carried: Union of the arguments' keys.
        included: The thread's include set.
        excluded: The thread's exclude set.
    """
    return ((key_set(carried) | key_set(included)) - key_set(excluded)).raw_repr()


@functools.lru_cache(maxsize=65536)
def without(bits: KeyBits, key: str) -> KeyBits:
    """The set without one key; backend bits stay."""
    return key_set(bits).remove(_KEYS[key]).raw_repr()


@functools.lru_cache(maxsize=65536)
def below(bits: KeyBits, key: str) -> KeyBits:
    """The keys of a set that have lower priority than ``key``."""
    return (key_set(bits) & torch._C._dispatch_keyset_full_after(_KEYS[key])).raw_repr()


def backend_key(device_type: str) -> str:
    """``"cuda"`` → ``"CUDA"``."""
    return torch._C._dispatch_key_for_device(device_type)


# -- the keys that a trace watches ------------------------------------------------------------------------------------

Scope = Literal["all", "core"]
"""Which keys a trace watches; see :func:`watched_keys`."""

_LAYOUTS = ("", "Quantized", "Sparse", "SparseCsr", "NestedTensor")
_CORE_FUNCTIONALITIES = ("ADInplaceOrView", "BackendSelect", "AutogradOther", "AutogradNestedTensor")
_MODES = (
    "Python",
    "PythonTLSSnapshot",
    "Functionalize",
    "Conjugate",
    "Negative",
    "ZeroTensor",
    "FuncTorchBatched",
    "FuncTorchGradWrapper",
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchVmapMode",
)


def watched_keys(scope: Scope) -> frozenset[str]:
    """The keys that get shims.

    Args:
        scope: ``"core"``: the backends of this machine and the keys directly above them (autograd, views, autocast,
            BackendSelect); installs in one second. ``"all"``: also meta tensors, Python modes and subclasses,
            functorch, functionalization, conjugate and negative views; installs in three seconds.

    Raises:
        ValueError: For another scope.
    """
    if scope not in ("all", "core"):
        raise ValueError(f"scope takes 'all' or 'core', got {scope!r}")
    backends = ["CPU", *(["CUDA"] if torch.cuda.is_available() else [])]
    names = set(_CORE_FUNCTIONALITIES)
    for backend in backends:
        names |= {backend, f"Autograd{backend}", f"Autocast{backend}"}
    if scope == "all":
        names |= {*_MODES, "Meta", "AutogradMeta"}
        names |= {f"{layout}{backend}" for layout in _LAYOUTS for backend in backends}
    return frozenset(name for name in names if known_key(name))


def unwatched_keys(scope: Scope) -> tuple[str, ...]:
    """The keys that a trace of that scope does not see.

    Operators without a tensor and without a backend (``aten::promote_types``) run at ``Undefined``. A registration
    there would be one for every key.
    """
    unseen = ["Tracer", "PreDispatch", PYTHON_DISPATCHER, "Undefined"]
    return (*unseen, *(_MODES if scope == "core" else ()))
