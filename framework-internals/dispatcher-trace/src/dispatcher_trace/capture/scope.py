"""Which dispatch keys a trace watches."""

from __future__ import annotations

from typing import Literal

import torch

from dispatcher_trace.capture import dispatcher

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
)


def watched_keys(scope: Scope) -> frozenset[str]:
    """The keys at which a shim is put.

    Args:
        scope: ``"core"``: the backends of this machine and what stands directly above them (autograd, views, autocast,
            BackendSelect): a second to install. ``"all"``: also meta tensors, Python modes and subclasses,
            functorch, functionalization, conjugate and negative views: three seconds.

    Raises:
        ValueError: for another scope.
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
    return frozenset(name for name in names if dispatcher.known_key(name))


def unwatched_keys(scope: Scope) -> tuple[str, ...]:
    """What a trace of that scope cannot see, for the reader of a walk.

    At ``Undefined`` arrive the operators that get no tensor and choose no backend (``aten::promote_types``); a
    registration there would be one for every key.
    """
    unseen = ["Tracer", "PreDispatch", "PythonDispatcher", "FuncTorchVmapMode", "Undefined"]
    return (*unseen, *(_MODES if scope == "core" else ()))
