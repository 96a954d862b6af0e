"""Run changed sources without writing them: an import of a file executes the changed content instead."""

from __future__ import annotations

import ast
import importlib.machinery
import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, ModuleType

from compile_bench.capture.frames import UserCodeFilter

# Changed files by absolute path: their new content, or a syntax tree that keeps the line numbers of the file.
Overlay = Mapping[str, bytes]
TreeOverlay = Mapping[str, ast.Module]

# Modules from before any target was loaded are not the target's. A second copy of them would have other classes.
_LOADED_BEFORE = frozenset(sys.modules)


@contextmanager
def overlaid(overlay: Overlay | TreeOverlay) -> Iterator[None]:
    """Inside the block, imports of the overlay's files execute the changed content, and tracebacks show its lines."""
    loader = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if path not in overlay:
            return original(self, fullname)
        return compile(overlay[path], path, "exec", dont_inherit=True)

    loader.get_code = get_code  # type: ignore[method-assign, assignment]
    for path, content in overlay.items():
        if isinstance(content, bytes):
            lines = content.decode("utf-8").splitlines(keepends=True)
            # Without a modification time, linecache never compares the entry with the file.
            linecache.cache[path] = (len(content), None, lines, path)
    try:
        yield
    finally:
        loader.get_code = original  # type: ignore[method-assign]
        for path in overlay:
            linecache.cache.pop(path, None)


def forget_user_modules(user_code: UserCodeFilter) -> None:
    """Drop the user's modules, so that their next import executes them again."""
    forgotten = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if name not in _LOADED_BEFORE and file and user_code.is_user(file):
            forgotten[f"__import_{name.replace('.', '_dot_')}"] = sys.modules.pop(name)
    _forget_in_dynamo(forgotten)


def _forget_in_dynamo(forgotten: Mapping[str, ModuleType]) -> None:
    """Dynamo keeps the module that it imported first, in a cache and under an alias, and guards its globals."""
    cached = getattr(sys.modules.get("torch._dynamo.symbolic_convert"), "_import_module", None)
    if cached is not None:
        cached.cache_clear()
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", {})
        for alias in forgotten.keys() & namespace.keys():
            if namespace[alias] is forgotten[alias]:
                del namespace[alias]
