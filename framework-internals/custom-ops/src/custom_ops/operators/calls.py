"""The operators as callables, by name, as attributes of this module: ``calls.vector_add(a, b)``.

There is nothing in it before a build is loaded; the first operator that is asked for loads one. Attributes of a module
are what Python finds fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Loads a build, which fills this module. custom_ops.builds.loading sets it: that module imports the operators, and they
# import this one.
loader: Callable[[], object] | None = None


def fill(operators: Mapping[str, Callable[..., Any]]) -> None:
    """Set the attributes."""
    globals().update(operators)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    assert loader is not None  # the package's __init__ imports the builds
    loader()
    try:
        return globals()[name]
    except KeyError:
        raise NotImplementedError(
            f"{name}: the build that serves has no kernels for it (custom_ops.build_info() says why)"
        ) from None
