"""Look behind a function that Dynamo gave up: what its line computed is recorded eagerly and given to Dynamo as known.

Where a graph breaks inside a loop, a ``try`` or a ``with``, Dynamo leaves the whole function to Python, and whatever
else would break in it stays unseen. With the offending expression held at a recorded value tracing goes on to the next.
Nothing but tracing is ever done with such a model.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compile_bench.mending.overlay import Overlay
from compile_bench.mending.source import Edit, Source

_values: dict[str, Any] = {}


class __compile_bench_no_context__:  # no name of a user is like it
    def __init__(self, value: object) -> None:
        self.value = value

    def __enter__(self) -> object:
        return self.value

    def __exit__(self, *_: object) -> None:
        return None


def _apart(tensor: Tensor) -> Tensor:
    """The tensor without its history; what is computed from it still has a backward pass if it had one."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def __compile_bench_hold__(key: str, value: Any) -> Any:
    _values[key] = pytree.tree_map_only(Tensor, _apart, value)
    return value


@torch.compiler.assume_constant_result
def __compile_bench_held__(key: str) -> Any:
    return _values.get(key)


# The rewritten sources find them among the builtins, under the names that Dynamo knows them by.
_BUILTINS = (__compile_bench_hold__, __compile_bench_held__, __compile_bench_no_context__)
_HOLD, _HELD, _NO_CONTEXT = (each.__name__ for each in _BUILTINS)


def overlays(places: Iterable[tuple[str, int]]) -> tuple[Overlay, Overlay]:
    """The sources that record, and the sources that replay.

    Args:
        places: file and line of what is to be held; one that cannot be held is left as it is.
    """
    for each in _BUILTINS:
        setattr(builtins, each.__name__, each)
    sources: dict[str, Source] = {}
    record: dict[str, list[Edit]] = {}
    replay: dict[str, list[Edit]] = {}
    for file, line in places:
        try:
            source = sources.setdefault(file, Source.read(Path(file)))
        except (OSError, SyntaxError):
            continue
        for first, second in _edits(source, line):
            record.setdefault(file, []).append(first)
            replay.setdefault(file, []).append(second)
    return _applied(sources, record), _applied(sources, replay)


def _applied(sources: Mapping[str, Source], edits: Mapping[str, list[Edit]]) -> Overlay:
    overlay = {}
    for file, each in edits.items():
        try:
            overlay[file] = sources[file].apply(each)
        except (ValueError, SyntaxError):  # two held expressions, one in the other
            continue
    return overlay


def _edits(source: Source, line: int) -> list[tuple[Edit, Edit]]:
    statement = source.statement(line)
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return [_edit(source, item.context_expr, _NO_CONTEXT) for item in statement.items]
    if isinstance(statement, (ast.If, ast.While, ast.Assert)):
        expression: ast.expr | None = statement.test
    elif isinstance(statement, ast.For):
        expression = statement.iter
    else:
        expression = getattr(statement, "value", None)
    if expression is None or any(
        isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr)) for node in ast.walk(expression)
    ):
        return []
    return [_edit(source, expression)]


def _edit(source: Source, expression: ast.expr, wrapper: str = "") -> tuple[Edit, Edit]:
    text = source.text(expression)
    key = f"{source.path}:{expression.lineno}:{expression.col_offset}"
    # The lines behind keep their numbers.
    lines = "\n" * text.count("\n")
    held = f"{_HELD}({key!r}{lines})"
    return (
        # In parentheses: `return scores, boxes` holds one tuple.
        source.replace(expression, f"{_HOLD}({key!r}, ({text}))"),
        source.replace(expression, f"{wrapper}({held})" if wrapper else held),
    )
