"""A syntax tree in which a node knows what is around it. Nothing here imports torch."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

_TABLE = Path(__file__).parent / "conditions" / "functions.toml"

# Names of functions and methods by what they do.
FUNCTIONS: dict[str, frozenset[str]] = {
    kind: frozenset(names) for kind, names in tomllib.loads(_TABLE.read_text(encoding="utf-8")).items()
}


class Syntax:
    """A syntax tree of Python source."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The parent of every node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The ancestors of a node, its parent first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, line: int) -> ast.stmt | None:
        """The innermost statement that a line is in; of several, the last one."""
        return next(reversed(self.statements(line)), None)

    def statements(self, line: int) -> list[ast.stmt]:
        """The innermost statements that a line is in; ``if``, ``for`` and the like count with their head alone."""
        around = {
            node: (node.lineno, -head_end(node))
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and node.lineno <= line <= head_end(node)
        }
        return [node for node, extent in around.items() if extent == max(around.values())]

    def lambda_bodies(self, line: int) -> list[ast.expr]:
        """The bodies of the innermost lambdas that a line is in."""
        lambdas = (node for node in ast.walk(self.tree) if isinstance(node, ast.Lambda))
        bodies = [
            function.body for function in lambdas if function.body.lineno <= line <= (function.body.end_lineno or 0)
        ]
        outer = {node for body in bodies for node in self.above(body)}
        return [body for body in bodies if body not in outer]

    def function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The innermost function that a node is in."""
        functions = (outer for outer in self.above(node) if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)))
        return next(functions, None)

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The block that contains a statement."""
        parent = self.parents[statement]
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block
        return [statement]


def head_end(statement: ast.stmt) -> int:
    """The last line of a statement's head: of the part before its block, or of all of it."""
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body:
        return max(statement.lineno, body[0].lineno - 1)
    if isinstance(statement, ast.Match):
        return statement.subject.end_lineno or statement.lineno
    assert statement.end_lineno is not None
    return statement.end_lineno


def dotted(node: ast.expr) -> str:
    """``a.b.c`` for names and attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def last_name(node: ast.expr) -> str:
    """``c`` for ``a.b.c``; empty for anything but names and attributes."""
    return dotted(node).rpartition(".")[2]
