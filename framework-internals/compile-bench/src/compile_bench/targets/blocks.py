"""Changes sources so that Dynamo can resume after a graph break, where it otherwise skips the whole frame.

Dynamo cannot resume a function inside a ``try``, inside a context manager that it does not support, or inside a loop
over an iterator that it cannot reconstruct. In the changed sources the ``try`` and ``with`` statements are replaced by
their bodies, and loops go over tuples. Every line keeps its number. Nothing here imports torch.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from pathlib import Path

from compile_bench.targets.overlay import TreeOverlay

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
