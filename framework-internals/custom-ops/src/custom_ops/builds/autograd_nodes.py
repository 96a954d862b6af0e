"""The parts that work with one version of torch only, compiled for the installed one (``csrc/autograd``).

These are autograd nodes in C++ for the elementwise operators, bias_gelu, swiglu, geglu, rotary, mm and flash_attention,
and faster Python callables for all operators. The library of the operators works with every torch version and can
contain neither.
Without them, the derivatives are registered from Python and torch's own callables are used: a call costs half a
microsecond more, and a call that needs a gradient 10 to 60 µs more.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from custom_ops.builds.operator_library import CSRC, SCHEMAS_FOLDER
from custom_ops.builds.torch_internals import OpOverload, in_cpp
from native_build import Unit, build_library_once, cached_library

# The operators that nodes.cpp implements.
OPERATORS = frozenset(
    ("vector_add", "axpb", "scale", "bias_gelu", "swiglu", "geglu", "rotary", "mm", "flash_attention")
)

_NAME = "custom_ops_autograd"
_UNITS = tuple(Unit(CSRC / "autograd" / name) for name in ("calls.cpp", "nodes.cpp"))
_ARGUMENTS: dict[str, Any] = {
    "include_dirs": [SCHEMAS_FOLDER],
    "torch_versions": None,
    "exports": (f"PyInit_{_NAME}",),
    "libraries": ("torch_python",),
}


def cached() -> Path | None:
    """Return the library for this torch if the user's cache has it, else None."""
    path = cached_library(_NAME, _UNITS, **_ARGUMENTS) if CSRC.is_dir() else None
    return path if path is not None and path.is_file() else None


def build() -> Path:
    """Return the library for this torch from the user's cache; compile it first if it is missing.

    Raises:
        native_build.BuildError: If there is no compiler, or it fails.
    """
    return build_library_once(_NAME, _UNITS, **_ARGUMENTS)


def operator_call(library: Path) -> Callable[[OpOverload], Callable[..., Any]]:
    """Return a function that makes a Python callable from an operator.

    The callable passes ordinary arguments directly to the dispatcher, and all other calls to torch's own callable.
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
