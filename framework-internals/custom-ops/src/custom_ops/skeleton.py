"""``custom-ops new``: a package of one operator, ready to build and to test, for a formula of one's own."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchkit import UserError

_TEMPLATES = Path(__file__).parent / "templates" / "new"

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


def write(name: str, folder: Path) -> list[Path]:
    """Write the package.

    Args:
        name: of the package, of the operator and of its namespace.
        folder: made if need be; the package goes into a folder of its name in it.

    Returns:
        The files.

    Raises:
        UserError: for a name that is none, or a folder that is there already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(f"expected a name of lower-case letters, digits and underscores (my_norm), got {name!r}")
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
