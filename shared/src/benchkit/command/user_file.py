"""A Python file that a command line names, as a module: alone, or as the part of its package that it is."""

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
    """Inside, what lies beside a file can be imported, as when the file is run, and the package that it is a part of.

    Args:
        path: of the file.
    """
    before, after = str(path.resolve().parent), ""
    if (package := package_of(path)) is not None:
        before, after = str(package[0]), before  # last: a package may have a logging.py of its own
    sys.path.insert(0, before)
    if after:
        sys.path.append(after)
    try:
        yield
    finally:
        with suppress(ValueError):  # code inside may have changed the list: what was put in is removed, not the first
            sys.path.remove(before)
        if after in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(after)]


def load_file(path: Path, prefix: str) -> ModuleType:
    """The file as a module, which stays in ``sys.modules``: dataclasses, pickle and torch.compile look it up by name.

    Args:
        path: of the file.
        prefix: of the module's name, before the file's: under that alone a ``json.py`` would hide Python's. A file of a
            package has its name there, by which alone it can say ``from .layers import …``.

    Raises:
        UserError: for what is no Python file, an error while it is imported, or a package whose name is taken.
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
        guard = '; put what ends it under if __name__ == "__main__":' if isinstance(error, SystemExit) else ""
        raise UserError(f"{path} cannot be imported: {first_line(error)}{guard}") from error
    found = getattr(module, "__file__", None)
    if found is None or not Path(found).samefile(path):
        raise UserError(
            f"{path} is the module {module.__name__} of its package, and another of that name is imported already, "
            f"from {found}; rename the package, or move the file out of it"
        )
    return module


def find(module: ModuleType, name: str) -> Any:
    """What a module has under a name, ``step`` or ``Model.step``; None where it has nothing there.

    Args:
        module: to look into.
        name: with dots between an object and its attribute.
    """
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def package_of(path: Path) -> tuple[Path, str] | None:
    """The folder that a file's package lies in, and the file's name as a module; None for one that is in no package.

    Only as a part of its package can it import its neighbours by ``from .layers import …``.

    Args:
        path: of the file.
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
