"""The operators as callables, as attributes of this module: ``calls.vector_add(a, b)``.

The module is empty until a build is loaded; the first access to an operator loads one. Operators are attributes of a
module because Python looks these up fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lowering.torch_private import constant_under_compile
from native_build import BuildError, LibraryError

# Loads a build, which fills this module. custom_ops.builds.loading sets it: that module imports the operators, and they
# import this one.
loader: Callable[[], object] | None = None

loaded = False
"""Whether a build is loaded, and this module filled."""


def fill(operators: Mapping[str, Callable[..., Any]]) -> None:
    """Set the operators as attributes of this module."""
    globals().update(operators, loaded=True)


def load() -> None:
    """Load the build, and compile it first if needed."""
    assert loader is not None  # the package's __init__ imports the builds
    loader()


@constant_under_compile
def ready() -> bool:
    """Whether the kernels can be used here; loads the build, which compiles it first if needed."""
    try:
        load()
    except (BuildError, LibraryError):
        return False
    return True


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    load()
    try:
        return globals()[name]
    except KeyError:
        raise AttributeError(f"custom_ops has no operator {name}") from None
