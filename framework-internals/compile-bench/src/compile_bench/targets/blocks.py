"""Sources without some of their ``try`` and ``with`` statements, whose bodies stay. Nothing here imports torch.

Dynamo cannot resume a function inside a ``try``, nor inside a context manager that it does not support. Without the
statement, the same lines run one after the other, and Dynamo can resume behind each of them.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from pathlib import Path

from compile_bench.targets.overlay import TreeOverlay

# File and first line of a statement.
Block = tuple[str, int]


def removable_blocks(file: str, line: int) -> set[Block]:
    """The ``try`` and ``with`` statements around a line, within its function.

    Context managers of torch stay: Dynamo resumes inside them, and what they set matters to the lines in them.
    """
    return {
        (file, each.lineno)
        for each in _around(file, line)
        if isinstance(each, ast.Try)
        or (
            isinstance(each, ast.With)
            and not any(ast.unparse(item.context_expr).startswith("torch.") for item in each.items)
        )
    }


def handlers_around(file: str, line: int) -> set[Block]:
    """The ``try`` statements whose body a line is in and that handle exceptions."""
    tries = (each for each in _around(file, line) if isinstance(each, ast.Try) and each.handlers)
    return {(file, each.lineno) for each in tries if line < each.handlers[0].lineno}


def is_in_block(file: str, line: int) -> bool:
    """Whether a loop, a ``try`` or a ``with`` of its function is around a line: Dynamo may not resume there."""
    return any(isinstance(each, (ast.For, ast.While, ast.Try, ast.With)) for each in _around(file, line))


def without_blocks(blocks: Iterable[Block]) -> TreeOverlay:
    """Syntax trees of files without some statements; every line that is left keeps its number."""
    lines: dict[str, set[int]] = {}
    for file, line in blocks:
        lines.setdefault(file, set()).add(line)
    trees = {file: _Without(each).visit(_tree(file)) for file, each in lines.items()}
    return {file: ast.fix_missing_locations(tree) for file, tree in trees.items()}


class _Without(ast.NodeTransformer):
    """Replaces the statements that begin at ``lines`` by their bodies."""

    def __init__(self, lines: Collection[int]) -> None:
        self._lines = lines

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


def _entered(item: ast.withitem) -> ast.stmt:
    """``name = context.__enter__()``; without a name the context manager is made, but not entered."""
    context = item.context_expr
    if item.optional_vars is None:
        return ast.copy_location(ast.Expr(context), context)
    enter = ast.Call(ast.Attribute(context, "__enter__", ast.Load()), [], [])
    return ast.copy_location(ast.Assign([item.optional_vars], enter), context)


def _around(file: str, line: int) -> list[ast.stmt]:
    """The statements of its innermost function that a line is in, outermost first; none of an unreadable file."""
    try:
        tree = _tree(file)
    except (OSError, SyntaxError):
        return []
    statements = [each for each in ast.walk(tree) if isinstance(each, ast.stmt)]
    around = [each for each in statements if each.lineno <= line <= (each.end_lineno or each.lineno)]
    functions = [
        index for index, each in enumerate(around) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return around[functions[-1] + 1 :] if functions else around


def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_bytes(), filename=file)
