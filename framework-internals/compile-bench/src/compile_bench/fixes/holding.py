"""Look behind a function that Dynamo gave up: what its line computed is recorded eagerly and given to Dynamo as known.

Where a graph breaks inside a loop, a ``try`` or a ``with``, Dynamo leaves the whole function to Python, and whatever
else would break in it stays unseen. With the offending expression held at a recorded value tracing goes on to the next.
Nothing but tracing is ever done with such a model.
"""

from __future__ import annotations

import ast
import builtins
import io
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compile_bench.capture.collector import Tracing, mark_static, never_begin_at, tracing, was_skipped
from compile_bench.fixes.source import Edit, Source
from compile_bench.targets.overlay import Overlay

# What of a line is held: the value of its statement; of a call for its own sake the arguments; of a lambda its body.
Part = Literal["value", "arguments", "lambda"]


@dataclass(frozen=True)
class Marked:
    """What broke in a line, as far as its columns tell.

    Attributes:
        first: column that it begins at, in the line's text without its indentation.
        last: that it ends before; the line's end where it is not told.
        branched: whether it was its truth that mattered.
    """

    first: int
    last: int
    branched: bool = False


@dataclass(frozen=True)
class Held:
    """What of a line is held.

    Attributes:
        part: of its statement.
        marked: what broke by itself, held instead as long as the statement calls something else besides.
    """

    part: Part
    marked: frozenset[Marked] = frozenset()


# Of every name that is put into a source; no name of a user is like it.
PREFIX = "__compile_bench_"

# Methods that change a list.
_CHANGING = frozenset(("append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"))


class _Followed(list[Any]):
    """What was taken from an iterator."""


@dataclass(frozen=True)
class _Raised:
    """That an expression raised, for a handler around it.

    Attributes:
        error: which of the handlers' classes it was.
    """

    error: int


class _Recording:
    """What held expressions computed, in turn: in a loop a value for every time around.

    Dynamo may trace a function several times over before it has its code, and after it gave one up the function runs
    as it stands: each of them asks for the values anew from where the function began.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}
        self.snapshots: dict[str, list[list[list[Any]]]] = {}  # of lists that calls which are not over yet were given
        self.parts: list[Any] = []
        self._opened: list[IO[Any]] = []
        self.rewind()

    def rewind(self) -> None:
        """Begin a step: what is asked for next is what was computed first."""
        self._next: dict[str, int] = {}
        self._at_start: dict[str, int] = {}
        self._last: Tracing | None = None
        while self._opened:
            self._opened.pop().close()

    def keep(self, key: str, value: Any) -> None:
        """Add what an expression computed."""
        self.values.setdefault(key, []).append(value)

    def take(self, key: str) -> Any:
        """The next value of an expression; the first one again after the last, and None of one that never ran."""
        now, last = tracing(), self._last
        goes_on = last is not None and last.compile_id == now.compile_id
        if last is not None and (last.attempt != now.attempt if goes_on else was_skipped(last.compile_id)):
            self._next = dict(self._at_start)
        if not goes_on:
            self._at_start = dict(self._next)
        self._last = now if now.compile_id else None
        values = self.values.get(key)
        if not values:
            return None
        index = self._next.get(key, 0)
        self._next[key] = index + 1
        value = values[index % len(values)]
        if isinstance(value, _Followed):
            return list(value)
        if isinstance(value, io.IOBase) and value.closed:  # the model closed it, and will read it again
            self._opened.append(_opened_again(value))
            return self._opened[-1]
        # Lists and dicts anew: the model may go on to change what it was given.
        return set(value) if type(value) is set else pytree.tree_map(lambda leaf: leaf, value)

    def split(self, key: str) -> int:
        """The number of tensors that the next value is: 1 of a tensor, 0 where it is not made of tensors alone."""
        value = self._coming(key)
        if isinstance(value, Tensor):
            return 1
        self.parts = list(value) if type(value) in (tuple, list, _Followed) and len(value) > 1 else []
        if not all(isinstance(each, Tensor) for each in self.parts):
            self.parts = []
        return len(self.parts)

    def raises(self, key: str) -> int:
        """Which of the handlers' classes is raised next, after which it is passed over; -1 if a value is next."""
        value = self._coming(key)
        if not isinstance(value, _Raised):
            return -1
        self.take(key)
        return value.error

    def iterates(self, key: str) -> bool:
        """Whether the next value is an iterator."""
        return isinstance(self._coming(key), _Followed)

    def goes_on_with(self, key: str, *others: str) -> bool:
        """Whether the next value is one; where it is None, it and those that belong to it are passed over."""
        if self._coming(key) is not None:
            return True
        for each in (key, *others):
            self.take(each)
        return False

    def _coming(self, key: str) -> Any:
        """The next value, which stays the next."""
        values = self.values.get(key)
        if not values:
            return None
        self.take(key)
        self._next[key] -= 1
        return values[self._next[key] % len(values)]


def _opened_again(file: io.IOBase) -> IO[Any]:
    """A file as it was before it was read; an empty one where it was written, or is no file on a disk."""
    mode, name = str(getattr(file, "mode", "r")), getattr(file, "name", None)
    reads = mode.startswith("r") and "+" not in mode and isinstance(name, str) and Path(name).is_file()
    path = Path(cast(str, name)) if reads else Path(os.devnull)
    return path.open(mode, encoding=getattr(file, "encoding", None), errors=getattr(file, "errors", None))


_recording = _Recording()


def rewind() -> None:
    """Have the recorded values begin with the first again, as a step of the model does."""
    _recording.rewind()


class __compile_bench_no_context__:
    def __init__(self, value: object) -> None:
        self.value = value

    def __enter__(self) -> object:
        return self.value

    def __exit__(self, *_: object) -> None:
        return None


def _apart(tensor: Tensor) -> Tensor:
    """A copy without its history, which the model may go on to write into.

    What is computed from it still has a backward pass if it had one.
    """
    apart = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    mark_static(apart)
    return apart


def _followed(iterator: Iterator[Any], taken: _Followed) -> Iterator[Any]:
    for each in iterator:
        taken.append(pytree.tree_map_only(Tensor, _apart, each))
        yield each


def __compile_bench_hold__(key: str, value: Any) -> Any:
    if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        taken = _Followed()
        _recording.keep(key, taken)
        return _followed(value, taken)  # it can be gone through once: by the model
    _recording.keep(key, pytree.tree_map_only(Tensor, _apart, value))
    return value


def __compile_bench_try__(key: str, compute: Callable[[], Any], *errors: type[BaseException]) -> Any:
    """Hold what ``compute`` gives, or that it raised one of the errors that are handled around it."""
    try:
        value = compute()
    except errors as error:
        which = next(index for index, each in enumerate(errors) if isinstance(error, each))
        _recording.keep(key, _Raised(which))
        raise
    return __compile_bench_hold__(key, value)


@torch.compiler.assume_constant_result
def __compile_bench_raised__(key: str) -> int:
    return _recording.raises(key)


def __compile_bench_retry__(key: str, *errors: type[BaseException]) -> Any:
    which = __compile_bench_raised__(key)
    if which >= 0:
        raise errors[which]
    return __compile_bench_replay__(key)


def __compile_bench_snapshot__(key: str, *given: Any) -> None:
    lists = [list(each) if type(each) is list else [] for each in given]
    _recording.snapshots.setdefault(key, []).append(lists)


def __compile_bench_hold_lists__(key: str, *given: Any) -> None:
    before = _recording.snapshots[key].pop()
    for index, (old, now) in enumerate(zip(before, given, strict=True)):
        changed = type(now) is list and [*map(id, old)] != [*map(id, now)]
        order, added = _made_of(old, now) if changed else (None, None)
        _recording.keep(f"{key}:{index}", order)
        _recording.keep(f"{key}:{index}:added", added)


def _made_of(old: list[Any], now: list[Any]) -> tuple[tuple[int, ...], list[Any]]:
    """What a call made of a list that it was given.

    Returns:
        Of every element where it stood before, of a new one its place among the new ones, from -1 downwards; and the
        new ones.
    """
    places = {id(each): index for index, each in enumerate(old)}
    added = [each for each in now if id(each) not in places]
    fresh = {id(each): -1 - index for index, each in enumerate(added)}
    order = tuple((places | fresh)[id(each)] for each in now)
    return order, [pytree.tree_map_only(Tensor, _apart, each) for each in added]


@torch.compiler.assume_constant_result
def __compile_bench_changed__(key: str) -> bool:
    return _recording.goes_on_with(key, f"{key}:added")


def __compile_bench_refill__(key: str, given: list[Any]) -> None:
    """Make of a list what a held call made of it, as ``heapq.heappush`` does of a heap."""
    order = __compile_bench_held__(key)
    added = __compile_bench_value__(f"{key}:added")
    old = list(given)
    given[:] = [old[place] if place >= 0 else added[-1 - place] for place in order]


@torch.compiler.assume_constant_result
def __compile_bench_held__(key: str) -> Any:
    return _recording.take(key)


@torch.compiler.assume_constant_result
def __compile_bench_held_part__(part: int) -> Tensor:
    return cast(Tensor, _recording.parts[part])


@torch.compiler.assume_constant_result
def __compile_bench_parts__(key: str) -> int:
    return _recording.split(key)


@torch.compiler.assume_constant_result
def __compile_bench_iterates__(key: str) -> bool:
    return _recording.iterates(key)


def __compile_bench_replay__(key: str) -> Any:
    if __compile_bench_iterates__(key):
        return iter(__compile_bench_value__(key))
    return __compile_bench_value__(key)


def __compile_bench_value__(key: str) -> Any:
    """What was held; tensors as results of the graph, not as its constants.

    An attribute of a constant tensor Dynamo looks up by the name that it gave the tensor, which is that of the function
    that returned it, and fails (torch 2.13).
    """
    parts = __compile_bench_parts__(key)
    if parts == 0:
        return __compile_bench_held__(key)
    if parts == 1:
        return torch.clone(__compile_bench_held__(key))
    value = tuple([torch.clone(__compile_bench_held_part__(part)) for part in range(parts)])
    __compile_bench_held__(key)
    return value


# The rewritten sources find them among the builtins, under the names that Dynamo knows them by.
_BUILTINS = (
    __compile_bench_hold__,
    __compile_bench_replay__,
    __compile_bench_no_context__,
    __compile_bench_snapshot__,
    __compile_bench_hold_lists__,
    __compile_bench_changed__,
    __compile_bench_refill__,
    __compile_bench_try__,
    __compile_bench_retry__,
    __compile_bench_raised__,
    __compile_bench_held__,
    __compile_bench_held_part__,
    __compile_bench_parts__,
    __compile_bench_iterates__,
    __compile_bench_value__,
)
_HOLD, _REPLAY, _NO_CONTEXT, _SNAPSHOT, _HOLD_LISTS, _CHANGED, _REFILL, _TRY, _RETRY = (
    each.__name__ for each in _BUILTINS[:9]
)


def overlays(places: Mapping[tuple[str, int], Held]) -> tuple[Overlay, Overlay]:
    """The sources that record, and the sources that replay; what was recorded before is forgotten.

    Args:
        places: file and line of what is to be held, and what of it; one that cannot be held is left as it is.
    """
    for each in _BUILTINS:
        setattr(builtins, each.__name__, each)
    never_begin_at(__compile_bench_refill__)  # in a function that was given up it is called with tensors in its lists
    _recording.values.clear()
    sources: dict[str, Source] = {}
    record: dict[str, list[Edit]] = {}
    replay: dict[str, list[Edit]] = {}
    for (file, line), what in places.items():
        try:
            source = sources.setdefault(file, Source.read(Path(file)))
        except (OSError, SyntaxError):
            continue
        for first, second in _edits(source, line, what):
            record.setdefault(file, []).append(first)
            replay.setdefault(file, []).append(second)
    return _applied(sources, record), _applied(sources, replay)


def _applied(sources: Mapping[str, Source], edits: Mapping[str, list[Edit]]) -> Overlay:
    overlay = {}
    for file, each in edits.items():
        try:
            overlay[file] = sources[file].apply(_outermost(each))
        except (ValueError, SyntaxError):
            continue
    return overlay


def _outermost(edits: Iterable[Edit]) -> list[Edit]:
    """Of held expressions, one in the other, the outer one: it is known what it computes."""
    kept: list[Edit] = []
    for each in sorted(edits, key=lambda edit: (edit.start, -edit.end)):
        if not kept or each.start >= kept[-1].end:
            kept.append(each)
    return kept


def _edits(source: Source, line: int, what: Held) -> list[tuple[Edit, Edit]]:
    if what.part == "lambda":
        return [_edit(source, each) for each in source.lambda_bodies(line) if _holdable(each)]
    statements = source.statements(line)
    parts = [part for each in what.marked for part in _parts_at(source, line, each, statements)]
    if parts and len(parts) >= len(what.marked):
        return [_edit(source, each, reads="bool" if _is_condition(source, each) else "") for each in parts]
    return [edit for statement in statements for edit in _edits_of(source, statement, what.part)]


def _parts_at(source: Source, line: int, marked: Marked, statements: Collection[ast.stmt]) -> list[ast.expr]:
    """The expression that is marked in a line, if it can be held and leaves calls in the statement as they are."""
    text = source.line(line)
    indent = len(text) - len(text.lstrip())
    first, last = (len(text[: indent + each].encode("utf-8")) for each in (marked.first, marked.last))
    nodes = (node for statement in statements for node in _head(statement) if isinstance(node, ast.expr))
    found = [node for node in nodes if (line, first) in _beginnings(node) and _holdable(node)]
    if last < len(text.rstrip().encode("utf-8")):
        found = [node for node in found if (node.end_lineno, node.end_col_offset) == (line, last)]
    elif marked.branched:
        found = [node for node in found if _is_condition(source, node)]
    else:
        found = [node for node in found if isinstance(node, ast.Call)]
    if not found:
        return []
    part = min(found, key=source.end) if marked.branched else _chain_in_line(source, line, found)
    inside = set(ast.walk(part))
    statement = next(each for each in source.above(part) if isinstance(each, ast.stmt))
    besides = (node for node in _head(statement) if isinstance(node, ast.Call) and node not in inside)
    return [part] if any(besides) else []


def _chain_in_line(source: Source, line: int, found: Sequence[ast.expr]) -> ast.expr:
    """The whole of a chain such as ``x.sum().item()``, any call of which may have broken, as far as its line goes.

    What goes on in a further line is left out: a break there is one of that line.
    """
    in_line = [node for node in found if node.end_lineno == line]
    return max(in_line, key=source.end) if in_line else min(found, key=source.end)


def _beginnings(node: ast.expr) -> list[tuple[int, int]]:
    """Where a traceback may begin to mark an expression; of a method's call in a line of its own that is its name."""
    begins = [(node.lineno, node.col_offset)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        function = node.func
        assert function.end_lineno is not None
        assert function.end_col_offset is not None
        if function.end_lineno != function.value.end_lineno:
            begins.append((function.end_lineno, function.end_col_offset - len(function.attr.encode("utf-8"))))
    return begins


def _head(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement without the statements inside of it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def _is_condition(source: Source, node: ast.AST) -> bool:
    """Whether nothing but the truth of an expression matters."""
    parent = source.parents[node]
    while isinstance(parent, ast.BoolOp) or (isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)):
        node, parent = parent, source.parents[parent]
    if isinstance(parent, ast.comprehension):
        return node in parent.ifs
    return isinstance(parent, (ast.If, ast.While, ast.Assert, ast.IfExp)) and parent.test is node


def _edits_of(source: Source, statement: ast.stmt, what: Part) -> list[tuple[Edit, Edit]]:
    if what == "arguments" and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        values = [*call.args, *(word.value for word in call.keywords)]
        computed = [each for each in values if not isinstance(each, ast.Starred) and _computes(each)]
        return [_edit(source, each) for each in computed if _holdable(each)]
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return [_edit(source, item.context_expr, _NO_CONTEXT) for item in statement.items]
    if isinstance(statement, (ast.If, ast.While, ast.Assert)):
        return [_edit(source, statement.test, reads="bool")] if _holdable(statement.test) else []
    if isinstance(statement, ast.For):
        expression: ast.expr | None = statement.iter
    elif isinstance(statement, ast.Match):
        expression = statement.subject
    else:
        expression = getattr(statement, "value", None)
    if isinstance(expression, ast.Yield):
        expression = expression.value
    return [_edit(source, expression)] if expression is not None and _holdable(expression) else []


def _computes(expression: ast.expr) -> bool:
    """Whether there is anything to hold in an argument; a list that the call adds to has to stay the list it is."""
    return not (_is_path(expression) or isinstance(expression, ast.Constant))


def _holdable(expression: ast.expr) -> bool:
    return not any(isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)) for node in ast.walk(expression))


def _edit(source: Source, expression: ast.expr, wrapper: str = "", reads: str = "") -> tuple[Edit, Edit]:
    text = source.text(expression)
    key = f"{source.path}:{expression.lineno}:{expression.col_offset}"
    # The lines behind keep their numbers.
    lines = "\n" * text.count("\n")
    # In parentheses: `return scores, boxes` holds one tuple. A condition is held as what it was taken for: a tensor
    # in its place would be branched on like the one before.
    names = _named(expression)
    errors = "" if names else _handled(source, expression)
    if errors:
        # As a function: what it raises is held too, and raised again for the handlers.
        recording = f"{_TRY}({key!r}, lambda: {reads}({text}), {errors})"
        replaying = f"{_RETRY}({key!r}, {errors}{lines})"
    else:
        recording = f"{_HOLD}({key!r}, {reads}({text}))"
        replaying = f"{_REPLAY}({key!r}{lines})"
    replaying = f"{wrapper}({replaying})" if wrapper else replaying
    given = [] if names else _given(source, expression)
    if given:
        # Before the call, the call, behind it: the held value is the second of them.
        listed = ", ".join((repr(key), *given))
        recording = f"({_SNAPSHOT}({listed}), {recording}, {_HOLD_LISTS}({listed}))[1]"
        # What is not changed is not looked at: it may be what Dynamo cannot represent.
        lists = [(repr(f"{key}:{index}"), each) for index, each in enumerate(given)]
        refills = (f"{_CHANGED}({place}) and {_REFILL}({place}, {each})" for place, each in lists)
        replaying = f"({', '.join([replaying, *refills])})[0]"
    if names:
        # What := binds is held beside the value. A name that it did not come to bind is bound to None.
        kept = [f"{_HOLD}({f'{key}:{name}'!r}, locals().get({name!r}))" for name in names]
        bound = [f"({name} := {_REPLAY}({f'{key}:{name}'!r}))" for name in names]
        recording, replaying = (
            f"({', '.join([first, *rest])})[0]" for first, rest in ((recording, kept), (replaying, bound))
        )
    return source.replace(expression, recording), source.replace(expression, replaying)


def _handled(source: Source, expression: ast.expr) -> str:
    """The classes that handlers around an expression in its function name, as arguments; empty without any."""
    function = source.function(expression)
    inside: ast.AST = expression
    found: dict[str, None] = {}
    for node in source.above(expression):
        if node is function:
            break
        if isinstance(node, ast.Try) and inside in node.body:
            for handler in node.handlers:
                classes = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
                found |= {source.text(each) if each is not None else "Exception": None for each in classes}
        inside = node
    called = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    # `super()` and `locals()` mean something else in a function of their own.
    return "" if function is None or called & {"super", "locals", "__class__"} else ", ".join(found)


def _given(source: Source, expression: ast.expr) -> list[str]:
    """The names that the calls of an expression may change as lists; of those calls that certainly run."""
    found: dict[str, None] = {}
    waiting: list[ast.AST] = [expression]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            values = [*node.args, *(word.value for word in node.keywords)]
            waiting += [*owner, *values]
            if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
                values += owner
            found |= {"".join(source.text(each).split()): None for each in values if _is_path(each)}
        elif isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred, ast.Tuple, ast.BinOp, ast.UnaryOp)):
            waiting += ast.iter_child_nodes(node)
    return list(found)


def _is_path(expression: ast.expr) -> bool:
    """Whether an expression is a name, or an attribute of one."""
    while isinstance(expression, ast.Attribute):
        expression = expression.value
    return isinstance(expression, ast.Name)


def _named(expression: ast.expr) -> list[str]:
    """The names that ``:=`` binds in an expression for those around it."""
    found: dict[str, None] = {}
    waiting: list[ast.AST] = [expression]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.NamedExpr):
            found[node.target.id] = None
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.Lambda)]
    return list(found)
