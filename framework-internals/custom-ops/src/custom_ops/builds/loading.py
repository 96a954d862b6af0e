"""Select and load the build of the kernels behind ``torch.ops.custom_ops``.

The library that the environment names comes first, then the one in the wheel, then one that is compiled here. There is
no silent fallback: a library that is present but not for this machine is an error, not a reason to compile another.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

import native_build
from custom_ops.builds import autograd_nodes, operator_library, runtime_compiled
from custom_ops.builds.torch_internals import (
    OpOverload,
    any_requires_grad,
    below_autograd,
    in_cpp,
    transforms_active,
)
from custom_ops.operators import (
    bias_gelu,
    conv_bn_relu,
    elementwise,
    flash_attention,
    glu,
    linear,
    rotary,
)
from custom_ops.operators.calls import calls
from custom_ops.operators.registration import NAMESPACES, PROCESS_VARIABLE, Autograd, Rules, name_process, register
from custom_ops.operators.training import adamw, cross_entropy
from lowering.torch_private import constant_under_compile
from native_build.derivatives import derivative_kernel, has_tangent, without_derivative

VARIABLE = "CUSTOM_OPS_LIBRARY"
AUTOGRAD_VARIABLE = "CUSTOM_OPS_AUTOGRAD"

_NODES = "derivatives in C++"

Road = Literal["named library", "wheel", "compiled here"]
CudaRoad = Literal["library", "run-time compilation"]
AutogradRoad = Literal["compiled nodes", "Python"]


@dataclass(frozen=True)
class BuildInfo:
    """The build that provides the operators in this process.

    Attributes:
        road: Source of the library; None if there is no library, and kernels are compiled at run time only.
        cuda: Source of the CUDA kernels; None if there are none.
        file: Path of the library; None before the first call has compiled it.
        missing: What this process does without, such as CUDA kernels, and for each the reason and the remedy.
        autograd: Source of most operators' derivatives (:mod:`custom_ops.builds.autograd_nodes`).
    """

    road: Road | None
    cuda: CudaRoad | None
    file: Path | None
    missing: Mapping[str, str]
    autograd: AutogradRoad = "Python"

    @property
    def sha256(self) -> str | None:
        """The hash of the library's file; two machines with the same hash run the same library."""
        return hashlib.sha256(self.file.read_bytes()).hexdigest() if self.file else None

    @property
    def instructions(self) -> str | None:
        """The instruction set of the CPU kernels (:func:`custom_ops.builds.operator_library.cpu_level`)."""
        return operator_library.cpu_level(self.file) if self.file else None


def build_info() -> BuildInfo:
    """Describe the build in use, and say why the other ones are not; builds nothing.

    Raises:
        native_build.LibraryError: If the named or installed library is not for this torch or this processor.
    """
    road, missing = _choose()
    autograd = _choose_autograd(road, missing)
    file: Path | None = None
    library_cuda: str | None = "there is no library"
    if road == "compiled here":
        file, library_cuda = operator_library.cached(architectures_here()), native_build.missing_cuda()
    elif road is not None:
        file = _library_of(road)
        library_cuda = _without_cuda(file)
    if library_cuda is None:
        return BuildInfo(road, "library", file, missing, autograd)
    missing["the library's CUDA kernels"] = library_cuda
    reason = runtime_compiled.missing()
    if reason is None:
        return BuildInfo(road, "run-time compilation", file, missing, autograd)
    missing["run-time compilation"] = reason
    return BuildInfo(road, None, file, missing, autograd)


def usable_build() -> BuildInfo:
    """Describe the build in use; builds nothing.

    Raises:
        native_build.BuildError: If there is none, and none can be compiled here.
        native_build.LibraryError: If the named or installed library is not for this torch or this processor.
    """
    info = build_info()
    if info.road is None and info.cuda is None:
        by_reason: dict[str, list[str]] = {}
        for what, reason in info.missing.items():
            by_reason.setdefault(reason, []).append(what)
        reasons = "; ".join(f"{', '.join(whats)}: {reason}" for reason, whats in by_reason.items())
        raise native_build.BuildError(f"no build of custom_ops: {reasons}")
    return info


def load() -> BuildInfo:
    """Load the build, and compile it first if needed.

    The first call of a function or of an operator calls this.

    Raises:
        native_build.BuildError: If no build is possible here, or compiling fails.
        native_build.LibraryError: If the named or installed library is not for this machine.
    """
    with _lock:
        return _load()


_lock = threading.RLock()


@functools.cache
def _load() -> BuildInfo:
    info = usable_build()
    if info.road is not None:
        if info.file is None:
            info = _compile(info)
        assert info.file is not None
        name_process()  # again: the environment may have been replaced since the import
        native_build.load_library(info.file)
        operator_library.cpu_level(info.file)  # raises if a level is named that this processor lacks
    if info.cuda == "run-time compilation":
        runtime_compiled.register()
    callable_of: Callable[[OpOverload], Callable[..., Any]] = in_cpp
    in_nodes: frozenset[str] = frozenset()
    if info.autograd == "compiled nodes":
        info, nodes = _load_nodes(info)
        if nodes is not None:
            callable_of, in_nodes = autograd_nodes.operator_call(nodes), autograd_nodes.OPERATORS
    calls.fill(dict(_callables(callable_of, in_nodes)), loaded=True)
    return info


def _compile(info: BuildInfo) -> BuildInfo:
    """Compile the library, without CUDA kernels if it is those that do not compile: ``missing`` then has the reason."""
    architectures = architectures_here()
    try:
        return replace(info, file=operator_library.build_once(architectures))
    except native_build.BuildError as error:
        if not architectures:
            raise
        reason = str(error)
    file = operator_library.build_once(())  # raises if it is the rest that does not compile
    warnings.warn(f"custom_ops has no compiled CUDA kernels: {reason}", stacklevel=2)
    missing = {**info.missing, "the library's CUDA kernels": reason}
    if (no_runtime := runtime_compiled.missing()) is not None:
        missing["run-time compilation"] = no_runtime
    return replace(info, file=file, cuda=None if no_runtime else "run-time compilation", missing=missing)


def _load_nodes(info: BuildInfo) -> tuple[BuildInfo, Path | None]:
    """Load the autograd nodes, compiling them first if needed; the second result is their library.

    If that fails, the derivatives are registered from Python and ``missing`` gives the reason, unless the environment
    requires the nodes.
    """
    try:
        nodes = autograd_nodes.build()
        native_build.load_library(nodes)
    except (native_build.BuildError, native_build.LibraryError) as error:
        if os.environ.get(AUTOGRAD_VARIABLE) == "nodes":
            raise
        return replace(info, autograd="Python", missing={**info.missing, _NODES: str(error)}), None
    return info, nodes


def _callables(
    callable_of: Callable[[OpOverload], Callable[..., Any]], in_nodes: frozenset[str]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The build's callables, by name; operators ``in_nodes`` cost almost nothing extra where no gradient is needed."""
    public, bare = (getattr(torch.ops, namespace) for namespace in NAMESPACES)
    for rules in operators():
        whole = callable_of(getattr(public, rules.name).default)
        if rules.autograd is not None and rules.name not in in_nodes:
            kernel = callable_of(getattr(bare, rules.name).default)
            if not in_nodes:  # its kernel for autograd is Python's, which takes 5 µs
                kernel = below_autograd(kernel)
            whole = _with_gradient_if_needed(rules.name, whole, kernel)
        yield rules.name, whole


def _with_gradient_if_needed(name: str, whole: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``whole`` if a gradient is needed or a graph is recorded, and the bare ``kernel`` otherwise.

    Two errors replace torch's behaviour. A derivative registered from Python has no forward mode and would silently
    drop the tangent. ``torch.func`` does not support it, and says so in terms of an internal class.
    """

    def call(*arguments: Any) -> Any:
        if has_tangent(*arguments):
            raise NotImplementedError(f"custom_ops::{name} has no forward-mode derivative; use reverse mode")
        if not (
            (torch.is_grad_enabled() and any_requires_grad(*arguments))
            or transforms_active()  # what torch.vmap maps over does not tell whether it needs a gradient
            or torch.compiler.is_compiling()
        ):
            return kernel(*arguments)
        try:
            return whole(*arguments)
        except RuntimeError as error:
            if "must override the setup_context" not in str(error):
                raise
            raise NotImplementedError(
                f"custom_ops::{name}: torch.func does not support derivatives that Python registered; "
                "use torch.autograd.grad"
            ) from error

    return call


def register_operators() -> None:
    """Register what Python knows of every operator; the first call of one loads the build."""
    every = tuple(operators())
    calls.ready, calls.load = ready, load
    calls.fill({rules.name: _first_call(rules.name) for rules in every}, loaded=False)
    register(every, _derivative, load)


@constant_under_compile
def ready() -> bool:
    """Whether the kernels can be used here; loads the build, which compiles it first if needed."""
    try:
        load()
    except (native_build.BuildError, native_build.LibraryError):
        return False
    return True


def _first_call(name: str) -> Callable[..., Any]:
    """What stands in the registry until a build is loaded."""

    def call(*arguments: Any) -> Any:
        load()
        return getattr(calls, name)(*arguments)

    return call


def _derivative(operator: OpOverload, rule: Autograd | None) -> Callable[..., Any]:
    """The kernel of an operator for autograd, without compiled nodes; these have precedence over it."""
    if rule is None:
        return without_derivative(operator, public=operator.namespace == NAMESPACES[0])

    @functools.cache  # half a millisecond for each operator, which the import does not spend
    def kernel() -> Callable[..., Any]:
        return derivative_kernel(operator, rule.backward, rule.setup_context)

    def derivative(keys: Any, *arguments: Any, **named: Any) -> Any:
        if not calls.loaded and transforms_active():  # torch.func supports no derivatives of Python's; load the nodes
            load()
            return operator(*arguments, **named)
        return kernel()(keys, *arguments, **named)

    return derivative


def operators() -> Iterator[Rules]:
    """What is registered for each operator."""
    for module in (elementwise, bias_gelu, glu, conv_bn_relu, cross_entropy, adamw, rotary, linear, flash_attention):
        yield from module.RULES


def _choose() -> tuple[Road | None, dict[str, str]]:
    """The road, and for each earlier one the reason why it is not used."""
    if os.environ.get(VARIABLE):
        named = _library_of("named library")
        if not named.is_file():
            raise native_build.LibraryError(
                f"{VARIABLE} names {named}, which does not exist; set it to the library's path, or unset it"
            )
        _check_fits(named)
        return "named library", {}
    missing = {"a named library": f"{VARIABLE} is not set"}
    if _library_of("wheel").is_file():
        _check_fits(_library_of("wheel"))
        return "wheel", missing
    missing["the wheel"] = (
        f"there is no {operator_library.FILE_NAME} in the package's folder (custom-ops build, then pip install)"
    )
    if (reason := _cannot_compile()) is None:
        return "compiled here", missing
    missing["compiling here"] = reason
    return None, missing


def _choose_autograd(road: Road | None, missing: dict[str, str]) -> AutogradRoad:
    """What the environment requires; else nodes, if they are compiled already or the operators are compiled here."""
    asked = os.environ.get(AUTOGRAD_VARIABLE)
    if asked not in (None, "", "nodes", "python"):
        raise native_build.LibraryError(f"{AUTOGRAD_VARIABLE}: expected nodes or python, got {asked!r}")
    if asked == "python":
        missing[_NODES] = f"{AUTOGRAD_VARIABLE} is python"
        return "Python"
    if asked == "nodes" or autograd_nodes.cached() is not None:
        return "compiled nodes"
    if (reason := _cannot_compile()) is None:
        if road == "compiled here":
            return "compiled nodes"
        reason = f"not compiled yet for torch {torch.__version__} (custom-ops build autograd)"
    missing[_NODES] = reason
    return "Python"


def _cannot_compile() -> str | None:
    if not operator_library.CSRC.is_dir():
        return f"the sources are not in {operator_library.CSRC} (install the package editable from its checkout)"
    return native_build.missing_cxx()


def _library_of(road: Road) -> Path:
    return (
        Path(os.environ[VARIABLE])
        if road == "named library"
        else Path(__file__).parents[1] / operator_library.FILE_NAME
    )


def _check_fits(library: Path) -> None:
    reason = native_build.read_record(library).refusal(torch.__version__)
    if reason is None and PROCESS_VARIABLE.encode() not in library.read_bytes():
        reason = "it is older than this package, and would define the operators a second time"
    if reason is not None:
        raise native_build.LibraryError(
            f"cannot load {library}: {reason}; build it again here, or install what it was built for"
        )


def _without_cuda(library: Path) -> str | None:
    if (reason := native_build.missing_gpu()) is not None:
        return reason
    return native_build.read_record(library).cuda_refusal(torch.cuda.get_device_capability())


@functools.cache
def architectures_here() -> tuple[str, ...]:
    """Target architectures of the CUDA kernels on this machine: that of its GPU, or none."""
    if native_build.missing_cuda() is not None:
        return ()
    major, minor = torch.cuda.get_device_capability()
    return (f"sm_{major}{minor}{'a' if major == 9 else ''}",)
