"""Changes of the source that fix a graph break, each for one entry of the catalogue.

A rewrite looks at the statement that breaks and proposes edits or nothing. It proposes only edits that compute the same
by construction, and states what else they change (``effect``). :mod:`compile_bench.fixes.fixer` verifies them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from compile_bench.capture.trace import RECOMPILE_LIMIT, Break
from compile_bench.catalogue.conditions.constructs import clock_reads, time_decides
from compile_bench.catalogue.conditions.statements import calls_of, is_caught, is_in_place
from compile_bench.catalogue.source import (
    FUNCTIONS,
    Edit,
    Source,
    dotted,
    is_elementwise,
    is_exact_in_16_bits,
    is_exact_in_float32,
    is_quiet,
    last_name,
)
from compile_bench.catalogue.use import KEEPING, Use, UsedAs

Make = Callable[[Source, ast.stmt, Break], list[Edit]]

_COMPILING = "torch.compiler.is_compiling()"
_LOG_METHODS = frozenset(("debug", "info", "warning", "warn", "error", "critical", "exception", "log"))
_DISABLING = frozenset(("torch.compiler.disable", "torch._dynamo.disable"))
_TRACED = frozenset(("staticmethod", "classmethod", "torch.no_grad", "torch.inference_mode"))  # decorators
_NEW_NUMBERS = frozenset(("mean", "norm", "prod", "std", "sum", "var"))  # reductions to a float or an int64


@dataclass(frozen=True)
class Rewrite:
    """A way to change a statement."""

    case: str  # name of the catalogue's entry
    title: str  # what the change does
    effect: str  # what else changes for the user; empty if nothing does
    make: Make  # makes the edits from the file, the statement and the break; no edits where it does not apply
    needs_torch: bool = True  # whether the edits use the name torch, so that the file has to import it


@dataclass(frozen=True)
class Candidate:
    """A rewrite and its edits of one file."""

    rewrite: Rewrite
    source: Source
    edits: tuple[Edit, ...]


def candidates(source: Source, met: Break) -> Iterator[Candidate]:
    """The changes that may fix a break, the least invasive first."""
    for rewrite in REWRITES:
        added = with_torch(source) if rewrite.needs_torch else []
        ways = (rewrite.make(source, statement, met) for statement in source.statements(met.line))
        for edits in dict.fromkeys((*edits, *added) for edits in ways if edits):
            yield Candidate(rewrite, source, edits)


# -- output and upkeep ---------------------------------------------------------------------------------------------


def _guard(applies: Callable[[ast.stmt], bool]) -> Make:
    """The rewrite that runs a statement only while not compiling, if ``applies`` accepts the statement."""

    def make(source: Source, statement: ast.stmt, _: Break) -> list[Edit]:
        return _guarded(source, statement) if applies(statement) else []

    return make


def _writes(statement: ast.stmt) -> bool:
    """Whether a statement does nothing but print, warn or log."""
    call = _called(statement)
    if call is None or not all(is_quiet(value) for value in [*call.args, *(word.value for word in call.keywords)]):
        return False
    owner, _, method = dotted(call.func).rpartition(".")
    # Not self.log(), wandb.log() or logger.log({…}): what these keep is what a run is made for, and others read it.
    logs = method in _LOG_METHODS and re.search(r"(^|[._])log(ger|ging)?$", owner.lower()) is not None
    match call.args:
        case [ast.Name() | ast.Attribute() | ast.Constant(value=int()), _, *_]:
            has_level = True
        case _:
            has_level = False
    return dotted(call.func) in FUNCTIONS["output"] or (logs and (has_level or method != "log"))


def _is_upkeep(statement: ast.stmt) -> bool:
    call = _called(statement)
    return call is not None and dotted(call.func) in FUNCTIONS["upkeep"]


def _guard_report(source: Source, statement: ast.stmt, _: Break) -> list[Edit]:
    """``if x.isnan().any(): log.warning(…)`` reads the value only while not compiling."""
    if not isinstance(statement, ast.If) or statement.orelse or not all(map(_writes, statement.body)):
        return []
    if not is_quiet(statement.test) or not source.text(statement).startswith("if "):  # not an elif
        return []
    start, end = source.start(statement.test), source.end(statement.test)
    if isinstance(statement.test, (ast.Compare, ast.Call, ast.Name, ast.Attribute, ast.UnaryOp)):
        return [Edit(start, start, f"not {_COMPILING} and ")]
    return [Edit(start, start, f"not {_COMPILING} and ("), Edit(end, end, ")")]


def _guarded(source: Source, statement: ast.stmt) -> list[Edit]:
    """Edits that run a statement only while not compiling. Lines inside multi-line strings keep their indentation."""
    if not source.alone(statement):
        return [source.replace(statement, f"{source.text(statement)} if not {_COMPILING} else None")]
    indent, start = source.indent(statement), source.start(statement)
    frozen = {
        line
        for node in ast.walk(statement)
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno is not None
        for line in range(node.lineno + 1, node.end_lineno + 1)
    }
    assert statement.end_lineno is not None
    inner = range(statement.lineno + 1, statement.end_lineno + 1)
    starts = [source.line_start(line) for line in inner if line not in frozen and source.line(line).strip()]
    head = Edit(start, start, f"if not {_COMPILING}:{source.newline}{indent}{_unit(indent)}")
    return [head, *(Edit(start, start, _unit(indent)) for start in starts)]


def _read_no_clock(source: Source, statement: ast.stmt, _: Break) -> list[Edit]:
    """Change all clocks of a function. Otherwise a difference of two clocks could be the time since 1970."""
    function = source.function(statement)
    reads = clock_reads(source, function or statement)
    if not any(node in reads for node in _expressions(statement)) or time_decides(source, function or statement):
        return []
    edits = []
    for read in reads:
        if source.function(read) in (function, None):
            zero = "0" if source.text(read.func).endswith("_ns") else "0.0"
            edits.append(source.replace(read, f"({zero} if {_COMPILING} else {source.text(read)})"))
    return edits


# -- breaks that the code asks for ---------------------------------------------------------------------------------


def _drop_graph_break(source: Source, statement: ast.stmt, _: Break) -> list[Edit]:
    call = _called(statement)
    if call is None or last_name(call.func) != "graph_break":
        return []
    if len(source.block(statement)) == 1 or not source.alone(statement):
        return [source.replace(statement, "pass")]
    return [source.delete_lines(statement)]


def _drop_disable(source: Source, statement: ast.stmt, met: Break) -> list[Edit]:
    """Delete the decorator that excludes a called function from compilation."""
    if "disable" not in met.reason:
        return []
    called = {last_name(node.func) for node in _run(source, statement, met) if isinstance(node, ast.Call)}
    functions = (node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef) and node.name in called)
    edits, changed = [], []
    for function in functions:
        names = {dotted(node.func if isinstance(node, ast.Call) else node): node for node in function.decorator_list}
        disabling = names.keys() & _DISABLING
        # Dynamo looks through functools.cache, and nothing is known of the user's own decorators.
        if disabling and names.keys() <= _DISABLING | _TRACED:
            edits += [source.delete_lines(names[name]) for name in disabling]
            changed.append(function.name)
    # Of two methods with one name, the trials may run only one.
    return edits if len(changed) == len(set(changed)) else []


# -- branches on values --------------------------------------------------------------------------------------------


def _where(source: Source, statement: ast.stmt, met: Break) -> list[Edit]:
    if met.category not in ("data-dependent control flow", "tensor value read by Python"):
        return []
    if isinstance(statement, ast.If):
        return _where_statement(source, statement)
    edits = []
    for node in _run(source, statement, met):
        if isinstance(node, ast.IfExp) and not (isinstance(node.body, ast.Constant) and _is_kept(source, node)):
            condition = _condition(source, node.test)
            chosen = condition and _chosen(source, condition, node.body, node.orelse)
            if chosen:
                edits.append(source.replace(node, chosen))
    return edits


def _where_statement(source: Source, branch: ast.If) -> list[Edit]:
    """Replace an ``if`` that returns or assigns one of two values; comments inside it move above the new line."""
    if isinstance(branch.test, ast.BoolOp):
        return _where_nested(source, branch, branch.test)
    condition = _condition(source, branch.test)
    is_elif = not source.text(branch).startswith("if")
    if condition is None or is_elif or not source.alone(branch) or len(branch.body) != 1 or len(branch.orelse) > 1:
        return []
    taken, other = branch.body[0], next(iter(branch.orelse), None)
    last: ast.stmt = branch
    if isinstance(taken, ast.Return):
        block = source.block(branch)
        last = other or next(iter(block[block.index(branch) + 1 :]), branch)
        if not isinstance(last, ast.Return) or taken.value is None or last.value is None:
            return []
        head, values = "return", (taken.value, last.value)
    else:
        assigned = _assigned(taken)
        otherwise = _assigned(other) if other is not None else assigned and (assigned[0], assigned[0])
        if assigned is None or otherwise is None or assigned[0].id != otherwise[0].id:
            return []
        head, values = f"{assigned[0].id} =", (assigned[1], otherwise[1])
    chosen = _chosen(source, condition, *values)
    if not chosen:
        return []
    start, end = source.start(branch), source.end(last)
    above = "".join(f"{comment}{source.newline}{source.indent(branch)}" for comment in source.comments(start, end))
    return [Edit(start, end, f"{above}{head} {chosen}")]


def _where_nested(source: Source, branch: ast.If, test: ast.BoolOp) -> list[Edit]:
    """``if self.flag and tensor: x = f(x)`` keeps the branch on the flag."""
    *flags, last = test.values
    plain = all(dotted(flag.operand if isinstance(flag, ast.UnaryOp) else flag).startswith("self.") for flag in flags)
    if not isinstance(test.op, ast.And) or not plain or branch.orelse or len(branch.body) != 1:
        return []
    condition, assigned = _condition(source, last), _assigned(branch.body[0])
    if condition is None or assigned is None:
        return []
    name, value = assigned
    chosen = _chosen(source, condition, value, name)
    return [Edit(source.end(flags[-1]), source.end(last), ""), source.replace(value, chosen)] if chosen else []


def _chosen(source: Source, condition: str, taken: ast.expr, other: ast.expr) -> str:
    """``torch.where`` of both values, or of their argument if both are the same call of one argument.

    Empty if ``torch.where`` may compute something else.
    """
    if isinstance(taken, ast.Call) and isinstance(other, ast.Call):
        same = source.text(taken.func) == source.text(other.func) and not taken.keywords and not other.keywords
        if same and len(taken.args) == len(other.args) == 1 and not isinstance(taken.args[0], ast.Starred):
            inner = _chosen(source, condition, taken.args[0], other.args[0])
            return f"{source.text(taken.func)}({inner})" if inner else ""
    numbers = [node for node in (taken, other) if isinstance(node, ast.Constant)]
    if len(numbers) == 1 or len({type(number.value) for number in numbers}) > 1:
        return ""  # a number on one side, a tensor or a number of another type on the other
    if not all(map(is_exact_in_float32, numbers)) or not is_elementwise(taken) or not is_elementwise(other):
        return ""
    if any(_is_written_through(source, side) for side in (taken, other)):
        return ""
    return f"torch.where({condition}, {source.text(taken)}, {source.text(other)})"


def _is_written_through(source: Source, side: ast.expr) -> bool:
    """Whether one side of a branch is a tensor itself, of which torch.where makes another, and may be written in place.

    What is returned may be written by another function of the file.
    """
    if not isinstance(side, (ast.Name, ast.Attribute)):
        return False
    statement = next(node for node in source.above(side) if isinstance(node, ast.stmt))
    assigned = {target.id for target in getattr(statement, "targets", []) if isinstance(target, ast.Name)}
    names = {source.text(side), *assigned}
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=method)) if is_in_place(method):
                return True
            case ast.keyword(arg="out"):
                return True
            case ast.AugAssign(target=ast.Name() | ast.Attribute() as target):
                if isinstance(statement, ast.Return) or source.text(target) in names:
                    return True
            case ast.Assign(targets=[ast.Subscript(slice=place)]) | ast.AugAssign(target=ast.Subscript(slice=place)):
                if not (isinstance(place, ast.Constant) and isinstance(place.value, str)):
                    return True
    return False


def _condition(source: Source, test: ast.expr) -> str | None:
    """A condition as a tensor, without the ``bool()``, ``float()`` and ``.item()`` that read its value."""
    if any(isinstance(part, ast.NamedExpr) and any(_outermost_reads(part)) for part in ast.walk(test)):
        return None  # the name is a number for the lines below
    if _may_be_number(source, test):
        return None
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _condition(source, operand)
            return None if inner is None else f"torch.logical_not({inner})"
        case ast.Call(func=ast.Name(id="bool"), args=[argument]):
            return _condition(source, argument)
        case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
            return None
        case ast.Compare(ops=[_]) | ast.Name() | ast.Subscript() | ast.Call(func=ast.Attribute()):
            return _without_reads(source, test)
    return None


def _without_reads(source: Source, node: ast.expr) -> str:
    """The text of an expression with tensors in place of the calls that read their values."""
    tensor = _read_tensor(node)
    if tensor is not None and not _is_truncated(node) and not _nested(node):  # the condition is the value
        return _atom(source, tensor)
    return _with_doubles(source, node)


def _with_doubles(source: Source, node: ast.expr) -> str:
    """The text of an expression that computes as Python does: a number that it reads from a tensor is a float64 one.

    In its own dtype, a sum of bools is a bool, uint8 and float16 overflow, and 0.1 and 1e-8 are other numbers.
    """
    tensor = _read_tensor(node)
    if tensor is not None and _is_compared_exactly(source, node):
        return _atom(source, tensor)
    if tensor is not None and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return f"{_atom(source, tensor)}.double()"
    if tensor is not None and isinstance(node, ast.Call):  # float() or int(), of a number too
        inside = _with_doubles(source, node.args[0])
        number = inside if _read_tensor(node.args[0]) else f"torch.as_tensor({inside}, dtype=torch.float64)"
        return f"{number}.trunc()" if _is_truncated(node) else number
    start, text = source.start(node), source.text(node).encode("utf-8")
    for read in sorted(_outermost_reads(node), key=source.start, reverse=True):
        inner = _with_doubles(source, read).encode("utf-8")
        text = text[: source.start(read) - start] + inner + text[source.end(read) - start :]
    return text.decode("utf-8")


def _outermost_reads(node: ast.AST) -> Iterator[ast.expr]:
    """The calls in an expression that read a value; those inside another one are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and _read_tensor(child) is not None:
            yield child
        else:
            yield from _outermost_reads(child)


def _nested(read: ast.expr) -> bool:
    """Whether the argument of ``float()`` computes with values that it reads itself."""
    tensor = _read_tensor(read)
    return tensor is not None and any(_outermost_reads(tensor))


def _is_truncated(read: ast.expr) -> bool:
    return isinstance(read, ast.Call) and dotted(read.func) == "int"


def _is_compared_exactly(source: Source, read: ast.expr) -> bool:
    """Whether a value is compared with a number that all dtypes have, so that its own dtype gives the same answer."""
    match source.parents.get(read):
        case ast.Compare(left=left, comparators=[right]) if not _is_truncated(read) and not _nested(read):
            other = right if read is left else left
            other = other.operand if isinstance(other, ast.UnaryOp) else other
            return isinstance(other, ast.Constant) and is_exact_in_16_bits(other)
    return False


def _atom(source: Source, node: ast.expr) -> str:
    """The text of an expression, to which a method or an operator may be added."""
    atoms = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
    return source.text(node) if isinstance(node, atoms) else f"({source.text(node)})"


def _assert_async(source: Source, statement: ast.stmt, met: Break) -> list[Edit]:
    """``if x.isnan().any(): raise …`` becomes a check on the device while compiling."""
    if not isinstance(statement, ast.If) or met.category != "data-dependent control flow":
        return []
    if len(statement.body) != 1 or statement.orelse or not isinstance(statement.body[0], ast.Raise):
        return []
    condition = _condition(source, statement.test)
    if condition is None or not source.text(statement).startswith("if ") or is_caught(source, statement, met.stack):
        return []
    match statement.body[0].exc:
        case ast.Call(args=[ast.Constant(value=str()) as said, *_]):
            message = source.text(said)
        case _:
            message = repr(source.text(statement.test))
    start, newline, indent = source.start(statement), source.newline, source.indent(statement)
    check = f"torch._assert_async(torch.logical_not({condition}), {message})"
    head = f"if {_COMPILING}:{newline}{indent}{_unit(indent)}{check}{newline}{indent}elif"
    return [Edit(start, start + len("if"), head)]


# -- values that Python reads --------------------------------------------------------------------------------------


def _keep_tensor(source: Source, statement: ast.stmt, met: Break) -> list[Edit]:
    if met.category != "tensor value read by Python":
        return []
    edits = []
    for node in _run(source, statement, met):
        tensor = _read_tensor(node)
        if tensor is None or not isinstance(node, ast.Call) or _may_be_number(source, tensor):
            continue
        if not _only_computed_with(source, node):
            continue
        number_type = {"int": ".long()", "float": ".float()"}.get(dotted(node.func), "")
        edits.append(source.replace(node, _as_number(source, tensor) + number_type))
    return edits


def _as_number(source: Source, tensor: ast.expr) -> str:
    """A tensor without dimensions that stands for the number that item() gives."""
    kept = f"{_atom(source, tensor)}.detach()"  # item() cuts the gradient, too
    match tensor:
        case ast.Call(func=ast.Attribute(attr=name), args=[], keywords=[]) if name in FUNCTIONS["reductions"]:
            # Those that give an element keep its dtype, and a sum of uint8 or bool would overflow.
            return kept if name in _NEW_NUMBERS else f"{kept}.sum()"
    # A sum makes integers and bools int64, and does not see what is later written into the tensor.
    return f"{kept}.reshape(()).sum()"


def _read_tensor(node: ast.AST) -> ast.expr | None:
    """The tensor expression of a call that reads a value into Python; None if it reads none."""
    match node:
        case ast.Call(func=ast.Attribute(attr="item", value=tensor), args=[]):
            return tensor
        case ast.Call(func=ast.Name(id="float" | "int"), args=[argument]):
            return _read_tensor(argument) or (None if isinstance(argument, (ast.Constant, ast.Starred)) else argument)
    return None


def _may_be_number(source: Source, node: ast.expr) -> bool:
    """Whether all that an expression computes with are parameters for which a caller may give a number."""
    function = source.function(node)
    if function is None:
        return False
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(given.defaults)), *given.defaults]
    numbers = {
        parameter.arg
        for parameter, default in zip([*positional, *given.kwonlyargs], [*defaults, *given.kw_defaults], strict=True)
        if (parameter.annotation is not None and re.search(r"\b(int|float|bool)\b", ast.unparse(parameter.annotation)))
        or (isinstance(default, ast.Constant) and isinstance(default.value, (int, float)))
    }
    names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    return bool(names) and numbers.issuperset(names)


def _only_computed_with(source: Source, node: ast.expr) -> bool:
    """Whether a value is used in arithmetic alone, where a tensor without dimensions can replace a number."""
    if not Use(source, node.lineno).used_as(node) <= {UsedAs.ARITHMETIC, UsedAs.RETURNED}:
        return False
    function = source.function(node)
    match source.parents[node]:
        case ast.BinOp() | ast.UnaryOp():
            return _goes_into_arithmetic(source, node)
        case ast.Assign(targets=[ast.Name(id=name)]) if function is not None:
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
            # In place, a number may become one of another type, and a tensor may not.
            in_place = [node for node in names if isinstance(source.parents[node], ast.AugAssign)]
            loads = [node for node in names if isinstance(node.ctx, ast.Load)] + in_place
            return bool(loads) and all(_goes_into_arithmetic(source, load) for load in loads)
        case ast.Return() if function is not None and function.name.startswith("_"):  # others call it elsewhere
            calls = calls_of(source, function.name)
            mentions = [node for node in ast.walk(source.tree) if isinstance(node, (ast.Name, ast.Attribute))]
            called_only = len(calls) == sum(last_name(node) == function.name for node in mentions)
            returned = any(isinstance(source.parents[call], ast.Return) for call in calls)
            return (
                bool(calls)
                and called_only
                and not returned
                and all(_only_computed_with(source, call) for call in calls)
            )
    return False


def _goes_into_arithmetic(source: Source, node: ast.expr) -> bool:
    parent = source.parents[node]
    match parent:
        # As tensors, powers of two integers overflow, and 2**-1 is 0; so with shifts.
        case ast.BinOp(op=ast.Pow() | ast.LShift() | ast.RShift(), left=left):
            is_safe = isinstance(left, ast.Constant) and isinstance(left.value, float)
        case ast.BinOp() if any(_is_wide(part) for part in ast.walk(parent)):
            is_safe = False
        case ast.BinOp() | ast.UnaryOp():
            is_safe = True
        case _:
            is_safe = False
    return is_safe and not _is_kept(source, node)


def _is_wide(node: ast.AST) -> bool:
    """Whether a node is an integer so large that a product with a tensor may overflow, as Python's does not."""
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) >= 1 << 31


def _is_kept(source: Source, node: ast.expr) -> bool:
    """Whether a result is stored beyond the call or shown; code that reads it later expects a number."""
    parent = source.parents[node]
    while isinstance(parent, (ast.BinOp, ast.UnaryOp)):
        node, parent = parent, source.parents[parent]
    if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
        return any(map(_outlasts_call, targets))
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute):
        return parent.func.attr in KEEPING
    return isinstance(parent, (ast.Dict, ast.List, ast.Set, ast.Tuple, ast.FormattedValue))


def _outlasts_call(target: ast.expr) -> bool:
    """Whether an assignment to a target can be read after the call: to an attribute or to ``log["loss"]``."""
    match target:
        case ast.Attribute() | ast.Subscript(slice=ast.Constant(value=str())):
            return True
    return False


def _masked_sum(source: Source, statement: ast.stmt, met: Break) -> list[Edit]:
    if met.category != "data-dependent shape":
        return []
    edits = []
    for node in _expressions(statement):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="sum", value=ast.Subscript(value=tensor, slice=ast.Compare(left=left) as mask)),
                args=[],
                keywords=[],
            ):
                values = source.text(tensor)
                if source.text(left) in (values, f"{values}.abs()"):
                    edits.append(source.replace(node, f"{values}.where({source.text(mask)}, 0).sum()"))
    return edits


# -- counters ------------------------------------------------------------------------------------------------------


def _count_in_buffer(source: Source, statement: ast.stmt, met: Break) -> list[Edit]:
    """``self.seen += n`` of a module becomes ``self.seen = self.seen + n`` of a buffer, whose value is in no guard.

    In place, the sum would change a tensor that the backward pass may need.
    """
    owner = next((outer for outer in source.above(statement) if isinstance(outer, ast.ClassDef)), None)
    if met.category != RECOMPILE_LIMIT or owner is None or not Use(source, met.line).in_module:
        return []
    read = {name for node in _expressions(statement) if (name := _own_attribute(node))}
    edits: list[Edit] = []
    for name in sorted(read):
        used = Use(source, met.line, value=f"self.{name}").used_as()
        if used <= {UsedAs.ARITHMETIC, UsedAs.STEP}:  # a tensor is no key, and no member of a set
            edits += _as_buffer(source, owner, name)
    return edits


def _as_buffer(source: Source, owner: ast.ClassDef, name: str) -> list[Edit]:
    """Edits that make a module's integer attribute a buffer; none if it is not one that only the module changes."""
    edits, made, counted = [], False, False
    for node in ast.walk(source.tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        changed = [target for target in targets if isinstance(target, ast.Attribute) and target.attr == name]
        if not changed:
            continue
        if len(targets) > 1 or _own_attribute(changed[0]) != name:
            return []
        if owner not in source.above(node):  # another class has an attribute of this name
            continue
        function, value, own = source.function(node), node.value, source.receiver(node)
        if value is None or function is None:
            return []
        if function.name == "__init__" and isinstance(value, ast.Constant) and type(value.value) is int and not made:
            text = f'{own}.register_buffer("{name}", torch.tensor({source.text(value)}), persistent=False)'
            made = True
        elif function.name == "__init__":
            return []
        elif isinstance(node, ast.AugAssign):
            if not isinstance(node.op, (ast.Add, ast.Sub)):
                return []
            sign = "+" if isinstance(node.op, ast.Add) else "-"
            step = source.text(value)
            step = step if isinstance(value, (ast.Name, ast.Constant, ast.Call, ast.Attribute)) else f"({step})"
            text, counted = f"{own}.{name} = {own}.{name} {sign} {step}", True
        else:
            text = f"{own}.{name} = torch.as_tensor({source.text(value)}, device={own}.{name}.device)"
            counted = True
        edits.append(source.replace(node, text))
    return edits if made and counted else []


def _own_attribute(node: ast.AST) -> str:
    """``name`` for ``self.name``; empty for anything else."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return ""


# -- settings ------------------------------------------------------------------------------------------------------


def _setting(name: str, value: str, mark: str) -> Make:
    def make(source: Source, statement: ast.stmt, met: Break) -> list[Edit]:
        text = f"{met.category} {met.reason}"
        if name == "capture_scalar_outputs" and _tests_for_nan(source):
            return []
        return with_torch(source, f"torch._dynamo.config.{name} = {value}") if mark in text else []

    return make


def _tests_for_nan(source: Source) -> bool:
    """Whether a file compares a value with itself. Of a number that it captured, Dynamo takes that to be equal."""
    compared = (node for node in ast.walk(source.tree) if isinstance(node, ast.Compare))
    sides = ([ast.unparse(side) for side in (node.left, *node.comparators)] for node in compared)
    return any(one == other for texts in sides for one, other in pairwise(texts))


# Name of the catalogue's entry, setting of torch._dynamo.config, its value, and words of the category or reason.
_SETTINGS = (
    ("item-captured", "capture_scalar_outputs", "True", "tensor value read by Python"),
    ("dynamic-shape-captured", "capture_dynamic_output_shape_ops", "True", "data-dependent shape"),
    ("rnn-allowed", "allow_rnn", "True", "RNN, GRU, or LSTM"),
    ("parameter-made-inside", "graph_break_on_nn_param_ctor", "False", "`torch.nn.Parameter()` constructor"),
)
CHANGED_SETTINGS = tuple(name for _, name, _, _ in _SETTINGS)
_PROCESS_WIDE = "the setting applies to the whole process: it changes how every model in it is traced"

REWRITES = (
    Rewrite("graph-break-call", "remove the call of graph_break()", "", _drop_graph_break, needs_torch=False),
    Rewrite("print", "write only while not compiling", "a compiled model no longer writes this", _guard(_writes)),
    Rewrite(
        "warn-on-value",
        "check only while not compiling",
        "a compiled model neither checks this nor writes it",
        _guard_report,
    ),
    Rewrite("upkeep", "do it only while not compiling", "a compiled model no longer does this", _guard(_is_upkeep)),
    Rewrite("clock", "read the clock only while not compiling", "times read 0 in a compiled model", _read_no_clock),
    Rewrite(
        "raise-on-value",
        "check on the device while compiling",
        "compiled, the error is a RuntimeError, and on a GPU one of the device",
        _assert_async,
    ),
    Rewrite(
        "branch-on-value",
        "compute both sides and choose with torch.where",
        "both sides are computed; NaN or infinity in the one not chosen can reach the gradient",
        _where,
    ),
    Rewrite(
        "item",
        "keep the value a tensor without dimensions",
        "what is computed with this value and numbers alone has the tensor's precision",
        _keep_tensor,
        needs_torch=False,
    ),
    Rewrite(
        "counter",
        "count in a buffer",
        "the count is a tensor, which state_dict leaves out: read it with int(); counted under torch.inference_mode(), "
        "it cannot be saved for a backward pass",
        _count_in_buffer,
    ),
    Rewrite(
        "boolean-mask",
        "sum with zeros in the place of what is masked",
        "the order of the sum",
        _masked_sum,
        needs_torch=False,
    ),
    Rewrite(
        "disabled-function",
        "compile the function too",
        "a function kept out on purpose is compiled",
        _drop_disable,
        needs_torch=False,
    ),
    *(
        Rewrite(case, name, _PROCESS_WIDE, _setting(name, value, mark), needs_torch=False)
        for case, name, value, mark in _SETTINGS
    ),
)


# -- helpers -------------------------------------------------------------------------------------------------------


def with_torch(source: Source, line: str = "") -> list[Edit]:
    """Edits that add ``import torch``, unless a module has it, and then ``line``, after the module's imports."""
    imports = [node for node in source.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    has_torch = any(
        isinstance(node, ast.Import) and any(a.name.partition(".")[0] == "torch" and not a.asname for a in node.names)
        for node in imports
    )
    lines = ([] if has_torch else ["import torch"]) + (["", line] if line else [])
    if not lines:
        return []
    first = source.tree.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    last = imports[-1] if imports else (first if has_docstring else None)
    offset = 0 if last is None else source.line_start((last.end_lineno or last.lineno) + 1)
    text = "".join(f"{line}{source.newline}" for line in lines)
    if offset and not source.content[:offset].endswith(b"\n"):  # the last line of a file may lack its line end
        text = source.newline + text
    return [Edit(offset, offset, text)]


def _called(statement: ast.stmt) -> ast.Call | None:
    """The call that a statement consists of; None for another statement."""
    match statement:
        case ast.Expr(value=ast.Call() as call):
            return call
    return None


def _expressions(statement: ast.stmt | ast.expr) -> Iterator[ast.AST]:
    """The nodes of a statement, without the statements and lambdas inside it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        later = (ast.stmt, ast.Lambda)
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, later)]


def _run(source: Source, statement: ast.stmt, met: Break) -> Iterator[ast.AST]:
    """The nodes that run in the function of a break: for a lambda its body, not the statement that makes it."""
    roots = source.lambda_bodies(met.line) if met.function == "<lambda>" else [statement]
    for root in roots:
        yield from _expressions(root)


def _assigned(statement: ast.stmt) -> tuple[ast.Name, ast.expr] | None:
    """The name that a statement assigns to, and the value; None if the statement does anything else."""
    match statement:
        case ast.Assign(targets=[ast.Name() as name], value=value):
            return name, value
    return None


def _unit(indent: str) -> str:
    return "\t" if indent.endswith("\t") else "    "
