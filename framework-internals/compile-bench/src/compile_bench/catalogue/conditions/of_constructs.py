"""Conditions on single constructs, each for one or two entries of the catalogue. Nothing here imports torch."""

from __future__ import annotations

import ast
from collections.abc import Callable

from compile_bench.catalogue.conditions.condition import Condition
from compile_bench.catalogue.conditions.of_branches import value_of
from compile_bench.catalogue.conditions.of_calls import comes_from_outside
from compile_bench.catalogue.conditions.of_places import covers_the_function
from compile_bench.catalogue.purity import is_elementwise
from compile_bench.catalogue.syntax import dotted
from compile_bench.catalogue.use import Use, UsedAs, is_constant, name_of, nodes_of


def statement_is(text: str, *kinds: type[ast.stmt], holds: Callable[[ast.stmt], bool]) -> Condition:
    """The statement is of one of these kinds, and ``holds`` accepts it."""
    return Condition(text, lambda use: isinstance(use.statement, kinds) and holds(use.statement))


def call_is(*names: str, text: str, holds: Callable[[Use, ast.Call], bool]) -> Condition:
    """There are calls with these names, and ``holds`` accepts them."""

    def all_hold(use: Use) -> bool:
        calls = use.calls(*names)
        return bool(calls) and all(holds(use, call) for call in calls)

    return Condition(text, all_hold)


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
    return {"get_rng_state", "set_rng_state"} <= calls or (bool(use.calls("fork_rng")) and covers_the_function(use))


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
        len(case.body) == 1 and (value := value_of(case.body[0])) is not None and is_elementwise(value)
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
    holds=lambda use, call: bool(call.args) and comes_from_outside(use, call.args[0]),
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
            return use.is_parameter(name) or (made is not None and comes_from_outside(use, made))
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


def written_in_place(use: Use, name: str) -> bool:
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
            return not written_in_place(use, name)
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
