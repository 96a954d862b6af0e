"""What fits one version of torch alone, compiled for the one that is installed (``csrc/autograd``).

The derivatives of the small operators in C++, and the operators as callables for Python. The library of the operators
fits every torch and can hold neither. Without them the derivatives are registered from Python and torch's own callables
serve: a call costs half a microsecond more, one that wants a gradient 10.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from custom_ops.builds.operator_library import CSRC
from custom_ops.builds.torch_internals import OpOverload, in_cpp
from native_build import Unit, build_library_once, cached_library

# What nodes.cpp implements.
OPERATORS = frozenset(("vector_add", "axpb", "scale", "bias_gelu"))

_NAME = "custom_ops_autograd"

# build_library keeps to the stable ABI; these headers are the whole of torch's, which ask for the newer standard.
_FLAGS = ("-UTORCH_TARGET_VERSION", "-std=c++20", "-isystem", sysconfig.get_paths()["include"])
_UNITS = tuple(Unit(CSRC / "autograd" / name, _FLAGS) for name in ("calls.cpp", "nodes.cpp"))


def _arguments() -> dict[str, Any]:
    version = ".".join(torch.__version__.split(".")[:2])
    return {"torch_versions": (version, version), "exports": (f"PyInit_{_NAME}",), "libraries": ("torch_python",)}


def cached() -> Path | None:
    """The library for this torch, if the user's cache has it."""
    path = cached_library(_NAME, _UNITS, **_arguments()) if CSRC.is_dir() else None
    return path if path is not None and path.is_file() else None


def build() -> Path:
    """The library for this torch from the user's cache, compiled if it is not there.

    Raises:
        native_build.BuildError: If there is no compiler, or it fails.
    """
    return build_library_once(_NAME, _UNITS, **_arguments())


def operator_call(library: Path) -> Callable[[OpOverload], Callable[..., Any]]:
    """What makes a callable of an operator: it gives the short way those calls that can take it, torch the others.

    Args:
        library: from :func:`build`, loaded.
    """
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def made(overload: OpOverload) -> Callable[..., Any]:
        name, _, overload_name = overload.name().partition(".")
        return module.operator_call(name, overload_name, in_cpp(overload))

    return made
