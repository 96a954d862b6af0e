"""``custom-ops new``: a package of one operator, ready to build and to test, for a formula of one's own."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchkit import UserError
from custom_ops.builds.torch_internals import operator_namespaces

_TEMPLATES = Path(__file__).parents[1] / "templates" / "new"

# Where each template goes.
_FILES = {
    "pyproject.toml.j2": "pyproject.toml",
    "setup.py.j2": "setup.py",
    "README.md.j2": "README.md",
    "kernels.h.j2": "csrc/kernels.h",
    "cpu.cpp.j2": "csrc/cpu.cpp",
    "cuda.cu.j2": "csrc/cuda.cu",
    "library.cpp.j2": "csrc/library.cpp",
    "__init__.py.j2": "src/{name}/__init__.py",
    "test_operator.py.j2": "tests/test_{name}.py",
}

# In lower case; those that Python has too are left out.
_WORDS_OF_CPP = """
alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t co_await co_return
co_yield compl concept const const_cast consteval constexpr constinit decltype default delete do double dynamic_cast
enum explicit export extern false float friend goto inline int long mutable namespace new noexcept not_eq nullptr
operator or_eq private protected public register reinterpret_cast requires short signed sizeof static static_assert
static_cast std struct switch template this thread_local throw true typedef typeid typename union unsigned using
virtual void volatile wchar_t xor xor_eq
"""


def write(name: str, folder: Path) -> list[Path]:
    """Write the package.

    Args:
        name: Name of the package, the operator and its namespace.
        folder: Parent of the package's folder; created if it does not exist.

    Returns:
        The files.

    Raises:
        UserError: If the name is invalid or already taken, or the folder exists.
    """
    _check(name)
    root = folder / name
    if root.exists():
        raise UserError(f"{root} is there already (choose another name or --folder)")
    environment = Environment(  # noqa: S701 # sources, and a name of letters, digits and underscores
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True
    )
    written = []
    for template, target in _FILES.items():
        path = root / target.format(name=name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(environment.get_template(template).render(name=name), encoding="utf-8")
        written.append(path)
    typed = root / "src" / name / "py.typed"
    typed.touch()
    return [*written, typed]


def _check(name: str) -> None:
    """Refuse a name that the package, the operator or its namespace cannot have."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"expected a name of lower-case letters, digits and underscores (my_norm), got {name!r}")
    if (reason := _taken(name)) is not None:
        other = "my_" + re.sub("_+", "_", name).rstrip("_")
        raise UserError(f"expected a name that is free, got {name!r}: {reason} (take another, as {other})")


def _taken(name: str) -> str | None:
    """Who has a name already; None for one that is free."""
    if keyword.iskeyword(name):
        return "it is a word of Python"
    if name in _WORDS_OF_CPP.split():
        return "it is a word of C++"
    if name.endswith("_") or "__" in name:
        return "a project's name does not end with an underscore, and C++ keeps names with two in a row for itself"
    if name in sys.stdlib_module_names:
        return "it is a module of Python's standard library"
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:  # a folder of that name has none, and is no package yet
        return f"it is a package that is installed here, {spec.origin}"
    if name in operator_namespaces():
        return f"torch.ops.{name} is there already"
    return None
