"""Which dispatch keys a trace watches."""

from __future__ import annotations

from typing import Literal

import torch

from dispatcher_trace.capture import key_sets

Scope = Literal["all", "core"]

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
    return frozenset(name for name in names if key_sets.known_key(name))


def unwatched_keys(scope: Scope) -> tuple[str, ...]:
    """The keys that a trace of that scope does not see.

    Operators without a tensor and without a backend (``aten::promote_types``) run at ``Undefined``. A registration
    there would be one for every key.
    """
    unseen = ["Tracer", "PreDispatch", "PythonDispatcher", "Undefined"]
    return (*unseen, *(_MODES if scope == "core" else ()))
