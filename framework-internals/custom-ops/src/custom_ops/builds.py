"""Which build of the kernels serves ``torch.ops.custom_ops``, and why not another.

The library that the environment names is taken first, then the wheel's, then one that is compiled here. What was chosen
is never changed behind the caller's back: a library that is there but does not fit is an error, not a reason to
compile.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

import native_build
from benchkit.command.progress import working
from custom_ops import autograd_nodes, calls, prebuild, runtime_compiled
from custom_ops.operators import bias_gelu, conv_bn_relu, elementwise, flash_attention
from custom_ops.registration import NAMESPACES, Rules, register
from custom_ops.torch_internals import OpOverload, any_requires_grad, has_tangent, in_cpp

VARIABLE = "CUSTOM_OPS_LIBRARY"
AUTOGRAD_VARIABLE = "CUSTOM_OPS_AUTOGRAD"

_NODES = "derivatives in C++"

Road = Literal["named library", "wheel", "compiled here"]
CudaRoad = Literal["library", "run-time compilation"]
AutogradRoad = Literal["compiled nodes", "Python"]


@dataclass(frozen=True)
class BuildInfo:
    """The build that serves the operators in this process.

    Attributes:
        road: where the library comes from; None where there is none, and only run-time compilation serves.
        cuda: where the CUDA kernels come from; None where there are none.
        file: the library; None before the first call has compiled it.
        not_served: what this build is without, and why with the remedy: another road, CUDA kernels, or the nodes.
        autograd: where the derivatives of the small operators come from (:mod:`custom_ops.autograd_nodes`).
    """

    road: Road | None
    cuda: CudaRoad | None
    file: Path | None
    not_served: Mapping[str, str]
    autograd: AutogradRoad = "Python"

    @property
    def sha256(self) -> str | None:
        """The hash of the library's file, by which two machines know that they run the same one."""
        return hashlib.sha256(self.file.read_bytes()).hexdigest() if self.file else None


def build_info() -> BuildInfo:
    """Say which build serves the operators, and why not another; builds nothing.

    Raises:
        native_build.LibraryError: when a library is named or installed that does not fit this torch or this processor.
    """
    road, not_served = _choose()
    autograd = _choose_autograd(road, not_served)
    file: Path | None = None
    library_cuda: str | None = "there is no library"
    if road == "compiled here":
        file, library_cuda = prebuild.cached(architectures_here()), native_build.missing_cuda()
    elif road is not None:
        file = _library_of(road)
        library_cuda = _without_cuda(file)
    if library_cuda is None:
        return BuildInfo(road, "library", file, not_served, autograd)
    not_served["the library's CUDA kernels"] = library_cuda
    reason = runtime_compiled.missing()
    if reason is None:
        return BuildInfo(road, "run-time compilation", file, not_served, autograd)
    not_served["run-time compilation"] = reason
    return BuildInfo(road, None, file, not_served, autograd)


def load() -> BuildInfo:
    """Load the build that serves the operators, compiling it first if need be; the operators are there afterwards.

    Called by the first call of a function, and by the import where there is nothing to compile.

    Raises:
        native_build.BuildError: when no road is open, or compiling fails.
        native_build.LibraryError: when a library is named or installed that does not fit.
    """
    with _lock:
        return _load()


_lock = threading.RLock()
calls.loader = load


@functools.cache
def _load() -> BuildInfo:
    info = build_info()
    if info.road is None and info.cuda is None:
        roads: dict[str, list[str]] = {}
        for road, reason in info.not_served.items():
            roads.setdefault(reason, []).append(road)
        reasons = "; ".join(f"{', '.join(shut)}: {reason}" for reason, shut in roads.items())
        raise native_build.BuildError(f"no build of custom_ops: {reasons}")
    if info.road is None:
        runtime_compiled.define()
    else:
        if info.file is None:
            with working(f"compiling the operators, once for torch {torch.__version__}"):
                info = replace(info, file=prebuild.build_once(architectures_here()))
        assert info.file is not None
        native_build.load_library(info.file)
    if info.cuda == "run-time compilation":
        runtime_compiled.register()
    callable_of: Callable[[OpOverload], Callable[..., Any]] = in_cpp
    in_nodes: frozenset[str] = frozenset()
    if info.autograd == "compiled nodes":
        info, nodes = _load_nodes(info)
        if nodes is not None:
            callable_of, in_nodes = autograd_nodes.operator_call(nodes), autograd_nodes.OPERATORS
    for rules in operators():
        register(rules, derivative=rules.name not in in_nodes)
    calls.fill(dict(_callables(callable_of, in_nodes)))
    return info


def _load_nodes(info: BuildInfo) -> tuple[BuildInfo, Path | None]:
    """Put the nodes in, compiled first if need be; the second result is their library.

    Where that fails, the derivatives are Python's and :func:`load` says so, unless the environment asked for the nodes.
    """
    try:
        with working(f"compiling derivatives, once for torch {torch.__version__}"):
            nodes = autograd_nodes.build()
            native_build.load_library(nodes)
    except (native_build.BuildError, native_build.LibraryError) as error:
        if os.environ.get(AUTOGRAD_VARIABLE) == "nodes":
            raise
        return replace(info, autograd="Python", not_served={**info.not_served, _NODES: str(error)}), None
    return info, nodes


def _callables(
    callable_of: Callable[[OpOverload], Callable[..., Any]], in_nodes: frozenset[str]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What :mod:`custom_ops.calls` offers, by name.

    Args:
        callable_of: what makes a callable of an operator.
        in_nodes: operators whose kernel for autograd is C++, and costs next to nothing where no gradient is wanted.
    """
    public, bare = (getattr(torch.ops, namespace) for namespace in NAMESPACES)
    for rules in operators():
        if hasattr(public, rules.name):
            whole = callable_of(getattr(public, rules.name).default)
            if rules.autograd is not None and rules.name not in in_nodes:
                whole = _where_wanted(rules.name, whole, callable_of(getattr(bare, rules.name).default))
            yield rules.name, whole


def _where_wanted(name: str, whole: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The operator with its derivative where a gradient is wanted or a graph is recorded, and without elsewhere.

    A derivative that Python registered has no forward mode, and would drop the tangent without a word; and torch.func
    takes none of it, in words about somebody else's class.
    """

    def call(*arguments: Any) -> Any:
        if has_tangent(*arguments):
            raise NotImplementedError(f"custom_ops::{name} has no forward-mode derivative; take reverse mode")
        if not ((torch.is_grad_enabled() and any_requires_grad(*arguments)) or torch.compiler.is_compiling()):
            return kernel(*arguments)
        try:
            return whole(*arguments)
        except RuntimeError as error:
            if "must override the setup_context" not in str(error):
                raise
            raise NotImplementedError(
                f"custom_ops::{name}: torch.func takes no derivatives that Python registered; take torch.autograd.grad"
            ) from error

    return call


def load_if_built() -> None:
    """Load the build that serves if nothing has to be compiled for it, so that ``torch.ops.custom_ops`` is there."""
    try:
        info = build_info()
    except native_build.LibraryError:
        return  # the first call says so: an import is the wrong place to fail
    if info.file is not None and (info.autograd == "Python" or autograd_nodes.cached() is not None):
        load()


def operators() -> Iterator[Rules]:
    """What is registered for the operators, in the order of the ladder."""
    for module in (elementwise, bias_gelu, conv_bn_relu, flash_attention):
        yield from module.RULES


def _choose() -> tuple[Road | None, dict[str, str]]:
    """The road, and why not those before it."""
    if os.environ.get(VARIABLE):
        named = _library_of("named library")
        if not named.is_file():
            raise native_build.LibraryError(
                f"{VARIABLE} names {named}, and there is no such file; name the library, or unset {VARIABLE}"
            )
        _check_fits(named)
        return "named library", {}
    not_served = {"a named library": f"{VARIABLE} is not set"}
    if _library_of("wheel").is_file():
        _check_fits(_library_of("wheel"))
        return "wheel", not_served
    not_served["the wheel"] = (
        f"there is no {prebuild.FILE_NAME} beside the package (custom-ops build, then pip install)"
    )
    if (reason := _cannot_compile()) is None:
        return "compiled here", not_served
    not_served["compiling here"] = reason
    return None, not_served


def _choose_autograd(road: Road | None, not_served: dict[str, str]) -> AutogradRoad:
    """What the environment asks for; else nodes that are compiled already, or whose operators are compiled here too."""
    asked = os.environ.get(AUTOGRAD_VARIABLE)
    if asked not in (None, "", "nodes", "python"):
        raise native_build.LibraryError(f"{AUTOGRAD_VARIABLE}: expected nodes or python, got {asked!r}")
    if asked == "python":
        not_served[_NODES] = f"{AUTOGRAD_VARIABLE} is python"
        return "Python"
    if asked == "nodes" or autograd_nodes.cached() is not None:
        return "compiled nodes"
    if (reason := _cannot_compile()) is None:
        if road == "compiled here":
            return "compiled nodes"
        reason = f"not compiled yet for torch {torch.__version__} (custom-ops build autograd)"
    not_served[_NODES] = reason
    return "Python"


def _cannot_compile() -> str | None:
    if not prebuild.CSRC.is_dir():
        return f"the sources are not in {prebuild.CSRC} (install the package editable from its checkout)"
    return native_build.missing_cxx()


def _library_of(road: Road) -> Path:
    return Path(os.environ[VARIABLE]) if road == "named library" else Path(__file__).parent / prebuild.FILE_NAME


def _check_fits(library: Path) -> None:
    reason = native_build.read_record(library).refusal(torch.__version__)
    if reason is not None:
        raise native_build.LibraryError(
            f"cannot load {library}: {reason}; build it again here, or install what it is for"
        )


def _without_cuda(library: Path) -> str | None:
    if (reason := native_build.missing_gpu()) is not None:
        return reason
    return native_build.read_record(library).cuda_refusal(torch.cuda.get_device_capability())


@functools.cache
def architectures_here() -> tuple[str, ...]:
    """What to compile CUDA kernels for on this machine: the GPU's own code, or nothing."""
    if native_build.missing_cuda() is not None:
        return ()
    major, minor = torch.cuda.get_device_capability()
    return (f"sm_{major}{minor}{'a' if major == 9 else ''}",)
