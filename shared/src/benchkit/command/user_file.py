"""Import a Python file that a command line names: as a module of its package, or by itself if it is in no package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from benchkit.errors import UserError, first_line


@contextmanager
def importable(path: Path) -> Iterator[None]:
    """Make the modules beside a file and the package of the file importable inside the block.

    Code that reads its arguments there finds its file, and none of this process.
    """
    before, after = str(path.resolve().parent), ""
    if (package := package_of(path)) is not None:
        before, after = str(package[0]), before  # at the end, because a package may contain a logging.py
    sys.path.insert(0, before)
    if after:
        sys.path.append(after)
    arguments, sys.argv = sys.argv, [str(path)]
    try:
        yield
    finally:
        sys.argv = arguments
        with suppress(ValueError):  # the block may have changed the list
            sys.path.remove(before)
        if after in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(after)]


def load_file(path: Path, prefix: str) -> ModuleType:
    """Import a file as a module.

    The module stays in ``sys.modules``, where dataclasses, pickle and torch.compile look it up by name.

    Args:
        path: Path of the file.
        prefix: Text before the file's name in the name of the module, so that a ``json.py`` does not hide Python's. A
            file of a package keeps its full name, because relative imports need it.

    Raises:
        UserError: If the file is no Python file, its import fails, or another package of the same name is imported.
    """
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}; expected a Python file")
    if path.suffix != ".py":
        raise UserError(f"expected a Python file, got {str(path)!r}: its name must end in .py")
    try:
        with importable(path):
            package = package_of(path)
            module = _alone(path, f"{prefix}{path.stem}") if package is None else importlib.import_module(package[1])
    except (Exception, SystemExit) as error:
        guard = '; put the call that exits under if __name__ == "__main__":' if isinstance(error, SystemExit) else ""
        raise UserError(f"{path} cannot be imported: {first_line(error)}{guard}") from error
    origin = getattr(module, "__file__", None)
    if origin is None or not Path(origin).samefile(path):
        raise UserError(
            f"{path} is the module {module.__name__} of its package, and another of that name is imported already, "
            f"from {origin}; rename the package, or move the file out of it"
        )
    return module


def find(module: ModuleType, name: str) -> Any:
    """Look up a name in a module, such as ``step`` or ``Model.step``; None if it does not exist.

    Args:
        module: The module.
        name: Names of an object and its attributes, separated by dots.
    """
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def package_of(path: Path) -> tuple[Path, str] | None:
    """The folder that contains a file's package, and the file's full module name; None if it is in no package.

    A file needs its full module name for relative imports such as ``from .layers import …``.
    """
    folder, parts = path.resolve().parent, [path.stem]
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    if len(parts) == 1 or not path.stem.isidentifier():
        return None
    return folder, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _alone(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
