"""The derivatives of the small operators in C++ (``csrc/autograd``), compiled for the torch that is installed.

The library of the operators fits every torch, and cannot hold nodes of autograd; these fit one torch alone. Without
them the same derivatives are registered from Python, and a call that wants a gradient costs 10 µs more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from custom_ops.prebuild import CSRC
from native_build import Unit, build_library_once, cached_library

# What nodes.cpp implements.
OPERATORS = frozenset(("vector_add", "axpb", "scale", "bias_gelu"))

# build_library keeps to the stable ABI; these headers are the whole of torch's, which ask for the newer standard.
_UNITS = (Unit(CSRC / "autograd" / "nodes.cpp", ("-UTORCH_TARGET_VERSION", "-std=c++20")),)


def _arguments() -> dict[str, Any]:
    version = ".".join(torch.__version__.split(".")[:2])
    return {"torch_versions": (version, version)}


def cached() -> Path | None:
    """The nodes for this torch, if the user's cache has them."""
    path = cached_library("custom_ops_autograd", _UNITS, **_arguments()) if CSRC.is_dir() else None
    return path if path is not None and path.is_file() else None


def build() -> Path:
    """The nodes for this torch from the user's cache, compiled if they are not there.

    Raises:
        native_build.BuildError: when there is no compiler, or it fails.
    """
    return build_library_once("custom_ops_autograd", _UNITS, **_arguments())
