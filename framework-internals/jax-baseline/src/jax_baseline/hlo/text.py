"""Parses the text of an HLO module into computations and instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

# Bits of an element by HLO's name of the dtype. Types of four bits and fewer are packed.
_BITS = {
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    "c128": 128,
    "s4": 4,
    "u4": 4,
    "f4e2m1fn": 4,
    "s2": 2,
    "u2": 2,
    "s1": 1,
    "u1": 1,
}
_EIGHT_BIT_FLOAT = re.compile(r"f8e\d")

_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r" ?(?P<opcode>[a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLEES = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)|"
    r"(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+),")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FILE_AND_LINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_TABLE_ROW = re.compile(r"^(\d+) (.*)$")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_BRACKET = re.compile(r'[()]|"(?:[^"\\]|\\.)*"')

# Opcodes that run the computations that they call. The computation of any other opcode (reduce, scatter, sort,
# all-reduce, …) combines or compares two elements. A module shares it, with the label and the line of its first user.
_RUNS_WHAT_IT_CALLS = frozenset({"async-start", "call", "conditional", "custom-call", "fusion", "map", "while"})


@dataclass(frozen=True)
class Shape:
    """Element type and dimensions of an array."""

    dtype: str  # HLO's name: ``f32``, ``bf16``, ``s32``, ``pred``
    dimensions: tuple[int, ...]  # sizes, outermost logical dimension first

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """Size in bytes. A token has 0."""
        bits = 8 if _EIGHT_BIT_FLOAT.match(self.dtype) else _BITS.get(self.dtype, 0)
        return math.ceil(self.elements * bits / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dimensions))}]"


@dataclass(frozen=True)
class SourceLocation:
    """Line of the user's source that an instruction comes from."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Instruction:
    """One line of HLO."""

    name: str
    shape: str  # printed shape of the result: ``f32[16,128]{1,0}``, or a tuple in parentheses
    opcode: str  # ``fusion``, ``dot``, ``custom-call``, …
    operands: tuple[str, ...]  # names of the instructions that it reads. Empty for a parameter or a constant
    argument: str  # text in the parentheses: the number of a parameter, the value of a constant, or the operands
    attributes: str  # text after the parentheses
    root: bool = False

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the result: one array, or the members of a tuple."""
        return tuple(
            Shape(dtype, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size))
            for dtype, sizes in _SHAPE.findall(self.shape)
        )

    @property
    def elements(self) -> int:
        """Number of elements of the first array of the result."""
        return self.shapes[0].elements if self.shapes else 0

    @property
    def bytes(self) -> int:
        """Bytes of the result, summed over the members of a tuple."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def callees(self) -> tuple[str, ...]:
        """Names of the computations that this instruction calls."""
        groups = (single or several for single, several in _CALLEES.findall(self.attributes))
        return tuple(name.strip().lstrip("%") for group in groups for name in group.split(","))

    @property
    def op_name(self) -> str:
        """JAX's name of the operation with its scopes: ``jit(step)/jvp(block0)/mlp/dot_general``. Empty if none."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""

    @property
    def trip_count(self) -> int | None:
        """Number of iterations of a ``while``. None if the compiler does not know it."""
        match = _TRIP_COUNT.search(self.attributes)
        return int(match[1]) if match else None

    def attribute(self, name: str) -> str:
        """Return the text of ``name=…`` up to the next comma outside braces; empty if there is none."""
        match = re.search(rf"\b{name}=(\{{[^}}]*\}}|\"[^\"]*\"|[^,\s]+)", self.attributes)
        return match[1].strip('"') if match else ""

    def dimensions(self, name: str) -> tuple[int, ...]:
        """Return the numbers of ``name={0,2}``."""
        return tuple(int(number) for number in re.findall(r"\d+", self.attribute(name)))


@dataclass(frozen=True)
class Module:
    """A parsed HLO module."""

    name: str
    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]  # instructions by computation
    lines: Mapping[str, str]
    donated: frozenset[int]  # numbers of the parameters whose memory an output reuses
    # Tables of source locations at the top of the text.
    tables: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @property
    def assumptions(self) -> str:
        """What the counts assume about loops and branches that the program decides at run time. Empty if nothing."""
        every = [instruction for instructions in self.computations.values() for instruction in instructions]
        loops = sum(instruction.opcode == "while" and instruction.trip_count is None for instruction in every)
        branches = sum(instruction.opcode == "conditional" for instruction in every)
        parts = [f"{loops} loops of unknown length count as one iteration each"] if loops else []
        parts += [f"{branches} conditionals count with all branches"] if branches else []
        return ", ".join(parts)

    @property
    def arguments(self) -> dict[int, Instruction]:
        """Parameters of the entry computation by number."""
        return {
            int(instruction.argument): instruction
            for instruction in self.computations[self.entry]
            if instruction.opcode == "parameter"
        }

    @property
    def result(self) -> Instruction:
        """Root of the entry computation."""
        return next(instruction for instruction in self.computations[self.entry] if instruction.root)

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield the instruction and all instructions that it runs, without the functions of reductions."""
        yield instruction
        for name in instruction.callees if instruction.opcode in _RUNS_WHAT_IT_CALLS else ():
            for inner in self.computations.get(name, ()):
                yield from self.inside(inner)

    def location(self, instruction: Instruction) -> SourceLocation | None:
        """Return the innermost frame outside installed packages, or else the innermost frame; None without frames."""
        if match := _FILE_AND_LINE.search(instruction.attributes):
            return SourceLocation(match[1], "", int(match[2]))
        match = _FRAME.search(instruction.attributes)
        frames = self._frames(int(match[1])) if match else []
        return next((frame for frame in frames if "site-packages" not in frame.file), frames[0] if frames else None)

    def _frames(self, number: int) -> list[SourceLocation]:
        """Return the call stack of a frame's number, innermost first."""
        stack, frames, seen = self.tables.get("StackFrames", {}), [], set()
        while number in stack and number not in seen:
            seen.add(number)
            location, parent = (int(part) for part in re.findall(r"=(\d+)", stack[number] + " parent_frame_id=0")[:2])
            file, function, line = (
                int(part) for part in re.findall(r"=(\d+)", self.tables["FileLocations"][location])[:3]
            )
            names = (self.tables["FileNames"][file].strip('"'), self.tables["FunctionNames"][function].strip('"'))
            frames.append(SourceLocation(*names, line))
            number = parent - self._parents_are_one_high
        return frames

    @cached_property
    def _parents_are_one_high(self) -> bool:
        """Whether the text adds one to the parents' numbers. The outermost frames then name themselves as parents."""
        return any(f"parent_frame_id={number}" in row for number, row in self.tables.get("StackFrames", {}).items())


def parse(text: str) -> Module:
    """Parse the text of an HLO module, as ``compiled.as_text()`` returns it.

    Raises:
        ValueError: If the text has no entry computation.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    quoted: dict[str, str] = {}
    tables: dict[str, dict[int, str]] = {}
    entry, name, table = "", "", ""
    instructions, lines = list[Instruction](), list[str]()
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if not name:
            if line in _TABLES:
                table = line
            elif table and (row := _TABLE_ROW.match(line)):
                tables.setdefault(table, {})[int(row[1])] = row[2]
            elif (header := _HEADER.match(line)) and not line.startswith("HloModule"):
                name, lines = header["name"], [line]
                entry = name if header["entry"] else entry
            continue
        lines.append(line)
        if line.startswith("}"):
            computations[name], quoted[name] = tuple(instructions), "\n".join(lines)
            name, instructions = "", []
        elif match := _INSTRUCTION.match(line):
            instructions.append(_instruction(match["name"], match["rest"], match["root"] is not None))
    if not entry or entry not in computations:
        raise ValueError(
            "expected the text of an HLO module with an ENTRY computation (compiled.as_text()), got "
            f"{text.strip().splitlines()[0][:60]!r}…"
            if text.strip()
            else "expected HLO text, got nothing"
        )
    first = text.lstrip().split("\n", 1)[0]
    module = re.match(r"HloModule ([\w.\-]+)", first)
    return Module(module[1] if module else "", entry, computations, quoted, _donated(first), tables)


def member_name(instruction: Instruction, index: int) -> str:
    """Return the name of an array of an instruction's result, with its index if the result is a tuple."""
    return f"{instruction.name}[{index}]" if instruction.shape.startswith("(") else instruction.name


def _instruction(name: str, rest: str, root: bool) -> Instruction:
    """Split ``shape opcode(operands), attributes``. The shape of a tuple contains parentheses and blanks."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    match = _OPCODE.match(rest, end)
    if match is None:
        raise ValueError(
            f"cannot read the HLO instruction {name!r}: expected an opcode after the shape in {rest[:80]!r}"
        )
    start, close = match.end(), _closing(rest, match.end() - 1)
    argument = rest[start:close]
    return Instruction(
        name,
        rest[:end],
        match["opcode"],
        () if match["opcode"] in ("parameter", "constant") else tuple(_OPERAND.findall(argument)),
        argument,
        rest[close + 1 :],
        root,
    )


def _closing(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at ``start``. Strings are skipped."""
    depth = 0
    for match in _BRACKET.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    raise ValueError(f"a parenthesis is never closed in the HLO text {text[start : start + 80]!r}")


def _donated(first_line: str) -> frozenset[int]:
    start = first_line.find("input_output_alias={")
    if start < 0:
        return frozenset()
    # The list ends where the next module attribute begins: "}, name=".
    end = re.search(r"\}, \w+=|\}$", first_line[start:])
    return frozenset(int(number) for number in _ALIAS.findall(first_line[start : start + end.end() if end else None]))
