"""A Python file with its syntax tree, edits by byte position, and unified diffs; what its expressions do.

An edit changes nothing around it. Nothing here imports torch.
"""

from __future__ import annotations

import ast
import difflib
import io
import re
import struct
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

_TABLE = Path(__file__).parent / "conditions" / "functions.toml"

# Names of functions and methods by what they do.
FUNCTIONS: dict[str, frozenset[str]] = {
    kind: frozenset(names) for kind, names in tomllib.loads(_TABLE.read_text(encoding="utf-8")).items()
}

# Characters for which git quotes a file's name in a patch.
_QUOTED = re.compile(r'[\x00-\x1f\x7f"\\]')

# Reductions to a tensor without dimensions, which broadcasts.
_REDUCTIONS = frozenset(("max", "mean", "min", "norm", "std", "sum", "var"))


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


@dataclass(frozen=True)
class Edit:
    """Replaces bytes ``start`` to ``end`` of a file by ``text``."""

    start: int
    end: int
    text: str


class Source:
    """A Python file as bytes and as a syntax tree, in which a node knows what is around it.

    In the tree, the object of a method is ``self``, whatever the code calls it.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self.content = content
        self.tree = ast.parse(content, filename=str(path))
        if content.startswith(b"\xef\xbb\xbf"):
            raise SyntaxError(f"{path} begins with a byte-order mark")
        # The syntax tree counts columns in bytes of UTF-8, in any encoding of the file.
        encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0]
        if encoding not in ("utf-8", "ascii"):
            raise SyntaxError(f"{path} is encoded in {encoding}; only UTF-8 is changed")
        self._receivers = dict(_call_receivers_self(self.tree))
        self._lines = content.splitlines(keepends=True)
        self._starts = list(accumulate(map(len, self._lines), initial=0))

    @classmethod
    def read(cls, path: Path) -> Source:
        """The file on disk."""
        return cls(path, path.read_bytes())

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

    def receiver(self, node: ast.AST) -> str:
        """The name that the code has for the object of the method that a node is in."""
        return next((self._receivers[outer] for outer in self.above(node) if outer in self._receivers), "self")

    def with_self(self, guard: str, line: int) -> str:
        """A guard in which the object of the method that a line is in has the name ``self``."""
        statement = self.statement(line)
        name = "self" if statement is None else self._receivers.get(statement) or self.receiver(statement)
        return re.sub(rf"(?<![\w.'\"]){name}\b", "self", guard)

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The block that contains a statement."""
        parent = self.parents[statement]
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block
        return [statement]

    def start(self, node: ast.expr | ast.stmt) -> int:
        """Offset of a node's first byte."""
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        """Offset behind a node's last byte."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        """The source text of a node."""
        return self.content[self.start(node) : self.end(node)].decode("utf-8")

    def line(self, number: int) -> str:
        """The text of a line without the line end."""
        return self._lines[number - 1].decode("utf-8").rstrip("\r\n") if 0 < number <= len(self._lines) else ""

    def code(self, number: int) -> str:
        """The text of a line with blanks in place of comments and of the text of plain strings."""
        line = self.line(number)
        for token in tokenize.tokenize(io.BytesIO(self.content).readline):
            (first, begin), (last, end) = token.start, token.end
            if first == last == number and token.type == tokenize.COMMENT:
                line = line[:begin] + " " * (end - begin) + line[end:]
            elif first == last == number and token.type == tokenize.STRING and "f" not in token.string[:2].lower():
                line = line[: begin + 1] + " " * max(end - begin - 2, 0) + line[end - 1 :]
        return line

    def line_start(self, number: int) -> int:
        """Offset of a line's first byte; for the line behind the last one, the length of the file."""
        return self._starts[number - 1]

    def indent(self, statement: ast.stmt) -> str:
        """The white space before a statement."""
        line = self._lines[statement.lineno - 1][: statement.col_offset].decode("utf-8")
        return line[: len(line) - len(line.lstrip())]

    @property
    def newline(self) -> str:
        """The line end of the file."""
        return "\r\n" if self._lines and self._lines[0].endswith(b"\r\n") else "\n"

    def alone(self, statement: ast.stmt) -> bool:
        """Whether no other statement is on the lines of a statement."""
        assert statement.end_lineno is not None
        before = self._lines[statement.lineno - 1][: statement.col_offset]
        after = self._lines[statement.end_lineno - 1][statement.end_col_offset :].strip()
        return not before.strip() and (not after or after.startswith(b"#"))

    def comments(self, start: int, end: int) -> list[str]:
        """The comments between two offsets."""
        comments = []
        for token in tokenize.tokenize(io.BytesIO(self.content).readline):
            if token.type == tokenize.COMMENT:
                line, column = token.start
                text = self._lines[line - 1].decode("utf-8")
                if start <= self._starts[line - 1] + len(text[:column].encode("utf-8")) < end:
                    comments.append(token.string)
        return comments

    def replace(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        """An edit that puts ``text`` in a node's place."""
        return Edit(self.start(node), self.end(node), text)

    def delete_lines(self, node: ast.expr | ast.stmt) -> Edit:
        """An edit that deletes the lines of a node."""
        assert node.end_lineno is not None
        return Edit(self.line_start(node.lineno), self.line_start(node.end_lineno + 1), "")

    def apply(self, edits: Iterable[Edit]) -> bytes:
        """The file with these edits."""
        content, last = self.content, len(self.content)
        for edit in sorted(set(edits), key=lambda edit: (edit.start, edit.end), reverse=True):
            if edit.end > last:
                raise ValueError(f"two edits of {self.path} overlap at byte {edit.end}")
            content = content[: edit.start] + edit.text.encode("utf-8") + content[edit.end :]
            last = edit.start
        ast.parse(content, filename=str(self.path))
        return content


def _call_receivers_self(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Rename the object of every method to ``self``; yields the methods, each with the name in the code."""
    for owner in ast.walk(tree):
        for method in owner.body if isinstance(owner, ast.ClassDef) else ():
            if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            first = next(iter((*method.args.posonlyargs, *method.args.args)), None)
            without_object = {last_name(decorator) for decorator in method.decorator_list}
            if first is None or without_object & {"staticmethod", "classmethod"}:
                continue
            yield method, first.arg
            name, first.arg = first.arg, "self"
            for node in ast.walk(method):
                if isinstance(node, ast.Name) and node.id == name:
                    node.id = "self"


def line_before(before: bytes, after: bytes, line: int) -> int:
    """The line of the unchanged file that a line of the changed file replaces; 0 if it was inserted."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    for _, old, old_end, new, new_end in matcher.get_opcodes():
        if new < line <= new_end:
            return min(old + line - new, old_end) if old_end > old else 0
    return 0


def unified_diff(name: str, before: bytes, after: bytes) -> str:
    """A patch for ``git apply`` and ``patch -p1``."""
    lines = difflib.unified_diff(_lines(before), _lines(after), _in_header(f"a/{name}"), _in_header(f"b/{name}"))
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _in_header(name: str) -> str:
    """A file's name as git writes it: control characters are quoted, and a tab marks the end of a name with spaces."""
    if _QUOTED.search(name):
        return '"' + _QUOTED.sub(lambda character: f"\\{ord(character[0]):03o}", name) + '"'
    return f"{name}\t" if " " in name else name


def _lines(content: bytes) -> list[str]:
    # str.splitlines also splits at form feeds and the like; a patch splits at newlines alone.
    return io.StringIO(content.decode("utf-8"), newline="\n").readlines()


def is_quiet(node: ast.expr) -> bool:
    """Whether an expression has no side effects, so that it may be left out."""
    for part in ast.walk(node):
        match part:
            case ast.Await() | ast.Yield() | ast.YieldFrom() | ast.NamedExpr():
                return False
            case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS["quiet_functions"]:
                pass
            case ast.Call(func=ast.Attribute(attr=name)) if name in FUNCTIONS["quiet_methods"]:
                pass
            case ast.Call():
                return False
    return True


def is_elementwise(node: ast.expr) -> bool:
    """Whether an expression consists of arithmetic and elementwise functions of plain names."""
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()) | ast.Name():
            return True
        case ast.Attribute(value=inner) | ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=inner):
            return is_elementwise(inner)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.Pow(), left=left, right=right):
            return is_elementwise(left) and is_elementwise(right)
        case ast.Call(func=ast.Attribute(attr=name, value=tensor), args=args, keywords=keywords):
            if name in _REDUCTIONS:
                return not args and not keywords and is_elementwise(tensor)
            parts = [tensor, *args, *(word.value for word in keywords)]
            return name in FUNCTIONS["elementwise"] and all(map(is_elementwise, parts))
    return False


def is_exact_in_float32(node: ast.expr) -> bool:
    """Whether float32 represents a number exactly."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return bool(struct.unpack("f", struct.pack("f", value))[0] == value)
    return False


def is_exact_in_16_bits(node: ast.expr) -> bool:
    """Whether float16 and bfloat16, and so every wider dtype, represent a number exactly."""
    match node:
        case ast.Constant(value=int() | float() as value) if abs(value) <= 65504:
            half = struct.unpack("e", struct.pack("e", value))[0]
            return bool(half == value and struct.pack(">f", value)[2:] == b"\0\0")
    return False
