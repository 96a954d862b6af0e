"""``custom-ops new``: writes a package with one operator, ready to build and to test."""

from __future__ import annotations

import builtins
import importlib.metadata
import importlib.util
import keyword
import re
import sys
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchkit import UserError
from custom_ops.builds.torch_internals import operator_namespaces

_TEMPLATES = Path(__file__).parents[1] / "templates" / "new"

# The target path of each template.
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

# Reserved words in lower case, without those that Python has too.
_CPP_RESERVED = """
alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t co_await co_return
co_yield compl concept const const_cast consteval constexpr constinit decltype default delete do double dynamic_cast
enum explicit export extern false float friend goto inline int long mutable namespace new noexcept not_eq nullptr
operator or_eq private protected public register reinterpret_cast requires short signed sizeof static static_assert
static_cast std struct switch template this thread_local throw true typedef typeid typename union unsigned using
virtual void volatile wchar_t xor xor_eq
"""


def write(name: str, folder: Path) -> list[Path]:
    """Write the package to disk.

    Returns:
        The paths of the files.

    Raises:
        UserError: If the name is invalid or already taken, the parent does not exist, or the package's folder does.
    """
    _check(name)
    root = folder / name
    if not folder.is_dir():
        raise UserError(f"--folder: expected an existing folder, got {folder}; make it (mkdir -p) or name another one")
    if root.exists():
        raise UserError(f"{root} exists already (choose another name or --folder)")
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
    """Raise UserError for a name that the package, the operator or its namespace cannot have."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"expected a name of lower-case letters, digits and underscores (my_norm), got {name!r}")
    if (reason := _taken(name)) is not None:
        other = "my_" + re.sub("_+", "_", name).rstrip("_")
        raise UserError(f"expected an unused name, got {name!r}: {reason} (choose another, for example {other})")


def _taken(name: str) -> str | None:
    """Why a name cannot be used; None if it can."""
    if keyword.iskeyword(name):
        return "it is a reserved word of Python"
    if name in _CPP_RESERVED.split():
        return "it is a reserved word of C++"
    if name.endswith("_") or "__" in name:
        return "a project's name must not end with an underscore, and C++ reserves names with two in a row"
    if hasattr(builtins, name):
        return "it is a builtin name of Python"
    if name in sys.stdlib_module_names or f"{name}.py" in _FILES.values():  # setup
        return "it is a module of Python's standard library, or of the folder that would be written"
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:  # a plain folder of that name has no origin
        return f"it is a package that is installed here, {spec.origin}"
    if any(importlib.metadata.distributions(name=name)):  # pillow, whose package is PIL
        return "it is a project that is installed here, which the new one would replace"
    if name in operator_namespaces():
        return f"torch.ops.{name} exists already"
    return None
