"""The text of an HLO module as computations and instructions: the grammar alone, no judgement of what they cost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

# Bits of an element by the name HLO prints. Four-bit and narrower types are stored packed.
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

# Of every other opcode (reduce, scatter, sort, all-reduce, …) what it names says how two elements combine or compare.
# A module keeps one such function for all of them, with the label and the line of whichever operation came first.
_RUNS_WHAT_IT_CALLS = frozenset({"async-start", "call", "conditional", "custom-call", "fusion", "map", "while"})


@dataclass(frozen=True)
class Shape:
    """An array's element type and dimensions.

    Attributes:
        dtype: as HLO prints it: ``f32``, ``bf16``, ``s32``, ``pred``.
        dimensions: sizes, outermost logical dimension first.
    """

    dtype: str
    dimensions: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """Bytes it takes; a token takes none."""
        bits = 8 if _EIGHT_BIT_FLOAT.match(self.dtype) else _BITS.get(self.dtype, 0)
        return math.ceil(self.elements * bits / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dimensions))}]"


@dataclass(frozen=True)
class Place:
    """Where in the user's source an instruction comes from."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Instruction:
    """One line of HLO.

    Attributes:
        name: unique in its module.
        shape: of the result, as printed: ``f32[16,128]{1,0}``, or a tuple in brackets.
        opcode: ``fusion``, ``dot``, ``custom-call``, …
        operands: names of the instructions it reads; empty for a parameter or a constant.
        argument: what stands between the brackets: a parameter's number, a constant's value, the operands.
        attributes: everything behind the operands.
        root: whether it is the result of its computation.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    argument: str
    attributes: str
    root: bool = False

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result: one, or those of a tuple."""
        return tuple(
            Shape(dtype, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size))
            for dtype, sizes in _SHAPE.findall(self.shape)
        )

    @property
    def elements(self) -> int:
        """Number of elements of the (first) result."""
        return self.shapes[0].elements if self.shapes else 0

    @property
    def bytes(self) -> int:
        """Bytes of the result, a tuple's members together."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def callees(self) -> tuple[str, ...]:
        """Names of the computations this instruction calls."""
        found = (single or several for single, several in _CALLEES.findall(self.attributes))
        return tuple(name.strip().lstrip("%") for group in found for name in group.split(","))

    @property
    def op_name(self) -> str:
        """JAX's name for the operation, scopes included: ``jit(step)/jvp(block0)/mlp/dot_general``; empty if none."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""

    @property
    def trip_count(self) -> int | None:
        """How often a ``while`` runs, where the compiler knows."""
        match = _TRIP_COUNT.search(self.attributes)
        return int(match[1]) if match else None

    def attribute(self, name: str) -> str:
        """The text of ``name=…`` up to the next comma outside braces; empty if there is none."""
        match = re.search(rf"\b{name}=(\{{[^}}]*\}}|\"[^\"]*\"|[^,\s]+)", self.attributes)
        return match[1].strip('"') if match else ""

    def dimensions(self, name: str) -> tuple[int, ...]:
        """The numbers of ``name={0,2}``."""
        return tuple(int(number) for number in re.findall(r"\d+", self.attribute(name)))


@dataclass(frozen=True)
class Module:
    """A parsed HLO module.

    Attributes:
        name: ``jit_step``.
        entry: name of the computation that is run.
        computations: instructions by computation.
        lines: the printed text of each computation, for quoting.
        donated: numbers of the parameters whose memory an output takes over.
        tables: the source locations at the top of the text, by table.
    """

    name: str
    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]
    lines: Mapping[str, str]
    donated: frozenset[int]
    tables: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @property
    def undecided(self) -> str:
        """What the program decides when it runs, and a count of its work therefore assumes; empty if nothing."""
        every = [one for instructions in self.computations.values() for one in instructions]
        loops = sum(one.opcode == "while" and one.trip_count is None for one in every)
        branches = sum(one.opcode == "conditional" for one in every)
        parts = [f"{loops} loops of unknown length count as one run each"] if loops else []
        parts += [f"{branches} conditionals with all of their branches"] if branches else []
        return ", ".join(parts)

    @property
    def arguments(self) -> dict[int, Instruction]:
        """The entry computation's parameters by number."""
        return {int(one.argument): one for one in self.computations[self.entry] if one.opcode == "parameter"}

    @property
    def parameters(self) -> int:
        """How many arrays the entry computation takes."""
        return len(self.arguments)

    @property
    def result(self) -> Instruction:
        """The entry computation's root."""
        return next(one for one in self.computations[self.entry] if one.root)

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instruction itself and everything it runs, at any depth; the function of a reduction is not among it."""
        yield instruction
        for name in instruction.callees if instruction.opcode in _RUNS_WHAT_IT_CALLS else ():
            for inner in self.computations.get(name, ()):
                yield from self.inside(inner)

    def place(self, instruction: Instruction) -> Place | None:
        """The innermost frame outside installed packages that made the instruction; the innermost of all if none is."""
        if match := _FILE_AND_LINE.search(instruction.attributes):
            return Place(match[1], "", int(match[2]))
        match = _FRAME.search(instruction.attributes)
        frames = self._frames(int(match[1])) if match else []
        return next((place for place in frames if "site-packages" not in place.file), frames[0] if frames else None)

    def _frames(self, number: int) -> list[Place]:
        """The call stack behind a frame's number, innermost first."""
        stack, found, seen = self.tables.get("StackFrames", {}), [], set()
        while number in stack and number not in seen:
            seen.add(number)
            location, parent = (int(part) for part in re.findall(r"=(\d+)", stack[number] + " parent_frame_id=0")[:2])
            file, function, line = (
                int(part) for part in re.findall(r"=(\d+)", self.tables["FileLocations"][location])[:3]
            )
            names = (self.tables["FileNames"][file].strip('"'), self.tables["FunctionNames"][function].strip('"'))
            found.append(Place(*names, line))
            number = parent - self._parents_are_one_high
        return found

    @cached_property
    def _parents_are_one_high(self) -> bool:
        """Whether parents are printed with one added: then the outermost frames seem to be their own parents."""
        return any(f"parent_frame_id={number}" in row for number, row in self.tables.get("StackFrames", {}).items())


def parse(text: str) -> Module:
    """Read the text of an HLO module, as ``compiled.as_text()`` gives it.

    Raises:
        ValueError: if there is no entry computation in it.
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
    """An array of an instruction's result: its name, with the number of the member if it is a tuple."""
    return f"{instruction.name}[{index}]" if instruction.shape.startswith("(") else instruction.name


def _instruction(name: str, rest: str, root: bool) -> Instruction:
    """Split ``shape opcode(operands), attributes``; a tuple's shape has brackets and blanks of its own."""
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
    """Index of the bracket that closes the one at ``start``, strings skipped."""
    depth = 0
    for match in _BRACKET.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    raise ValueError(f"a bracket is never closed in the HLO text {text[start : start + 80]!r}")


def _donated(first_line: str) -> frozenset[int]:
    start = first_line.find("input_output_alias={")
    if start < 0:
        return frozenset()
    # The list ends where the next module attribute begins: "}, name=".
    end = re.search(r"\}, \w+=|\}$", first_line[start:])
    return frozenset(int(number) for number in _ALIAS.findall(first_line[start : start + end.end() if end else None]))
