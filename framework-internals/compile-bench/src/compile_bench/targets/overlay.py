"""Run changed sources without writing them: an import of a file executes the changed content instead.

One change is made here: so that Dynamo can resume after a graph break where it otherwise skips the whole frame, ``try``
and ``with`` statements are replaced by their bodies, and loops go over tuples. Every line keeps its number.
"""

from __future__ import annotations

import ast
import importlib.machinery
import linecache
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from unittest.mock import patch

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

    for path, content in overlay.items():
        if isinstance(content, bytes):
            lines = content.decode("utf-8").splitlines(keepends=True)
            # Without a modification time, linecache never compares the entry with the file.
            linecache.cache[path] = (len(content), None, lines, path)
    try:
        with patch.object(loader, "get_code", get_code):
            yield
    finally:
        for path in overlay:
            linecache.cache.pop(path, None)


def forget_user_modules(user_code: UserCodeFilter) -> None:
    """Drop the user's modules, so that their next import executes them again."""
    modules = user_modules(user_code)
    for name in modules:
        del sys.modules[name]
    _forget_in_dynamo({f"__import_{name.replace('.', '_dot_')}": module for name, module in modules.items()})


def user_modules(user_code: UserCodeFilter) -> dict[str, ModuleType]:
    """The user's modules that were loaded with targets, by name."""
    later = [(name, module) for name, module in list(sys.modules.items()) if name not in _LOADED_BEFORE]
    modules = {}
    for name, module in later:
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if file and user_code.is_user(file):
            modules[name] = module
    return modules


def _forget_in_dynamo(forgotten: Mapping[str, ModuleType]) -> None:
    """Dynamo keeps the module that it imported first, in a cache and under an alias, and guards its globals."""
    cached = getattr(sys.modules.get("torch._dynamo.symbolic_convert"), "_import_module", None)
    if cached is not None:
        cached.cache_clear()
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", {})
        for alias, loaded in forgotten.items():
            if namespace.get(alias) is loaded:
                del namespace[alias]


# File and first line of a statement.
Block = tuple[str, int]

# The most items that a changed loop takes from its iterator, which may be infinite.
_MOST_ITEMS = 10_000


def changeable_blocks(file: str, line: int) -> set[Block]:
    """The ``try``, ``with`` and ``for`` statements around a line, within its function.

    Context managers of torch stay: Dynamo resumes inside them, and what they set matters to the lines in them.
    """
    return {
        (file, outer.lineno)
        for outer in _around(file, line)
        if isinstance(outer, (ast.Try, ast.For))
        or (
            isinstance(outer, ast.With)
            and not any(ast.unparse(item.context_expr).startswith("torch.") for item in outer.items)
        )
    }


def handlers_around(file: str, line: int) -> set[Block]:
    """The ``try`` statements that have a line in their body and handle exceptions."""
    tries = (outer for outer in _around(file, line) if isinstance(outer, ast.Try) and outer.handlers)
    return {(file, handled.lineno) for handled in tries if line < handled.handlers[0].lineno}


def is_in_block(file: str, line: int) -> bool:
    """Whether a loop, a ``try`` or a ``with`` of its function is around a line: Dynamo may not resume there."""
    return any(isinstance(outer, (ast.For, ast.While, ast.Try, ast.With)) for outer in _around(file, line))


def resumable(blocks: Iterable[Block]) -> TreeOverlay:
    """Syntax trees of files in which these statements are changed."""
    lines: dict[str, set[int]] = {}
    for file, line in blocks:
        lines.setdefault(file, set()).add(line)
    trees = {file: _Resumable(starts).visit(_tree(file)) for file, starts in lines.items()}
    return {file: ast.fix_missing_locations(tree) for file, tree in trees.items()}


class _Resumable(ast.NodeTransformer):
    """Changes the statements that begin at ``lines``."""

    def __init__(self, lines: Collection[int]) -> None:
        self._lines = lines

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        if node.lineno in self._lines:
            index = ast.Name("__compile_bench_index__", ast.Store())
            node.target = ast.copy_location(ast.Tuple([index, node.target], ast.Store()), node.target)
            first_items = _call("zip", _call("range", ast.Constant(_MOST_ITEMS)), node.iter)
            node.iter = ast.copy_location(_call("tuple", first_items), node.iter)
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        if node.lineno not in self._lines:
            return node
        last = node.body[-1]
        if node.finalbody and isinstance(last, ast.Return) and last.value is not None:
            # ``return value`` stays behind the ``finally``.
            name = "__compile_bench_returned__"
            result = ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], last.value), last)
            returned = ast.copy_location(ast.Return(ast.Name(name, ast.Load())), last)
            return [*node.body[:-1], result, *node.finalbody, returned]
        return [*node.body, *node.orelse, *node.finalbody]

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return [*map(_entered, node.items), *node.body] if node.lineno in self._lines else node


def _call(function: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(function, ast.Load()), [*arguments], [])


def _entered(item: ast.withitem) -> ast.stmt:
    """``name = context.__enter__()``; without a name the context manager is made, but not entered."""
    context = item.context_expr
    if item.optional_vars is None:
        return ast.copy_location(ast.Expr(context), context)
    enter = ast.Call(ast.Attribute(context, "__enter__", ast.Load()), [], [])
    return ast.copy_location(ast.Assign([item.optional_vars], enter), context)


def _around(file: str, line: int) -> list[ast.stmt]:
    """The statements around a line in its innermost function, outermost first; empty if the file is unreadable."""
    try:
        tree = _tree(file)
    except (OSError, SyntaxError):
        return []
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    around = [
        statement for statement in statements if statement.lineno <= line <= (statement.end_lineno or statement.lineno)
    ]
    functions = [
        index for index, outer in enumerate(around) if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return around[functions[-1] + 1 :] if functions else around


def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_bytes(), filename=file)
