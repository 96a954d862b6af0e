"""Run changed sources without touching the files: what is imported from a path is taken from here instead."""

from __future__ import annotations

import importlib.machinery
import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, ModuleType

from compile_bench.capture.frames import UserCodeFilter

Overlay = Mapping[str, bytes]

# What was imported before any target was loaded is not the target's: a second copy of it would have other classes.
_BEFORE = frozenset(sys.modules)


@contextmanager
def overlaid(overlay: Overlay) -> Iterator[None]:
    """Inside the block, importing a file that ``overlay`` names executes the bytes it gives; tracebacks show them.

    Args:
        overlay: from absolute paths to contents.
    """
    loader = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if path not in overlay:
            return original(self, fullname)
        return compile(overlay[path], path, "exec", dont_inherit=True)

    loader.get_code = get_code  # type: ignore[method-assign, assignment]
    for path, content in overlay.items():
        lines = content.decode("utf-8").splitlines(keepends=True)
        # No modification time: linecache never compares the entry with the file.
        linecache.cache[path] = (len(content), None, lines, path)
    try:
        yield
    finally:
        loader.get_code = original  # type: ignore[method-assign]
        for path in overlay:
            linecache.cache.pop(path, None)


def forget_user_modules(user_code: UserCodeFilter) -> None:
    """Have the user's modules executed anew when they are imported next."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if name not in _BEFORE and file and user_code.is_user(file):
            del sys.modules[name]
