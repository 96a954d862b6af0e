"""Conditions on single constructs, each for one or two entries of the catalogue. Nothing here imports torch."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from compile_bench.catalogue.conditions.condition import Condition, condition, on_calls, with_arguments
from compile_bench.catalogue.conditions.statements import around_call, comes_from_outside, value_of
from compile_bench.catalogue.source import Source, dotted, is_elementwise
from compile_bench.catalogue.use import KEEPING, WRITING, Use, UsedAs, name_of


def _reduced_by(use: Use, node: ast.AST, names: frozenset[str]) -> bool:
    """Whether a reduction is made of a node, perhaps of a stack of it."""
    for outer in use.syntax.above(node):
        if isinstance(outer, ast.Call) and name_of(outer.func) in names:
            return True
        if not isinstance(outer, (ast.Attribute, ast.Call)) or (
            isinstance(outer, ast.Call) and name_of(outer.func) not in {"stack", "cat", "float"}
        ):
            return False
    return False


@with_arguments
def reduced(*kinds: str, of: Sequence[str] = (), by: Sequence[str] = ("sum",)) -> Condition:
    """Only a sum, or another of these reductions, is made of the nodes of these kinds of ``ast``, or of these calls."""

    def holds(use: Use) -> bool:
        nodes: list[ast.AST] = [*use.calls(*of)] if of else []
        if kinds:
            nodes = [node for node in use.nodes if type(node).__name__ in kinds and not _is_parts_of(use, node)]
        return bool(nodes) and all(_reduced_by(use, node, frozenset(by)) for node in nodes)

    return Condition(f"only its {' or '.join(by)} is used", holds)


def _is_parts_of(use: Use, node: ast.AST) -> bool:
    """Whether a subscript is in another one, or of a shape."""
    inner = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    return inner or any(isinstance(outer, ast.Subscript) for outer in use.syntax.above(node))


@condition("the class uses no local name of the function")
def class_of_its_own(use: Use) -> bool:
    return isinstance(use.statement, ast.ClassDef) and not any(map(use.varies, use.statement.body))


@condition("the function only stores into it and does not read it")
def stored_only(use: Use) -> bool:
    match use.statement:
        case ast.Assign(targets=[ast.Subscript(value=container)]):
            name = dotted(container)
            mentions = [node for node in use.within if isinstance(node, ast.expr) and dotted(node) == name]
            return bool(name) and len(mentions) == 1
    return False


@on_calls("deepcopy", text="an attribute is copied that the function does not change")
def copies_own_module(use: Use, call: ast.Call) -> bool:
    return (
        len(call.args) == 1
        and dotted(call.args[0]).startswith("self.")
        and not any(isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) for node in use.within)
    )


@condition("the function restores the state that it saved, or forks around all it does")
def saves_and_restores(use: Use) -> bool:
    calls = {name_of(node.func) for node in use.within if isinstance(node, ast.Call)}
    return {"get_rng_state", "set_rng_state"} <= calls or (bool(use.calls("fork_rng")) and around_call.holds(use))


_CLOCKS = frozenset(("time", "perf_counter", "monotonic", "process_time", "thread_time"))
# What these are given decides nothing.
_SHOWING = KEEPING | WRITING | {"abs", "float", "int", "round"}


def clock_reads(source: Source, scope: ast.AST) -> list[ast.Call]:
    """The calls that read a clock of the module time, also under a name that ``from time import …`` gives it."""
    imports = (node for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom) and node.module == "time")
    names = (alias for node in imports for alias in node.names if alias.name.removesuffix("_ns") in _CLOCKS)
    bare = {alias.asname or alias.name for alias in names}

    def is_clock(call: ast.Call) -> bool:
        owner, _, name = dotted(call.func).rpartition(".")
        return owner == "time" and name.removesuffix("_ns") in _CLOCKS if owner else name in bare

    calls = (node for node in ast.walk(scope) if isinstance(node, ast.Call) and not node.args and not node.keywords)
    return [call for call in calls if is_clock(call)]


def time_decides(source: Source, scope: ast.AST) -> bool:
    """Whether a time that a function reads may decide anything: a deadline, the best time, a seed, a key."""
    reads, timed = clock_reads(source, scope), set[str]()

    def of_time(node: ast.AST) -> bool:
        return any(part in reads or (isinstance(part, ast.expr) and dotted(part) in timed) for part in ast.walk(node))

    assignments = [node for node in ast.walk(scope) if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))]
    before = None
    while before != timed:  # a time may pass through any number of names
        before = set(timed)
        for assignment in assignments:
            targets = assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target]
            if assignment.value is not None and of_time(assignment.value):
                timed |= {dotted(target) for target in targets} - {""}
    kept = {name for name in timed if "." in name}
    elsewhere = (part for node in ast.walk(source.tree) for decisive in _decisive(node) for part in ast.walk(decisive))
    return any(of_time(decisive) for node in ast.walk(scope) for decisive in _decisive(node)) or any(
        isinstance(part, ast.Attribute) and dotted(part) in kept for part in elsewhere
    )


def _decisive(node: ast.AST) -> Sequence[ast.expr]:
    """The expressions in a node that may decide something."""
    match node:
        case ast.Compare():
            return [node]
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
            return [test]
        case ast.Subscript(slice=key):
            return [key]
        case ast.Call(func=function, args=args, keywords=words) if name_of(function) not in _SHOWING:
            return [*args, *(word.value for word in words)]
    return []


@condition("no time is compared with anything, such as a deadline, and no other function gets it")
def times_decide_nothing(use: Use) -> bool:
    function = use.function
    return function is not None and bool(clock_reads(use.syntax, function)) and not time_decides(use.syntax, function)


@condition("every operand is a tensor: none is a flag or a test for None")
def plain_operands(use: Use) -> bool:
    return not any(_is_flag(operand) for node in use.nodes if isinstance(node, ast.BoolOp) for operand in node.values)


def _is_flag(operand: ast.expr) -> bool:
    match operand:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return _is_flag(inner)
        case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
            return True
    return isinstance(operand, (ast.Name, ast.Attribute, ast.Constant))


@condition("the text is returned or written, and is no key and no condition")
def text_is_shown(use: Use) -> bool:
    texts = [node for node in use.nodes if isinstance(node, ast.JoinedStr)]
    made: list[ast.AST] = [*texts, *use.calls("format", "str", "repr")]
    return bool(made) and all(
        use.used_as(node) <= {UsedAs.RETURNED, UsedAs.UNUSED, UsedAs.TEXT, UsedAs.LENGTH} for node in made
    )


def _entries(use: Use, name: str) -> ast.expr | None:
    """What a name is bound to in the function, or else in the file, if it is bound once."""
    for scope in (use.function, use.syntax.tree):
        assignments = [node for node in ast.walk(scope) if isinstance(node, ast.Assign)] if scope is not None else []
        bound = [assignment.value for assignment in assignments if name in map(dotted, assignment.targets)]
        if bound:
            return bound[0] if len(bound) == 1 else None
    return None


def _indexed(use: Use) -> list[ast.Subscript]:
    return [node for node in use.nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)]


@condition("the dict has the keys 0, 1, … and numbers as values")
def dict_of_numbers(use: Use) -> bool:
    tables = [_entries(use, dotted(subscript.value)) for subscript in _indexed(use)]
    return bool(tables) and all(
        isinstance(table, ast.Dict)
        and all(isinstance(key, ast.Constant) and isinstance(key.value, int) for key in table.keys)
        and all(isinstance(value, ast.Constant) and isinstance(value.value, (int, float)) for value in table.values)
        for table in tables
    )


@condition("a list of tensors that the file writes out is read, and they have one shape")
def list_of_tensors(use: Use) -> bool:
    indexed = [
        subscript
        for subscript in _indexed(use)
        if not isinstance(subscript.slice, (ast.Slice, ast.Tuple, ast.Constant))
    ]
    lists = [
        _entries(use, dotted(subscript.value)) if dotted(subscript.value) else subscript.value for subscript in indexed
    ]
    return bool(lists) and all(isinstance(listed, (ast.List, ast.ListComp)) for listed in lists)


@condition("every case only assigns or returns, elementwise")
def cases_are_values(use: Use) -> bool:
    statement = use.statement
    return isinstance(statement, ast.Match) and all(
        len(case.body) == 1 and (value := value_of(case.body[0])) is not None and is_elementwise(value)
        for case in statement.cases
    )


@on_calls("sorted", "min", "max", text="one of a list of tensors is picked")
def picked_from_list(use: Use, call: ast.Call) -> bool:
    return isinstance(next(iter(call.args), None), (ast.List, ast.Tuple, ast.Name)) and (
        name_of(call.func) != "sorted" or isinstance(use.syntax.parents[call], ast.Subscript)
    )


@condition("the tensor is an argument, or a copy of one")
def set_on_argument(use: Use) -> bool:
    match use.statement:
        case ast.Assign(targets=[ast.Attribute(attr="requires_grad", value=ast.Name(id=name))]):
            made = _entries(use, name)
            return use.is_parameter(name) or (made is not None and comes_from_outside(use, made))
    return False


def written_in_place(use: Use, name: str) -> bool:
    """Whether the function writes into the tensor that has a name."""
    for node in use.within:
        match node:
            case ast.Call(func=ast.Attribute(attr=method, value=tensor)) if method.endswith("_"):
                if dotted(tensor) == name:
                    return True
            case ast.Subscript(ctx=ast.Store(), value=tensor) if dotted(tensor) == name:
                return True
            case ast.AugAssign(target=target) if dotted(target) == name:
                return True
    return False


@condition("nothing is written into the copy")
def copy_is_read(use: Use) -> bool:
    match use.statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return not written_in_place(use, name)
    return isinstance(use.statement, ast.Return)


@condition("its class is in this file and changes no operation")
def plain_subclass(use: Use) -> bool:
    names = {dotted(argument) for call in use.calls("as_subclass") for argument in call.args}
    classes = [node for node in ast.walk(use.syntax.tree) if isinstance(node, ast.ClassDef) and node.name in names]
    return bool(classes) and not any("__torch_" in ast.unparse(kind) for kind in classes)
