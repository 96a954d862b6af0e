"""Conditions on where a line is, what calls depend on, and what the sides of branches and loops do."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from pathlib import Path

from compile_bench.capture.frames import Frame
from compile_bench.catalogue.conditions.condition import Condition, condition, with_arguments
from compile_bench.catalogue.source import Source, dotted, is_elementwise, is_quiet, last_name
from compile_bench.catalogue.use import KEEPING, Use, UsedAs, assigned_in, is_constant, name_of, parameters

LOOPS = (ast.For, ast.While, ast.AsyncFor)
_INDEPENDENT = "it depends on nothing that the function gets or computes"


@condition("the statement is this call alone, and its arguments change nothing")
def unused(use: Use) -> bool:
    statement = use.statement
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    call = statement.value
    return all(map(is_quiet, [*call.args, *(word.value for word in call.keywords)]))


@with_arguments
def independent(*names: str) -> Condition:
    """The calls with these names, or the statement, depend on nothing that the function gets or computes."""

    def holds(use: Use) -> bool:
        nodes: list[ast.AST] = [*use.calls(*names)] if names else [use.node] if use.node is not None else []
        return bool(nodes) and not any(map(use.varies, nodes))

    return Condition(_INDEPENDENT, holds)


@condition(_INDEPENDENT)
def statement_independent(use: Use) -> bool:
    return isinstance(use.statement, (ast.Expr, ast.With, ast.Assign, ast.ClassDef)) and not any(
        use.varies(node) for node in _values(use.statement)
    )


def _values(statement: ast.stmt) -> list[ast.AST]:
    match statement:
        case ast.Assign(value=value):
            return [value]
        case ast.With(items=items):
            return [item.context_expr for item in items]
        case ast.ClassDef(body=body):
            return [*body]
    return [statement]


@condition("it runs once in every call: no loop and no branch is around it")
def once_a_call(use: Use) -> bool:
    return use.statement is not None and not any(
        isinstance(outer, (*LOOPS, ast.If, ast.Try)) for outer in statements_around(use)
    )


def statements_around(use: Use) -> list[ast.AST]:
    """The statements around the line, within its function."""
    around: list[ast.AST] = []
    for outer in use.syntax.above(use.statement) if use.statement is not None else ():
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            break
        around.append(outer)
    return around


@with_arguments
def of_argument(*names: str) -> Condition:
    """What the call is applied to is an argument of the function, or made from one by a method."""

    def holds(use: Use) -> bool:
        calls = use.calls(*names)
        return bool(calls) and all(comes_from_outside(use, _subject(call)) for call in calls)

    return Condition("it is applied to an argument or an attribute, not to what the function computes", holds)


def _subject(call: ast.Call) -> ast.expr:
    """What a method is called on, or the first argument of a function of a module."""
    first = next(iter(call.args), call.func)
    if not isinstance(call.func, ast.Attribute):
        return first
    inside = call.func.value
    return first if dotted(inside).partition(".")[0] in ("torch", "copy", "np", "nn", "F") else inside


def comes_from_outside(use: Use, node: ast.expr) -> bool:
    """Whether a value is an argument or an attribute, or made from one by methods."""
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Attribute) or any(use.varies(argument) for argument in node.args):
                return False
            node = node.func.value
        else:
            node = node.value
    return isinstance(node, ast.Name) and (node.id == "self" or use.is_parameter(node.id) or not use.varies(node))


@with_arguments
def has_keyword(call: str, keyword: str, *, given: bool = True) -> Condition:
    """A call has a keyword argument, or lacks it."""

    def holds(use: Use) -> bool:
        calls = use.calls(call)
        return bool(calls) and all((keyword in [word.arg for word in node.keywords]) is given for node in calls)

    return Condition(f"{keyword} is {'given' if given else 'not given'}", holds)


WRITING = frozenset(
    ("print", "pprint", "warn", "write", "flush", "debug", "info", "warning", "error", "critical", "exception", "log")
)
# Calls that read a value, write, or keep something.
_EFFECTS = WRITING | KEEPING | frozenset(("add", "item", "tolist", "numpy", "cpu", "data_ptr"))


def value_of(statement: ast.stmt) -> ast.expr | None:
    """What a statement assigns to one local name, or returns; None if it does anything else."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=value) | ast.Return(value=ast.expr() as value):
            return value
    return None


def _only_values(use: Use, accepts: Callable[[ast.expr], bool]) -> bool:
    """Whether the statement is an ``if`` whose sides give values that are accepted, without an ``elif``."""
    statement = use.statement
    if not isinstance(statement, ast.If) or isinstance(next(iter(statement.orelse), None), ast.If):
        return False
    sides = [statement.body, statement.orelse]
    values = [value_of(statement) for side in sides for statement in side]
    if any(value is None for value in values) or not _gives_both(use, sides) or _reaches_an_argument(use, statement):
        return False
    return all(value is not None and accepts(value) for value in values)


def _reaches_an_argument(use: Use, branch: ast.If) -> bool:
    """Whether what follows may write into a tensor that a side leaves as it is: torch.where makes another one."""
    inside = (*branch.body, *branch.orelse)
    assigned = set[str]().union(*map(assigned_in, inside))
    again = any(isinstance(outer, LOOPS) for outer in statements_around(use))
    later = (node for node in use.within if again or getattr(node, "lineno", 0) > (branch.end_lineno or branch.lineno))
    changed = {_root(target) for node in later for target in _changed_in_place(node)} - {"self"}
    left = {value.id for inner in inside if isinstance(value := value_of(inner), ast.Name)}
    left |= set() if branch.orelse else assigned
    # By another name, too: an argument is the caller's.
    arguments = parameters(use.function) if use.function is not None else set()
    return bool(changed & assigned) or bool(changed and left & arguments)


def _changed_in_place(node: ast.AST) -> list[ast.expr]:
    """The expressions whose values a node changes in place."""
    match node:
        case ast.Call(func=ast.Attribute(attr=method, value=value)) if is_in_place(method):
            # Of a module, such as F.relu_(x) or nn.init.zeros_(x), the first argument.
            return [value, *node.args[:1]]
        case ast.keyword(arg="out", value=value):
            return [value]
        case ast.AugAssign(target=target):
            return [target]
        case ast.Assign(targets=targets):
            return [target for target in targets if isinstance(target, ast.Subscript)]
    return []


def is_in_place(method: str) -> bool:
    """Whether a method changes its object in place, by the name that torch gives such a one."""
    return method.endswith("_") and not method.endswith("__")


def _root(node: ast.expr) -> str:
    """The name that an expression begins with: ``x`` for ``x[0].view(-1)``."""
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _gives_both(use: Use, sides: list[list[ast.stmt]]) -> bool:
    """Whether both sides return, or both only assign names that exist without them."""
    returns = [any(isinstance(inner, ast.Return) for inner in side) for side in sides]
    if not any(returns):
        targets = set[str]().union(*(assigned_in(inner) for side in sides for inner in side))
        function, branch = use.function, use.statement
        assert branch is not None
        if all(targets == set().union(*(assigned_in(inner) for inner in side)) for side in sides):
            return True
        before = {
            node.id
            for node in use.within
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno < branch.lineno
        }
        return targets <= before | (parameters(function) if function is not None else set())
    if all(returns):
        return True
    statement = use.statement
    assert statement is not None
    block = use.syntax.block(statement)
    following = block[block.index(statement) + 1 :]
    return returns[0] and not sides[1] and len(following) == 1 and isinstance(following[0], ast.Return)


def changes_nothing(node: ast.AST) -> bool:
    """Whether an expression only computes: no method in place, nothing that writes, no assignment inside."""
    for part in ast.walk(node):
        match part:
            case ast.Call(func=function):
                name = name_of(function)
                if name in _EFFECTS or is_in_place(name):
                    return False
            case ast.NamedExpr() | ast.Await() | ast.Yield() | ast.YieldFrom():
                return False
    return True


@condition(
    "both sides only assign the same local names, or return, and compute elementwise; what they assign is not changed "
    "in place"
)
def elementwise_sides(use: Use) -> bool:
    return _only_values(use, is_elementwise)


@condition(
    "both sides only assign the same local names, or return, and change nothing else; what they assign is not changed "
    "in place; they must give tensors of the same shapes"
)
def pure_sides(use: Use) -> bool:
    return _only_values(use, lambda value: changes_nothing(value) and not is_constant(value))


@condition("the result is part of a tensor, and no `if` or `while` tests it")
def not_a_test(use: Use) -> bool:
    return isinstance(use.node, ast.expr) and _outermost_use(use) <= {UsedAs.ARITHMETIC}


@condition("one value is compared twice")
def chained(use: Use) -> bool:
    return any(isinstance(node, ast.Compare) and len(node.ops) > 1 for node in use.nodes)


def _outermost_use(use: Use) -> frozenset[UsedAs]:
    node = use.node
    assert isinstance(node, ast.expr)
    while isinstance(around := use.syntax.parents.get(node), (ast.BoolOp, ast.Compare)):
        node = around
    return use.used_as(node) or frozenset((UsedAs.BRANCH,))


@condition("both values are numbers or elementwise, and the result goes into arithmetic with tensors")
def choice_of_numbers(use: Use) -> bool:
    chosen = [node for node in use.nodes if isinstance(node, ast.IfExp)]
    return bool(chosen) and all(
        is_elementwise(node.body) and is_elementwise(node.orelse) and use.used_as(node) <= {UsedAs.ARITHMETIC}
        for node in chosen
    )


def _writes_only(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and name_of(statement.value.func) in WRITING
    )


@condition("the body only prints, warns or logs, and there is no else")
def body_writes(use: Use) -> bool:
    return isinstance(use.statement, ast.If) and not use.statement.orelse and all(map(_writes_only, use.statement.body))


def calls_of(source: Source, name: str) -> list[ast.Call]:
    """The calls in a file of anything with this name: ``name()``, ``self.name()`` and the like."""
    calls = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
    return [call for call in calls if last_name(call.func) == name]


def is_caught(source: Source, statement: ast.stmt, stack: Iterable[Frame]) -> bool:
    """Whether the function that raises an error, or a caller, handles it. No code can handle an error on the device.

    ``stack`` are the frames that called the function when it broke.
    """
    function = source.function(statement)
    called = calls_of(source, function.name) if function is not None else []
    around = [(source, node) for node in (statement, *called)]
    for frame in stack:
        try:
            other = Source.read(Path(frame.file))
        except (OSError, SyntaxError):
            continue
        around += [(other, node) for node in other.statements(frame.line)]
    return any(_is_handled(owner, node) for owner, node in around)


def _is_handled(source: Source, node: ast.AST) -> bool:
    """Whether the function around a node handles errors of the node."""
    function = source.function(node)
    for around in source.above(node):
        if around is function:
            return False
        if isinstance(around, ast.Try) and around.handlers:
            return True
        if isinstance(around, ast.With):
            calls = [item.context_expr for item in around.items if isinstance(item.context_expr, ast.Call)]
            if any(last_name(call.func) == "suppress" for call in calls):
                return True
    return False


@condition("the branch does nothing but raise, and neither the function nor a caller catches the error")
def raises_uncaught(use: Use) -> bool:
    statement = use.statement
    is_check = isinstance(statement, ast.Assert) or (
        isinstance(statement, ast.If)
        and not statement.orelse
        and len(statement.body) == 1
        and isinstance(statement.body[0], ast.Raise)
    )
    return statement is not None and is_check and not is_caught(use.syntax, statement, use.stack)


@condition("the loop only assigns local names, elementwise, and a largest number of iterations is known")
def repeats_elementwise(use: Use) -> bool:
    statement = use.statement
    around = [statement, *statements_around(use)]
    loop = next((outer for outer in around if isinstance(outer, LOOPS)), None)
    if loop is None or loop.orelse:
        return False
    return all(
        (value := value_of(inner)) is not None and is_elementwise(value)
        for inner in loop.body
        if not (inner is statement and _leaves(inner))
    )


def _leaves(statement: ast.stmt) -> bool:
    """Whether an ``if`` leaves the loop, after elementwise assignments alone."""
    return (
        isinstance(statement, ast.If)
        and not statement.orelse
        and all(
            isinstance(inner, (ast.Break, ast.Continue))
            or ((value := value_of(inner)) is not None and is_elementwise(value))
            for inner in statement.body
        )
    )


@condition("the layer's result is added to its input")
def residual(use: Use) -> bool:
    statement = use.statement
    if not isinstance(statement, ast.If) or statement.orelse or len(statement.body) != 1:
        return False
    match statement.body[0]:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(op=ast.Add(), left=left, right=right)):
            return name in (dotted(left), dotted(right))
        case ast.AugAssign(target=ast.Name(), op=ast.Add()):
            return True
    return False


@with_arguments
def inside(*kinds: str, text: str) -> Condition:
    """A statement of one of these kinds of ``ast`` is around the line, within its function."""
    return Condition(text, lambda use: any(type(outer).__name__ in kinds for outer in statements_around(use)))


@condition("the line is in forward() or backward() of an autograd.Function")
def in_autograd_function(use: Use) -> bool:
    return use.owner is not None and any(name_of(base) == "Function" for base in use.owner.bases)


@condition("the hook only writes, and neither keeps nor changes anything")
def hook_that_writes(use: Use) -> bool:
    hooks = use.calls("register_forward_hook", "register_forward_pre_hook")
    bodies = [argument.body for hook in hooks for argument in hook.args if isinstance(argument, ast.Lambda)]
    return bool(bodies) and all(isinstance(body, ast.Call) and name_of(body.func) in WRITING for body in bodies)


@condition("the block is not in a loop or branch, and its value is not used")
def around_call(use: Use) -> bool:
    statement, function = use.statement, use.function
    if not isinstance(statement, ast.With) or not isinstance(function, ast.FunctionDef):
        return False
    return statement in function.body and not any(isinstance(item.optional_vars, ast.Name) for item in statement.items)


@condition("the block is all that the function does")
def last_statement(use: Use) -> bool:
    return isinstance(use.function, ast.FunctionDef) and use.function.body[-1] is use.statement


@condition("the file takes this lock nowhere else")
def taken_once(use: Use) -> bool:
    if not isinstance(use.statement, ast.With):
        return False
    taken = [dotted(item.context_expr) for item in use.statement.items]
    every = [
        dotted(item.context_expr)
        for node in ast.walk(use.syntax.tree)
        if isinstance(node, ast.With)
        for item in node.items
    ]
    return all(name and every.count(name) == 1 for name in taken)


@with_arguments
def without_calls(*names: str, text: str, part: bool = False) -> Condition:
    """The function calls nothing with these names; with ``part``, nothing whose name contains one of these."""

    def holds(use: Use) -> bool:
        called = {name_of(call.func).lower() for call in use.within if isinstance(call, ast.Call)}
        met = any(name in function for name in names for function in called) if part else bool(called & {*names})
        return use.function is not None and not met

    return Condition(text, holds)


@condition("the function only computes: it reads no value, and writes or keeps nothing")
def traceable_body(use: Use) -> bool:
    """Whether the functions that the line calls are in the file, and none that is kept out has effects or reads."""
    nodes = list(ast.walk(use.statement)) if use.statement is not None else []
    called = {name_of(node.func) for node in nodes if isinstance(node, ast.Call)}
    disabled = [
        node
        for node in ast.walk(use.syntax.tree)
        if isinstance(node, ast.FunctionDef)
        and node.name in called
        and any("disable" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    return bool(disabled) and all(
        changes_nothing(statement) and not isinstance(statement, (ast.Global, ast.With, ast.Try))
        for function in disabled
        for statement in function.body
    )
