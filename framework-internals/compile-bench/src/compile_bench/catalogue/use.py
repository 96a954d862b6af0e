"""How a program uses a value: as a number in arithmetic, as text, as a count, in a branch. Nothing here imports torch.

A change is safe or not by what becomes of the value, so advice depends on its use and not on the text of the line or
on the form of the guard. Values are followed through local names, within one function; attributes of ``self`` within
their class.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from compile_bench.capture.frames import Frame
from compile_bench.capture.trace import named
from compile_bench.catalogue.source import FUNCTIONS, Source, dotted, last_name


class UsedAs(Enum):
    """What becomes of a value."""

    ARITHMETIC = "arithmetic with a tensor"
    TEXT = "text"
    COUNT = "a number of iterations"
    SIZE = "a size of a tensor"
    INDEX = "an index"
    SLICE = "a bound of a slice"
    BRANCH = "a condition"
    NONE_TEST = "a comparison with None"
    ITERATED = "what a loop goes over"
    REDUCED = "a sum, a mean or another reduction"
    LENGTH = "its length"
    CALLED = "a function that is called"
    ARGUMENT = "an argument of another function"
    KEPT = "a value that is stored beyond the call"
    RETURNED = "a result"
    STEP = "its own next value"
    UNUSED = "nothing"


# Functions and methods that make text of their arguments.
WRITING = frozenset(("str", "repr", "format", "print", "debug", "info", "warning", "warn", "error", "critical", "log"))
_NUMBERS = frozenset(("int", "float", "bool", "round", "abs", "pow"))
# Methods that keep their argument beyond the call.
KEEPING = frozenset(("append", "appendleft", "extend", "insert", "put", "setdefault", "update"))
_TENSOR_FUNCTIONS = frozenset(("where", "maximum", "minimum", "lerp", "pow", "tensor", "as_tensor", "scalar_tensor"))
_LENGTHS = frozenset(("size", "numel", "nelement", "dim"))
# What no longer matters once the value is part of a tensor.
_OF_TENSORS = frozenset((UsedAs.RETURNED, UsedAs.KEPT, UsedAs.ARGUMENT, UsedAs.REDUCED, UsedAs.LENGTH, UsedAs.ITERATED))
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

# How a guard names its value.
# How Dynamo writes an attribute that a class with its own __getattribute__ has; the code says value.name.
_LOOKED_UP = re.compile(r"object\.__getattribute__\((.+?), '(\w+)'\)")
_GUARDED = tuple(
    re.compile(pattern)
    for pattern in (
        r"tensor '(.+?)' ",
        r"expected type of '(.+?)' to be",
        r'Duplicate tensors found: \["(.+?)"',
        r"(?:not )?hasattr\((.+), '?(\w+)'?\)",
        r"(?:not )?___\w*contains\(.+, (.+)\)",
        r"___\w+_iterator_len\((.+?)\)",
        r"___check_(?:obj|type)_id\((.+?)(?:\.__code__|\.__func__)?, ",
        r".*dict\.keys\((.+?)\)",
        r"len\((.+?)\) ",
        r"\(?(.+?)\.(?:size|stride)\(\)\[",
        r"\d+ <=? (.+?)\.size\(\)",
        r"(.+?) (?:==|!=|is not|is|<=?|>=?) ",
        r"not (\S+)$",
    )
)


@dataclass(frozen=True)
class Use:
    """A line that breaks, or a value that a guard checked, and the code around it."""

    syntax: Source  # the file
    line: int  # the line, counted from 1
    # Begin and end of the part that broke, in the line without its indentation; None for all of it.
    columns: tuple[int, int] | None = None
    value: str = ""  # the value that a guard checked, as the code names it, such as self.calls; empty for a break
    guard: str = ""  # the guard; empty for a break
    static_shapes: bool = False  # whether the model is compiled with dynamic=False
    stack: tuple[Frame, ...] = ()  # the frames that called the function

    @classmethod
    def of_guard(cls, syntax: Source, line: int, guard: str, *, static_shapes: bool = False) -> Use:
        """The use of the value that a guard checked."""
        return cls(syntax, line, value=guarded_value(guard), guard=guard, static_shapes=static_shapes)

    @cached_property
    def statement(self) -> ast.stmt | None:
        """The statement that the line is in."""
        return self.syntax.statement(self.line)

    @cached_property
    def function(self) -> Function | None:
        """The function around the line: the innermost that takes the guarded value, or else the innermost."""
        around = [
            node
            for node in ast.walk(self.syntax.tree)
            if isinstance(node, _FUNCTIONS) and first_line(node) <= self.line <= (node.end_lineno or 0)
        ]
        name = re.split(r"[.\[]", self.value)[0]
        taking = [node for node in around if name in parameters(node)] if "self." not in self.value else []
        plain = [node for node in around if not isinstance(node, ast.Lambda)]
        return next(reversed(taking or plain or around), None)

    @property
    def nodes(self) -> Iterable[ast.AST]:
        """The nodes of the statement; the blocks of a compound one are left out."""
        return () if self.statement is None else nodes_of(self.statement)

    @property
    def within(self) -> Iterable[ast.AST]:
        """All nodes of the function."""
        return () if self.function is None else ast.walk(self.function)

    @cached_property
    def owner(self) -> ast.ClassDef | None:
        """The class around the line."""
        if self.statement is None:
            return None
        around = (self.statement, *self.syntax.above(self.statement))
        return next((node for node in around if isinstance(node, ast.ClassDef)), None)

    @property
    def in_module(self) -> bool:
        """Whether the class is an ``nn.Module``: by its bases, or by ``forward`` where a base is not in the file."""
        classes = {node.name: node for node in ast.walk(self.syntax.tree) if isinstance(node, ast.ClassDef)}
        pending, seen = [self.owner], set[str]()
        while pending:
            owner = pending.pop()
            if owner is None or owner.name in seen:
                continue
            seen.add(owner.name)
            bases = [last_name(base) for base in owner.bases]
            methods = {member.name for member in owner.body if isinstance(member, ast.FunctionDef)}
            unknown = [name for name in bases if name not in classes]
            if "Module" in bases or (unknown and "forward" in methods):
                return True
            pending += [classes[name] for name in bases if name in classes]
        return False

    @cached_property
    def node(self) -> ast.AST | None:
        """The expression that broke; the statement if PyTorch marks no part of it."""
        statement = self.statement
        if statement is None or self.columns is None:
            return statement
        inner = [node for node in nodes_of(statement) if isinstance(node, ast.expr) and node.lineno == self.line]
        indent = self._indent(statement)
        begin, end = (indent + column for column in self.columns)
        within = [node for node in inner if begin <= node.col_offset and (node.end_col_offset or 0) <= end]
        # The part that PyTorch marks may end behind the expression; what is largest within it broke.
        return max(within, key=lambda node: (node.end_col_offset or 0) - node.col_offset, default=statement)

    def _indent(self, statement: ast.stmt) -> int:
        if statement.lineno == self.line:
            return statement.col_offset
        inside = (node for node in ast.walk(statement) if isinstance(node, (ast.expr, ast.stmt)))
        return min((node.col_offset for node in inside if node.lineno == self.line), default=0)

    def calls(self, *names: str) -> list[ast.Call]:
        """The calls of functions or methods with these names in the part that broke, or else in the statement."""
        for around in (self.node, self.statement):
            nodes = () if around is None else nodes_of(around)
            calls = [node for node in nodes if isinstance(node, ast.Call) and name_of(node.func) in names]
            if calls:
                return calls
        return []

    def used_as(self, node: ast.AST | None = None) -> frozenset[UsedAs]:
        """What becomes of an expression, of the guarded value, or else of what broke; empty if that is not known."""
        follow = _Following(self.syntax, self.value)
        if node is not None:
            return frozenset(follow.climb(node))
        if self.value:
            return frozenset(used for load in self.loads for used in follow.climb(load)) | self._steps()
        if isinstance(self.node, ast.expr):
            return frozenset(follow.climb(self.node))
        return frozenset()

    @cached_property
    def loads(self) -> list[ast.expr]:
        """Where the guarded value is read."""
        return [node for node in self.mentions if isinstance(node.ctx, ast.Load)]

    @cached_property
    def mentions(self) -> list[ast.Name | ast.Attribute]:
        """Where the guarded value is read or written."""
        if self.value.startswith("self."):
            scope: ast.AST | None = self.owner or self.function
        elif self.guard.startswith("G["):
            scope = self.syntax.tree
        else:
            scope = self.function
        if scope is None or not self.value:
            return []
        named_so = (self.value, _own_name(self.value))
        nodes = (node for node in ast.walk(scope) if isinstance(node, (ast.Name, ast.Attribute)))
        return [node for node in nodes if dotted(node) in named_so]

    @property
    def own_value(self) -> str:
        """The guarded value as its class names it: ``self.calls`` where the guard says ``self.block.calls``."""
        mentioned = {dotted(node) for node in self.mentions}
        return self.value if not mentioned or self.value in mentioned else _own_name(self.value)

    @property
    def code(self) -> str:
        """The statements that read or write the guarded value, as text."""
        statements = (
            next(outer for outer in self.syntax.above(node) if isinstance(outer, ast.stmt)) for node in self.mentions
        )
        return "\n".join(dict.fromkeys(ast.unparse(statement) for statement in statements))

    @property
    def assignments(self) -> list[ast.stmt]:
        """The statements that give the guarded value another value, those of ``__init__`` left out."""
        written = (node for node in self.mentions if isinstance(node.ctx, ast.Store))
        parents = (next(outer for outer in self.syntax.above(node) if isinstance(outer, ast.stmt)) for node in written)
        around = ((statement, self.syntax.function(statement)) for statement in parents)
        return [statement for statement, function in around if function is None or function.name != "__init__"]

    def _steps(self) -> frozenset[UsedAs]:
        stepped = any(isinstance(assignment, ast.AugAssign) for assignment in self.assignments)
        return frozenset((UsedAs.STEP,)) if stepped else frozenset()

    def is_parameter(self, name: str) -> bool:
        """Whether a name is an argument of the function, as the caller passed it."""
        function = self.function
        return function is not None and name in parameters(function) - {"self"} and name not in assigned_in(function)

    def varies(self, node: ast.AST) -> bool:
        """Whether an expression depends on an argument or a local name of the function."""
        function = self.function
        if function is None:
            return False
        inside = {name for part in ast.walk(node) if isinstance(part, _FUNCTIONS) for name in parameters(part)}
        local = (parameters(function) - {"self"} | assigned_in(function)) - inside
        names = (part for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load))
        return any(name.id in local - assigned_in(node) for name in names)


class _Following:
    """Follows values to where they are used.

    The next value of ``own``, as the code names it, may depend on it.
    """

    def __init__(self, syntax: Source, own: str) -> None:
        self._syntax = syntax
        self._own = own
        self._followed: set[tuple[str, ast.AST, bool]] = set()

    def climb(self, node: ast.AST, in_tensor: bool = False) -> Iterator[UsedAs]:
        """What becomes of a node; ``in_tensor`` if it is part of a tensor by now."""
        parent = self._syntax.parents.get(node)
        for used in self._of(parent, node, in_tensor):
            yield UsedAs.ARITHMETIC if in_tensor and used in _OF_TENSORS else used

    def _of(self, parent: ast.AST | None, node: ast.AST, in_tensor: bool) -> Iterable[UsedAs]:
        match parent:
            case ast.BinOp(op=ast.Mod(), left=ast.Constant(value=str())) | ast.FormattedValue():
                return (UsedAs.TEXT,)
            case ast.BinOp(left=left, right=right):
                return self.climb(parent, in_tensor or not is_constant(right if node is left else left))
            case ast.UnaryOp(op=ast.Not()) | ast.BoolOp() | ast.Assert():
                return (UsedAs.BRANCH,)
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                return (UsedAs.NONE_TEST,)
            case ast.Compare(ops=[ast.In() | ast.NotIn()]):
                return (UsedAs.BRANCH,)
            case ast.Compare(left=left, comparators=others):
                rest = [side for side in (left, *others) if side is not node]
                return self.climb(parent, in_tensor or not all(map(is_constant, rest)))
            case ast.IfExp(test=test) if node is test:
                return (UsedAs.BRANCH,)
            case ast.IfExp() | ast.UnaryOp() | ast.Starred() | ast.NamedExpr():
                return self.climb(parent, in_tensor)
            case ast.keyword(arg=name):
                call = self._syntax.parents[parent]
                return (UsedAs.SIZE,) if name in ("size", "minlength") else self._argument(call, in_tensor)
            case ast.Call(func=function):
                return (UsedAs.CALLED,) if node is function else self._argument(parent, in_tensor)
            case ast.Attribute():
                return self._attribute(parent, in_tensor)
            case ast.Subscript(value=value):
                return self.climb(parent, in_tensor) if node is value else (UsedAs.INDEX,)
            case ast.Slice():
                return (UsedAs.SLICE,)
            case ast.Tuple() | ast.List() | ast.Set() | ast.Dict():
                return self._display(parent)
            case ast.comprehension(iter=iterated):
                return (UsedAs.ITERATED,) if node is iterated else (UsedAs.BRANCH,)
            case ast.arguments():
                return self._default(parent, node)
            case _:
                return self._statement(parent, node, in_tensor)

    def _statement(self, parent: ast.AST | None, node: ast.AST, in_tensor: bool) -> Iterable[UsedAs]:
        match parent:
            case ast.If() | ast.While() | ast.Match():
                return (UsedAs.BRANCH,)
            case ast.For():
                return (UsedAs.ITERATED,)
            case ast.Return() | ast.Lambda() | ast.Yield():
                return (UsedAs.RETURNED,)
            case ast.Expr():
                return (UsedAs.UNUSED,)
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
                return self._target(target, in_tensor)
            case ast.AugAssign(target=target):
                return self._target(target, True)
            case _:
                return (UsedAs.KEPT,)

    def _target(self, target: ast.expr, in_tensor: bool) -> Iterable[UsedAs]:
        if self._own and dotted(target) == self._own:
            return (UsedAs.STEP,)
        function = self._syntax.function(target)
        if isinstance(target, ast.Name) and function is not None:
            return self._name(target.id, function, in_tensor)
        return (UsedAs.KEPT,)

    def _name(self, name: str, function: ast.AST, in_tensor: bool) -> Iterable[UsedAs]:
        key = (name, function, in_tensor)
        if key in self._followed:
            return ()
        self._followed.add(key)
        loads = (node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name)
        uses = [used for load in loads if isinstance(load.ctx, ast.Load) for used in self.climb(load, in_tensor)]
        return uses or (UsedAs.UNUSED,)

    def _default(self, parent: ast.arguments, node: ast.AST) -> Iterable[UsedAs]:
        """What becomes of a parameter with this default value."""
        positional = [*parent.posonlyargs, *parent.args]
        with_default = positional[len(positional) - len(parent.defaults) :]
        pairs = [
            *zip(with_default, parent.defaults, strict=True),
            *zip(parent.kwonlyargs, parent.kw_defaults, strict=True),
        ]
        name = next((argument.arg for argument, default in pairs if default is node), "")
        return self._name(name, self._syntax.parents[parent], False)

    def _display(self, parent: ast.expr) -> Iterable[UsedAs]:
        around = self._syntax.parents.get(parent)
        if isinstance(around, ast.Subscript):
            return self.climb(parent)
        return (UsedAs.RETURNED,) if isinstance(around, ast.Return) else (UsedAs.KEPT,)

    def _argument(self, call: ast.AST, in_tensor: bool) -> Iterable[UsedAs]:
        assert isinstance(call, ast.Call)
        name, method = name_of(call.func), isinstance(call.func, ast.Attribute)
        if name in ("range", "islice"):
            return (UsedAs.COUNT,)
        if name == "len":
            return (UsedAs.LENGTH,)
        if name in WRITING:
            return (UsedAs.TEXT,)
        if name in _NUMBERS and not method:
            return self.climb(call, in_tensor)
        if name in FUNCTIONS["reductions"] and (not method or last_owner(call.func) == "torch"):
            return (UsedAs.REDUCED,)
        if name in FUNCTIONS["sizes"]:
            return (UsedAs.SIZE,)
        if name in KEEPING:
            return (UsedAs.KEPT,)
        if method and (name in _TENSOR_FUNCTIONS or name in FUNCTIONS["elementwise"]):
            return self.climb(call, True)
        return (UsedAs.ARGUMENT,)

    def _attribute(self, parent: ast.Attribute, in_tensor: bool) -> Iterable[UsedAs]:
        if parent.attr in ("shape", "ndim"):
            return (UsedAs.LENGTH,)
        call = self._syntax.parents.get(parent)
        if not isinstance(call, ast.Call) or call.func is not parent:
            return self.climb(parent, in_tensor)
        if parent.attr in FUNCTIONS["reductions"]:
            return (UsedAs.REDUCED,)
        if parent.attr in _LENGTHS:
            return (UsedAs.LENGTH,)
        if parent.attr in FUNCTIONS["same_values"] or parent.attr in FUNCTIONS["elementwise"]:
            return self.climb(call, in_tensor)
        return (UsedAs.ARGUMENT,)


def _own_name(value: str) -> str:
    return f"self.{value.rpartition('.')[2]}" if value.startswith("self.") else value


def guarded_value(guard: str) -> str:
    """The value that a guard is about, as the code names it; empty if the guard's form is unknown."""
    guard = _LOOKED_UP.sub(r"\1.\2", guard)
    for pattern in _GUARDED:
        if match := pattern.match(guard):
            return ".".join(named(group) for group in match.groups())
    return ""


def parameters(function: Function) -> set[str]:
    """The names of a function's parameters."""
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def assigned_in(scope: ast.AST) -> set[str]:
    """The names that are assigned in a function or statement."""
    return {node.id for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def is_constant(node: ast.AST) -> bool:
    """Whether an expression has neither names nor calls."""
    return not any(isinstance(part, (ast.Name, ast.Call)) for part in ast.walk(node))


def name_of(node: ast.expr) -> str:
    """``c`` for ``a.b.c`` and ``f(x).c``; empty for anything but names and attributes."""
    return node.attr if isinstance(node, ast.Attribute) else last_name(node)


def last_owner(node: ast.expr) -> str:
    """``b`` for ``a.b.c``; empty for anything else."""
    return dotted(node).rpartition(".")[0].rpartition(".")[2]


def nodes_of(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all inside it; the blocks of a compound statement are left out."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from nodes_of(child)


def first_line(function: Function) -> int:
    """The first line of a function, its decorators included."""
    decorators = [] if isinstance(function, ast.Lambda) else [decorator.lineno for decorator in function.decorator_list]
    return min([function.lineno, *decorators])
