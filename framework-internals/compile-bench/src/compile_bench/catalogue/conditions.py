"""When an advice may be followed: conditions on the use of what broke, or of what a guard checked.

A condition holds only where the source shows it. What the source does not show counts as not holding.
Nothing here imports torch.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from compile_bench.catalogue.purity import is_elementwise, is_quiet
from compile_bench.catalogue.syntax import dotted
from compile_bench.catalogue.use import Use, UsedAs, assigned_in, is_constant, name_of, nodes_of, parameters

_WRITING = frozenset(
    [
        "print",
        "pprint",
        "warn",
        "write",
        "flush",
        "debug",
        "info",
        "warning",
        "error",
        "critical",
        "exception",
        "log",
        "append",
        "extend",
        "add",
        "update",
    ]
)
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_READS = frozenset(("item", "tolist", "numpy", "cpu", "data_ptr"))


@dataclass(frozen=True)
class Condition:
    """When an advice may be followed.

    Attributes:
        text: The condition as a clause that follows "where".
        holds: Whether the condition holds for a use.
    """

    text: str
    holds: Callable[[Use], bool]

    def __and__(self, other: Condition) -> Condition:
        return Condition(f"{self.text}, and {other.text}", lambda use: self.holds(use) and other.holds(use))


# -- what becomes of a value -----------------------------------------------------------------------------------------


def only(*kinds: UsedAs, of: tuple[str, ...] = ()) -> Condition:
    """The value is used in no other way.

    Args:
        kinds: The ways.
        of: Names of the calls whose value is meant; by default what broke, or the value that the guard checked.
    """
    text = f"it is used only as {' or '.join(kind.value for kind in kinds)}"

    def holds(use: Use) -> bool:
        calls = use.calls(*of) if of else []
        if of and not calls:
            return False
        used = frozenset[UsedAs]().union(*(use.used_as(call) for call in calls)) if of else use.used_as()
        return bool(used) and used <= {*kinds}

    return Condition(text, holds)


def never(*kinds: UsedAs, of: tuple[str, ...] = ()) -> Condition:
    """The value is used, but in none of these ways; the arguments are those of :func:`only`."""
    others = [kind for kind in UsedAs if kind not in kinds]
    return Condition(f"it is not used as {' or '.join(kind.value for kind in kinds)}", only(*others, of=of).holds)


ARITHMETIC = Condition(
    "the number goes into arithmetic with tensors only: not into text, range(), an index, a condition or a list",
    only(UsedAs.ARITHMETIC).holds,
)
STATE = Condition(
    "the number goes into arithmetic with tensors only: not into text, range(), an index or a condition",
    only(UsedAs.ARITHMETIC, UsedAs.STEP).holds,
)


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and (name_of(node.func) == "item" or dotted(node.func) in ("float", "int"))


def _of_numpy(node: ast.AST) -> bool:
    """Whether what is read comes from NumPy or Python's math, and is no tensor."""
    return any(isinstance(each, ast.Name) and each.id in ("np", "numpy", "math") for each in ast.walk(node))


def _reads(use: Use) -> list[ast.AST]:
    """The calls that read the value of a tensor, the innermost left out where another one is around it."""
    around = [each for each in (use.node, use.statement) if each is not None]
    reads = next((found for each in around if (found := [node for node in nodes_of(each) if _is_read(node)])), [])
    return [node for node in reads if not any(each in reads for each in use.syntax.above(node))]


def read_as(*kinds: UsedAs, text: str) -> Condition:
    """What ``.item()``, ``float()`` or ``int()`` gives is used in these ways only."""

    def holds(use: Use) -> bool:
        reads = _reads(use)
        used = frozenset[UsedAs]().union(*(use.used_as(node) for node in reads))
        return bool(used) and used <= {*kinds} and not any(map(_of_numpy, reads))

    return Condition(text, holds)


# -- calls ------------------------------------------------------------------------------------------------------------


def _unused(use: Use) -> bool:
    statement = use.statement
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    call = statement.value
    return all(map(is_quiet, [*call.args, *(word.value for word in call.keywords)]))


UNUSED = Condition("the statement is this call alone, and its arguments change nothing", _unused)


def independent(*names: str) -> Condition:
    """The calls with these names, or the statement, depend on nothing that the function gets or computes."""

    def holds(use: Use) -> bool:
        nodes: list[ast.AST] = [*use.calls(*names)] if names else [use.node] if use.node is not None else []
        return bool(nodes) and not any(map(use.varies, nodes))

    return Condition("it depends on nothing that the function gets or computes", holds)


INDEPENDENT = independent()
STATEMENT_INDEPENDENT = Condition(
    INDEPENDENT.text,
    lambda use: (
        isinstance(use.statement, (ast.Expr, ast.With, ast.Assign, ast.ClassDef))
        and not any(use.varies(node) for node in _values(use.statement))
    ),
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


ONCE_A_CALL = Condition(
    "it runs once in every call: no loop and no branch is around it",
    lambda use: (
        use.statement is not None and not any(isinstance(each, (*_LOOPS, ast.If, ast.Try)) for each in _around(use))
    ),
)


def _around(use: Use) -> list[ast.AST]:
    """The statements around the line, within its function."""
    found: list[ast.AST] = []
    for each in use.syntax.above(use.statement) if use.statement is not None else ():
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            break
        found.append(each)
    return found


def of_argument(*names: str) -> Condition:
    """What the call is applied to is an argument of the function, or made from one by a method."""

    def holds(use: Use) -> bool:
        calls = use.calls(*names)
        return bool(calls) and all(_comes_from_outside(use, _subject(call)) for call in calls)

    return Condition("it is applied to an argument or an attribute, not to what the function computes", holds)


def _subject(call: ast.Call) -> ast.expr:
    """What a method is called on, or the first argument of a function of a module."""
    first = next(iter(call.args), call.func)
    if not isinstance(call.func, ast.Attribute):
        return first
    inside = call.func.value
    return first if dotted(inside).partition(".")[0] in ("torch", "copy", "np", "nn", "F") else inside


def _comes_from_outside(use: Use, node: ast.expr) -> bool:
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Attribute) or any(use.varies(each) for each in node.args):
                return False
            node = node.func.value
        else:
            node = node.value
    return isinstance(node, ast.Name) and (node.id == "self" or use.is_parameter(node.id) or not use.varies(node))


def has_keyword(call: str, keyword: str, *, given: bool = True) -> Condition:
    """A call has a keyword argument, or lacks it."""

    def holds(use: Use) -> bool:
        calls = use.calls(call)
        return bool(calls) and all((keyword in [each.arg for each in node.keywords]) is given for node in calls)

    return Condition(f"{keyword} is {'given' if given else 'not given'}", holds)


# -- branches ---------------------------------------------------------------------------------------------------------


def _sides(use: Use) -> list[list[ast.stmt]] | None:
    """The statements of both sides of an ``if``; None if there is no ``if``, or an ``elif`` on a side."""
    statement = use.statement
    if not isinstance(statement, ast.If):
        return None
    return [statement.body, statement.orelse]


def _value_of(statement: ast.stmt) -> ast.expr | None:
    """What a statement assigns to one local name, or returns; None if it does anything else."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=value) | ast.Return(value=ast.expr() as value):
            return value
    return None


def _only_values(use: Use, accepts: Callable[[ast.expr], bool]) -> bool:
    sides = _sides(use)
    if sides is None or (sides[1] and isinstance(sides[1][0], ast.If)):
        return False
    values = [_value_of(statement) for side in sides for statement in side]
    if any(value is None for value in values) or not _gives_both(use, sides):
        return False
    return all(value is not None and accepts(value) for value in values)


def _gives_both(use: Use, sides: list[list[ast.stmt]]) -> bool:
    """Whether both sides return, or both only assign names that exist without them."""
    returns = [any(isinstance(each, ast.Return) for each in side) for side in sides]
    if not any(returns):
        targets = set[str]().union(*(assigned_in(each) for side in sides for each in side))
        function, branch = use.function, use.statement
        assert branch is not None
        if all(targets == set().union(*(assigned_in(each) for each in side)) for side in sides):
            return True
        before = {
            node.id
            for node in (ast.walk(function) if function is not None else ())
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
    for each in ast.walk(node):
        match each:
            case ast.Call(func=function):
                name = name_of(function)
                if name in _WRITING | _READS or (name.endswith("_") and not name.endswith("__")):
                    return False
            case ast.NamedExpr() | ast.Await() | ast.Yield() | ast.YieldFrom():
                return False
    return True


ELEMENTWISE_SIDES = Condition(
    "both sides only assign the same local names, or return, and compute elementwise",
    lambda use: _only_values(use, is_elementwise),
)
PURE_SIDES = Condition(
    "both sides only assign the same local names, or return, and change nothing else; they must give tensors of the "
    "same shapes",
    lambda use: _only_values(use, lambda value: changes_nothing(value) and not is_constant(value)),
)
NOT_A_TEST = Condition(
    "the result is part of a tensor, and no `if` or `while` tests it",
    lambda use: isinstance(use.node, ast.expr) and _outermost_use(use) <= {UsedAs.ARITHMETIC},
)


CHAINED = NOT_A_TEST & Condition(
    "one value is compared twice",
    lambda use: (
        use.statement is not None
        and any(isinstance(node, ast.Compare) and len(node.ops) > 1 for node in nodes_of(use.statement))
    ),
)


def _outermost_use(use: Use) -> frozenset[UsedAs]:
    node = use.node
    assert isinstance(node, ast.expr)
    while isinstance(around := use.syntax.parents.get(node), (ast.BoolOp, ast.Compare)):
        node = around
    return use.used_as(node) or frozenset((UsedAs.BRANCH,))


def _number_or_elementwise(use: Use) -> bool:
    chosen = [node for node in nodes_of(use.statement) if isinstance(node, ast.IfExp)] if use.statement else []
    return bool(chosen) and all(
        is_elementwise(node.body) and is_elementwise(node.orelse) and use.used_as(node) <= {UsedAs.ARITHMETIC}
        for node in chosen
    )


CHOICE_OF_NUMBERS = Condition(
    "both values are numbers or elementwise, and the result goes into arithmetic with tensors", _number_or_elementwise
)


def _writes_only(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and (name_of(statement.value.func) in _WRITING - {"append", "extend", "add", "update"})
    )


BODY_WRITES = Condition(
    "the body only prints, warns or logs, and there is no else",
    lambda use: (
        isinstance(use.statement, ast.If) and not use.statement.orelse and all(map(_writes_only, use.statement.body))
    ),
)


def _raises(use: Use) -> bool:
    statement = use.statement
    is_check = isinstance(statement, ast.Assert) or (
        isinstance(statement, ast.If)
        and not statement.orelse
        and len(statement.body) == 1
        and isinstance(statement.body[0], ast.Raise)
    )
    return is_check and not any(isinstance(each, ast.Try) and each.handlers for each in _around(use))


RAISES_UNCAUGHT = Condition("the branch does nothing but raise, and the function does not catch the error", _raises)


def _repeats_elementwise(use: Use) -> bool:
    statement = use.statement
    around = [statement, *_around(use)]
    loop = next((each for each in around if isinstance(each, _LOOPS)), None)
    if loop is None or loop.orelse:
        return False
    return all(
        (value := _value_of(each)) is not None and is_elementwise(value)
        for each in loop.body
        if not (each is statement and _leaves(each))
    )


def _leaves(statement: ast.stmt) -> bool:
    """Whether an ``if`` leaves the loop, after elementwise assignments alone."""
    return (
        isinstance(statement, ast.If)
        and not statement.orelse
        and all(
            isinstance(each, (ast.Break, ast.Continue))
            or ((value := _value_of(each)) is not None and is_elementwise(value))
            for each in statement.body
        )
    )


REPEATS_ELEMENTWISE = Condition(
    "the loop only assigns local names, elementwise, and a largest number of iterations is known", _repeats_elementwise
)


def _residual(use: Use) -> bool:
    statement = use.statement
    if not isinstance(statement, ast.If) or statement.orelse or len(statement.body) != 1:
        return False
    match statement.body[0]:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(op=ast.Add(), left=left, right=right)):
            return name in (dotted(left), dotted(right))
        case ast.AugAssign(target=ast.Name(), op=ast.Add()):
            return True
    return False


RESIDUAL = Condition("the layer's result is added to its input", _residual)


# -- places -----------------------------------------------------------------------------------------------------------


def inside(*kinds: type[ast.AST], text: str) -> Condition:
    """A statement of one of these kinds is around the line, within its function."""
    return Condition(text, lambda use: any(isinstance(each, kinds) for each in _around(use)))


IN_LOOP = inside(*_LOOPS, text="a loop is around the line")
IN_TRY = inside(ast.Try, text="a `try` is around the line")
IN_WITH = inside(ast.With, text="a `with` is around the line")


def _in_autograd_function(use: Use) -> bool:
    return use.owner is not None and any(name_of(base) == "Function" for base in use.owner.bases)


IN_AUTOGRAD_FUNCTION = Condition(
    "the line is in forward() or backward() of an autograd.Function", _in_autograd_function
)


def _prints_in_hook(use: Use) -> bool:
    hooks = use.calls("register_forward_hook", "register_forward_pre_hook")
    bodies = [each.body for hook in hooks for each in hook.args if isinstance(each, ast.Lambda)]
    return bool(bodies) and all(isinstance(body, ast.Call) and name_of(body.func) in _WRITING for body in bodies)


HOOK_THAT_WRITES = Condition("the hook only writes, and neither keeps nor changes anything", _prints_in_hook)


def _covers_the_function(use: Use) -> bool:
    statement, function = use.statement, use.function
    if not isinstance(statement, ast.With) or not isinstance(function, ast.FunctionDef):
        return False
    return statement in function.body and not any(isinstance(item.optional_vars, ast.Name) for item in statement.items)


AROUND_CALL = Condition("the block is not in a loop or branch, and its value is not used", _covers_the_function)
WHOLE_FUNCTION = Condition(
    "the block is all that the function does",
    lambda use: (
        _covers_the_function(use)
        and isinstance(use.function, ast.FunctionDef)
        and use.function.body[-1] is use.statement
    ),
)


def _taken_once(use: Use) -> bool:
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


TAKEN_ONCE = Condition("the file takes this lock nowhere else", _taken_once)


def without_calls(*names: str, text: str, part: bool = False) -> Condition:
    """The function calls nothing with these names.

    Args:
        names: The names.
        text: The condition as a clause.
        part: Whether a name that contains one of these counts, too.
    """

    def holds(use: Use) -> bool:
        nodes = ast.walk(use.function) if use.function is not None else ()
        called = {name_of(each.func).lower() for each in nodes if isinstance(each, ast.Call)}
        met = any(name in each for name in names for each in called) if part else bool(called & {*names})
        return use.function is not None and not met

    return Condition(text, holds)


def _body_is_traceable(use: Use) -> bool:
    """Whether the functions that the line calls are in the file, and none that is kept out has effects or reads."""
    nodes = list(ast.walk(use.statement)) if use.statement is not None else []
    called = {name_of(node.func) for node in nodes if isinstance(node, ast.Call)}
    disabled = [
        each
        for each in ast.walk(use.syntax.tree)
        if isinstance(each, ast.FunctionDef)
        and each.name in called
        and any("disable" in ast.unparse(decorator) for decorator in each.decorator_list)
    ]
    return bool(disabled) and all(
        changes_nothing(statement) and not isinstance(statement, (ast.Global, ast.With, ast.Try))
        for function in disabled
        for statement in function.body
    )


TRACEABLE_BODY = Condition(
    "the function only computes: it reads no value, and writes or keeps nothing", _body_is_traceable
)


# -- single constructs ------------------------------------------------------------------------------------------------


def statement_is(text: str, *kinds: type[ast.stmt], holds: Callable[[ast.stmt], bool]) -> Condition:
    """The statement is of one of these kinds, and ``holds`` accepts it."""
    return Condition(text, lambda use: isinstance(use.statement, kinds) and holds(use.statement))


def call_is(*names: str, text: str, holds: Callable[[Use, ast.Call], bool]) -> Condition:
    """There are calls with these names, and ``holds`` accepts them."""

    def each(use: Use) -> bool:
        calls = use.calls(*names)
        return bool(calls) and all(holds(use, call) for call in calls)

    return Condition(text, each)


def constant_argument(*names: str) -> Condition:
    """The first argument of the calls is a constant."""
    return call_is(
        *names, text="its first argument is a constant", holds=lambda _, call: is_constant(next(iter(call.args), call))
    )


def _reduced_by(use: Use, node: ast.AST, names: frozenset[str]) -> bool:
    """Whether a reduction is made of a node, perhaps of a stack of it."""
    for each in use.syntax.above(node):
        if isinstance(each, ast.Call) and name_of(each.func) in names:
            return True
        if not isinstance(each, (ast.Attribute, ast.Call)) or (
            isinstance(each, ast.Call) and name_of(each.func) not in {"stack", "cat", "float"}
        ):
            return False
    return False


def reduced(*kinds: type[ast.AST], of: tuple[str, ...] = (), by: tuple[str, ...] = ("sum",)) -> Condition:
    """Only a sum, or another of these reductions, is made of the nodes of these kinds, or of these calls."""

    def holds(use: Use) -> bool:
        nodes: list[ast.AST] = [*use.calls(*of)] if of else []
        if kinds and use.statement is not None:
            nodes = [node for node in nodes_of(use.statement) if isinstance(node, kinds)]
            nodes = [node for node in nodes if not _is_parts_of(use, node)]
        return bool(nodes) and all(_reduced_by(use, node, frozenset(by)) for node in nodes)

    return Condition(f"only its {' or '.join(by)} is used", holds)


def _is_parts_of(use: Use, node: ast.AST) -> bool:
    """Whether a subscript is in another one, or of a shape."""
    inner = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    return inner or any(isinstance(each, ast.Subscript) for each in use.syntax.above(node))


NAMED_GLOBAL = call_is(
    "globals",
    text="the name of the global is a constant",
    holds=lambda use, call: isinstance(around := use.syntax.parents[call], ast.Subscript) and is_constant(around.slice),
)
CLASS_OF_ITS_OWN = Condition(
    "the class uses no local name of the function",
    lambda use: isinstance(use.statement, ast.ClassDef) and not any(map(use.varies, use.statement.body)),
)


def _stored_only(use: Use) -> bool:
    match use.statement:
        case ast.Assign(targets=[ast.Subscript(value=container)]) if use.function is not None:
            name = dotted(container)
            mentions = [node for node in ast.walk(use.function) if isinstance(node, ast.expr) and dotted(node) == name]
            return bool(name) and len(mentions) == 1
    return False


STORED_ONLY = Condition("the function only stores into it and does not read it", _stored_only)
COPIES_ARGUMENT = call_is(
    "deepcopy",
    text="an argument of the function is copied",
    holds=lambda use, call: (
        len(call.args) == 1 and isinstance(call.args[0], ast.Name) and use.is_parameter(call.args[0].id)
    ),
)
COPIES_OWN_MODULE = call_is(
    "deepcopy",
    text="an attribute is copied that the function does not change",
    holds=lambda use, call: (
        len(call.args) == 1
        and dotted(call.args[0]).startswith("self.")
        and not any(
            isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            for node in (ast.walk(use.function) if use.function is not None else ())
        )
    ),
)


def _saves_and_restores(use: Use) -> bool:
    calls = (
        {name_of(node.func) for node in ast.walk(use.function) if isinstance(node, ast.Call)} if use.function else set()
    )
    return {"get_rng_state", "set_rng_state"} <= calls or (bool(use.calls("fork_rng")) and _covers_the_function(use))


SAVES_AND_RESTORES = Condition(
    "the function restores the state that it saved, or forks around all it does", _saves_and_restores
)


def _times_decide_nothing(use: Use) -> bool:
    function = use.function
    reads = [each for each in ast.walk(function) if isinstance(each, ast.Call) and _is_clock(each)] if function else []
    return bool(reads) and not any(UsedAs.BRANCH in use.used_as(each) or _in_comparison(use, each) for each in reads)


def _is_clock(call: ast.Call) -> bool:
    name = name_of(call.func).removesuffix("_ns")
    return name in ("perf_counter", "monotonic", "process_time", "thread_time") or dotted(call.func) in (
        "time.time",
        "time",
    )


def _in_comparison(use: Use, node: ast.AST) -> bool:
    return any(isinstance(each, ast.Compare) for each in use.syntax.above(node))


TIMES_DECIDE_NOTHING = Condition("no time is compared with anything, such as a deadline", _times_decide_nothing)
COUNTS_ON_FUNCTION = statement_is(
    "a constant is added to it",
    ast.AugAssign,
    holds=lambda statement: (
        isinstance(statement, ast.AugAssign)
        and isinstance(statement.op, (ast.Add, ast.Sub))
        and is_constant(statement.value)
    ),
)
PLAIN_OPERANDS = Condition(
    "every operand is a tensor: none is a flag or a test for None",
    lambda use: (
        not any(
            _is_flag(operand)
            for node in (nodes_of(use.statement) if use.statement is not None else ())
            if isinstance(node, ast.BoolOp)
            for operand in node.values
        )
    ),
)


def _is_flag(operand: ast.expr) -> bool:
    match operand:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return _is_flag(inner)
        case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
            return True
    return isinstance(operand, (ast.Name, ast.Attribute, ast.Constant))


def _shown_text(use: Use) -> bool:
    texts = [node for node in nodes_of(use.statement) if isinstance(node, ast.JoinedStr)] if use.statement else []
    made: list[ast.AST] = [*texts, *use.calls("format", "str", "repr")]
    return bool(made) and all(
        use.used_as(node) <= {UsedAs.RETURNED, UsedAs.UNUSED, UsedAs.TEXT, UsedAs.LENGTH} for node in made
    )


TEXT_IS_SHOWN = Condition("the text is returned or written, and is no key and no condition", _shown_text)


def _entries(use: Use, name: str) -> ast.expr | None:
    """What a name is bound to in the function, or else in the file, if it is bound once."""
    for scope in (use.function, use.syntax.tree):
        assignments = [node for node in ast.walk(scope) if isinstance(node, ast.Assign)] if scope is not None else []
        bound = [each.value for each in assignments if name in map(dotted, each.targets)]
        if bound:
            return bound[0] if len(bound) == 1 else None
    return None


def _indexed(use: Use) -> list[ast.Subscript]:
    node = use.statement
    nodes = nodes_of(node) if node is not None else ()
    return [each for each in nodes if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Load)]


def _dict_of_numbers(use: Use) -> bool:
    tables = [_entries(use, dotted(each.value)) for each in _indexed(use)]
    return bool(tables) and all(
        isinstance(table, ast.Dict)
        and all(isinstance(key, ast.Constant) and isinstance(key.value, int) for key in table.keys)
        and all(isinstance(value, ast.Constant) and isinstance(value.value, (int, float)) for value in table.values)
        for table in tables
    )


DICT_OF_NUMBERS = Condition("the dict has the keys 0, 1, … and numbers as values", _dict_of_numbers)


def _counts_entries(use: Use) -> bool:
    match use.statement:
        case ast.AugAssign(target=ast.Subscript(), op=ast.Add(), value=value):
            return is_constant(value)
        case ast.Assign(targets=[ast.Subscript()], value=ast.BinOp(op=ast.Add(), right=value)):
            return is_constant(value)
    return False


COUNTS_ENTRIES = Condition("the statement adds a constant to an entry", _counts_entries)


def _list_of_tensors(use: Use) -> bool:
    indexed = [each for each in _indexed(use) if not isinstance(each.slice, (ast.Slice, ast.Tuple, ast.Constant))]
    lists = [_entries(use, dotted(each.value)) if dotted(each.value) else each.value for each in indexed]
    return bool(lists) and all(isinstance(each, (ast.List, ast.ListComp)) for each in lists)


LIST_OF_TENSORS = Condition(
    "a list of tensors that the file writes out is read, and they have one shape", _list_of_tensors
)


def _cases_are_values(use: Use) -> bool:
    statement = use.statement
    return isinstance(statement, ast.Match) and all(
        len(case.body) == 1 and (value := _value_of(case.body[0])) is not None and is_elementwise(value)
        for case in statement.cases
    )


CASES_ARE_VALUES = Condition("every case only assigns or returns, elementwise", _cases_are_values)
PASSED_COUNT = call_is(
    "range",
    text="the count is an argument as the caller passed it",
    holds=lambda use, call: all(
        is_constant(each) or (isinstance(each, ast.Name) and use.is_parameter(each.id)) for each in call.args
    ),
)
PASSED_K = call_is(
    "topk",
    text="k is an argument as the caller passed it",
    holds=lambda use, call: bool(call.args) and _comes_from_outside(use, call.args[0]),
)
PICKED_FROM_LIST = call_is(
    "sorted",
    "min",
    "max",
    text="one of a list of tensors is picked",
    holds=lambda use, call: (
        isinstance(next(iter(call.args), None), (ast.List, ast.Tuple, ast.Name))
        and (name_of(call.func) != "sorted" or isinstance(use.syntax.parents[call], ast.Subscript))
    ),
)
ALL_ITEMS = call_is(
    "tensor",
    text="every element is .item() of a tensor",
    holds=lambda _, call: (
        isinstance(listed := next(iter(call.args), None), ast.List)
        and all(isinstance(each, ast.Call) and name_of(each.func) == "item" for each in listed.elts)
    ),
)
GRAD_OF_LOCAL = call_is(
    "grad",
    text="the gradient is for one tensor, which is a local name, and no graph of it is asked for",
    holds=lambda _, call: len(call.args) == 2 and isinstance(call.args[1], ast.Name) and not call.keywords,
)


def _set_on_argument(use: Use) -> bool:
    match use.statement:
        case ast.Assign(targets=[ast.Attribute(attr="requires_grad", value=ast.Name(id=name))]):
            made = _entries(use, name)
            return use.is_parameter(name) or (made is not None and _comes_from_outside(use, made))
    return False


SET_ON_ARGUMENT = Condition("the tensor is an argument, or a copy of one", _set_on_argument)
DATA_ELEMENTWISE = statement_is(
    "the new values are computed elementwise, so that shape and dtype stay",
    ast.Assign,
    holds=lambda statement: isinstance(statement, ast.Assign) and is_elementwise(statement.value),
)
OWN_TENSOR = call_is(
    "resize_",
    text="the tensor is the function's own: no argument and no attribute",
    holds=lambda use, call: (
        isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and use.varies(call.func.value)
        and not use.is_parameter(call.func.value.id)
    ),
)
SIZE_IN_BYTES = call_is(
    "untyped_storage",
    "storage",
    text="its size in bytes is asked for",
    holds=lambda use, call: isinstance(around := use.syntax.parents[call], ast.Attribute) and around.attr == "nbytes",
)
SAME_MEMORY = Condition(
    "two addresses are compared",
    lambda use: any(
        isinstance(node, ast.Compare)
        and all(
            isinstance(each, ast.Call) and name_of(each.func) == "data_ptr" for each in (node.left, *node.comparators)
        )
        for node in (nodes_of(use.statement) if use.statement is not None else ())
    ),
)


def _written_in_place(use: Use, name: str) -> bool:
    """Whether the function writes into the tensor that has a name."""
    for node in ast.walk(use.function) if use.function is not None else ():
        match node:
            case ast.Call(func=ast.Attribute(attr=method, value=tensor)) if method.endswith("_"):
                if dotted(tensor) == name:
                    return True
            case ast.Subscript(ctx=ast.Store(), value=tensor) if dotted(tensor) == name:
                return True
            case ast.AugAssign(target=target) if dotted(target) == name:
                return True
    return False


def _copy_is_read(use: Use) -> bool:
    match use.statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return not _written_in_place(use, name)
    return isinstance(use.statement, ast.Return)


COPY_IS_READ = Condition("nothing is written into the copy", _copy_is_read)


def _plain_subclass(use: Use) -> bool:
    names = {dotted(each) for call in use.calls("as_subclass") for each in call.args}
    classes = [node for node in ast.walk(use.syntax.tree) if isinstance(node, ast.ClassDef) and node.name in names]
    return bool(classes) and not any("__torch_" in ast.unparse(each) for each in classes)


PLAIN_SUBCLASS = Condition("its class is in this file and changes no operation", _plain_subclass)
NO_CLASSES_GIVEN = call_is(
    "one_hot",
    text="the number of classes is not given",
    holds=lambda _, call: len(call.args) == 1 and not call.keywords,
)


# -- slices at values -------------------------------------------------------------------------------------------------


def _slices(use: Use, context: type[ast.expr_context]) -> list[ast.Slice]:
    """The slices with a bound that is not constant, in subscripts that are read, or written."""
    nodes = nodes_of(use.statement) if use.statement is not None else ()
    inside = [each for each in nodes if isinstance(each, ast.Subscript) and isinstance(each.ctx, context)]
    slices = [node for each in inside for node in ast.walk(each.slice) if isinstance(node, ast.Slice)]
    return [each for each in slices if not all(part is None or is_constant(part) for part in (each.lower, each.upper))]


def _known_length(part: ast.Slice) -> bool:
    """Whether a slice is written ``start : start + length``."""
    match part:
        case ast.Slice(lower=ast.expr() as lower, upper=ast.BinOp(op=ast.Add(), left=left, right=length), step=None):
            return ast.unparse(lower) == ast.unparse(left) and not any(map(_is_read, ast.walk(length)))
    return False


MASKABLE_SLICE = Condition(
    "the slice begins at 0, ends at a value, and only its sum is used",
    lambda use: (
        bool(slices := _slices(use, ast.Load))
        and all(
            each.lower is None and each.upper is not None and any(map(_is_read, ast.walk(each.upper)))
            for each in slices
        )
        and reduced(ast.Subscript).holds(use)
    ),
)
WRITTEN_SLICE = Condition(
    "the slice is assigned to, begins at a value, and has a length that is no value: start : start + length",
    lambda use: (
        isinstance(use.statement, ast.Assign)
        and bool(slices := _slices(use, ast.Store))
        and all(map(_known_length, slices))
    ),
)
READ_SLICE = Condition(
    "the slice is read, begins at a value, and has a length that is no value: start : start + length",
    lambda use: bool(slices := _slices(use, ast.Load)) and all(map(_known_length, slices)) and not _reads(use),
)


# -- guards -----------------------------------------------------------------------------------------------------------


def _is_argument(use: Use) -> bool:
    name = use.value.partition(".")[0].partition("[")[0]
    return use.function is not None and bool(name) and name in parameters(use.function) - {"self"}


IS_ARGUMENT = Condition("it is an argument of the function", _is_argument)
NOT_WRITTEN = Condition("the function does not write into it", lambda use: not _written_in_place(use, use.value))
FLOATING = Condition(
    "both dtypes are floating-point",
    lambda use: all(
        name in ("Float", "Double", "Half", "BFloat16")
        for name in use.guard.rpartition(". ")[2].replace(",", "").split()[1::2]
    ),
)


def _size_decides(use: Use) -> bool:
    """Whether a size of the guarded tensor is a count or a condition in the function."""
    for load in use.loads:
        above = list(use.syntax.above(load))
        measured = any(
            (isinstance(each, ast.Attribute) and each.attr in ("shape", "size"))
            or (isinstance(each, ast.Call) and name_of(each.func) == "len")
            for each in above[:1]
        )
        for around in above if measured else ():
            if isinstance(around, (ast.If, ast.While, ast.Assert, ast.IfExp)) or (
                isinstance(around, ast.Call) and name_of(around.func) in ("range", "int")
            ):
                return True
            if isinstance(around, ast.stmt):
                break
    return False


FREE_SIZE = Condition(
    "it is an argument of the function, and no branch and no range() there depends on its size",
    lambda use: _is_argument(use) and not use.static_shapes and not _size_decides(use),
)
STATIC_SHAPES = Condition(
    "the model is compiled with dynamic=False", lambda use: use.static_shapes and _is_argument(use)
)
ONE_OR_NONE = Condition(
    "one of the two sizes is 0 or 1",
    lambda use: "<=" in use.guard or any(size in ("0", "1") for size in _sizes(use.guard)),
)


def _sizes(guard: str) -> list[str]:
    return [part.rpartition(" ")[2] for part in guard.rpartition(". ")[2].split(", ")]


REMAINDER_TESTED = Condition(
    "the code tests the remainder of a size, and raises nothing there",
    lambda use: (
        ("%" in use.guard or "Mod(" in use.guard)
        and not (isinstance(use.statement, ast.If) and any(isinstance(each, ast.Raise) for each in use.statement.body))
    ),
)
SAME_RANK_CODE = Condition(
    "it is an argument of the function, which does not ask for its number of dimensions",
    lambda use: (
        _is_argument(use)
        and not any(
            isinstance(around := use.syntax.parents[load], ast.Attribute) and around.attr in ("dim", "ndim")
            for load in use.loads
        )
    ),
)
AUTOGRAD_KEYS = Condition(
    "only the keys of autograd differ: the device is the same",
    lambda use: len({each.split("(")[-1].split(",")[0] for each in use.guard.split("DispatchKeySet")[1:]}) == 1,
)


def _joined_by(*names: str) -> Callable[[Use], bool]:
    """Whether every read of the guarded value is an argument of one of these functions."""

    def holds(use: Use) -> bool:
        calls = [
            next((each for each in use.syntax.above(load) if isinstance(each, ast.Call)), None) for load in use.loads
        ]
        return bool(calls) and all(call is not None and name_of(call.func) in names for call in calls)

    return holds


JOINED = Condition(
    "the function reads it only to put it behind another tensor", _joined_by("cat", "concat", "hstack", "vstack")
)
STACKED = Condition(
    "it is an argument that is only stacked or summed",
    lambda use: _is_argument(use) and _joined_by("stack", "cat", "sum")(use),
)
APPENDED_ONLY = Condition(
    "the model only appends to it",
    lambda use: (
        bool(use.loads)
        and all(
            isinstance(around := use.syntax.parents[load], ast.Attribute) and around.attr in _WRITING
            for load in use.loads
        )
    ),
)
CALLED_ARGUMENT = Condition(
    "it is an argument of the function, which only calls it",
    lambda use: _is_argument(use) and only(UsedAs.CALLED).holds(use),
)
NEUTRAL_POSSIBLE = Condition(
    "it is an argument that is tested for None, and otherwise goes into arithmetic",
    lambda use: _is_argument(use) and only(UsedAs.NONE_TEST, UsedAs.ARITHMETIC).holds(use),
)


def _set_once(use: Use) -> bool:
    values = [each.value for each in use.assignments if isinstance(each, (ast.Assign, ast.AnnAssign))]
    return bool(values) and all(value is not None and not use.varies(value) for value in values)


SET_ONCE = Condition("the class sets it to a value that does not depend on what is passed in", _set_once)
SELECTS = Condition("it only selects branches", only(UsedAs.BRANCH).holds)
ACROSS_BREAK = Condition("the lines before the break computed the value", lambda use: use.guard.startswith("___stack"))


def _counted(use: Use) -> bool:
    return any(
        isinstance(each, ast.AugAssign) and isinstance(each.op, (ast.Add, ast.Sub)) and is_constant(each.value)
        for each in use.assignments
    )


COUNTED = Condition(
    f"the class adds a constant to it, and {STATE.text}", lambda use: _counted(use) and STATE.holds(use)
)


# -- silent eager -----------------------------------------------------------------------------------------------------

HAS_BRANCH = Condition(
    "the function has a branch, on one side of which it computes with tensors",
    lambda use: (
        use.function is not None and any(isinstance(node, (ast.If, ast.IfExp)) for node in ast.walk(use.function))
    ),
)


def _is_apart_from_forward(use: Use) -> bool:
    methods = {each.name: each for each in use.owner.body if isinstance(each, ast.FunctionDef)} if use.owner else {}
    forward, function = methods.get("forward"), use.function
    if forward is None or not isinstance(function, ast.FunctionDef) or function.name == "forward":
        return False
    calls = (node for node in ast.walk(forward) if isinstance(node, ast.Call))
    return f"self.{function.name}" not in (dotted(call.func) for call in calls)


APART_FROM_FORWARD = Condition("its class has a forward(), which does not call it", _is_apart_from_forward)
