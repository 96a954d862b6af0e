"""Optimised HLO read as what it is: a list of kernels, what each holds and which part of the model it serves.

Text in, counts out: neither jax nor torch is imported here, so that a dump from another machine can be read anywhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Phase = Literal["forward", "backward", "other"]

COLLECTIVES = frozenset(
    name + suffix
    for name in (
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    )
    for suffix in ("", "-start")
)
# Names for memory that is already there: no kernel runs for them. The "-done" half of an asynchronous pair only waits.
_NO_KERNEL = frozenset(
    {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id"}
)
_CONTROL_FLOW = frozenset({"while", "conditional", "call"})

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r" ?(?P<opcode>[a-z][\w\-]*)\(")
_CALLEES = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)|"
    r"(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_KIND = re.compile(r"kind=k(\w+)")
_BACKEND_KIND = re.compile(r'"fusion(?:_backend)?_config":\{[^{}]*?"kind":"([^"]+)"')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+),")
_WRAPPER = re.compile(r"^[\w.]+\((.*)\)$")


@dataclass(frozen=True)
class Instruction:
    """One line of HLO.

    Attributes:
        name: unique in its module.
        shape: of the result, as printed: ``f32[16,128]{1,0}``, or a tuple in brackets.
        opcode: ``fusion``, ``dot``, ``custom-call``, …
        attributes: everything behind the operands.
    """

    name: str
    shape: str
    opcode: str
    attributes: str

    @property
    def callees(self) -> tuple[str, ...]:
        """Names of the computations this instruction calls."""
        found = (single or several for single, several in _CALLEES.findall(self.attributes))
        return tuple(name.strip().lstrip("%") for group in found for name in group.split(","))

    @property
    def scopes(self) -> tuple[Phase, tuple[str, ...]]:
        """The phase, and the ``jax.named_scope`` names from the outermost in, without the operation's own name."""
        match = _OP_NAME.search(self.attributes)
        path = match[1].split("/")[:-1] if match else []
        phase: Phase = "other"
        names = []
        for part in path:
            wrappers, inner = _unwrap(part)
            if "transpose" in wrappers:
                phase = "backward"
            elif "jvp" in wrappers and phase == "other":
                phase = "forward"
            if inner and not {"jit", "pjit"} & set(wrappers):
                names.append(inner)
        return phase, tuple(names)


@dataclass(frozen=True)
class Module:
    """A parsed HLO module.

    Attributes:
        entry: name of the computation that is run.
        computations: instructions by computation.
        donated: numbers of the parameters whose memory an output takes over.
    """

    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]
    donated: frozenset[int]

    @property
    def parameters(self) -> int:
        """How many arrays the entry computation takes."""
        return sum(instruction.opcode == "parameter" for instruction in self.computations[self.entry])

    def executed(self) -> Iterator[Instruction]:
        """The instructions that run as steps of their own: the entry's, and those in the bodies of its control flow.

        A loop's body is listed once, however often it runs; what is inside a fusion is not listed.
        """
        waiting, seen = [self.entry], {self.entry}
        while waiting:
            for instruction in self.computations[waiting.pop()]:
                if instruction.opcode in _CONTROL_FLOW:
                    new = [name for name in instruction.callees if name not in seen]
                    seen.update(new)
                    waiting.extend(new)
                else:
                    yield instruction

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instruction itself and everything it calls, at any depth."""
        yield instruction
        for name in instruction.callees:
            for inner in self.computations.get(name, ()):
                yield from self.inside(inner)


@dataclass(frozen=True)
class Kernel:
    """One step of the compiled program.

    Attributes:
        name: of the instruction.
        kind: ``fusion loop``, ``fusion input``, ``fusion custom``, … for a fusion; ``custom call``; else the opcode.
        target: of a custom call, or what the back end calls a custom fusion (``__triton_gemm``); empty otherwise.
        dots: matrix products inside.
        phase: forward, backward, or other (the update).
        region: named scopes, outermost first, joined by ``/``; empty where the compiler gave none.
    """

    name: str
    kind: str
    target: str
    dots: int
    phase: Phase
    region: str


@dataclass(frozen=True)
class RegionCount:
    """Kernels of one part of the model in one phase."""

    region: str
    phase: Phase
    kernels: int
    dots: int


@dataclass(frozen=True)
class Summary:
    """An optimised module in numbers.

    Attributes:
        kernels: steps of the program that do something.
        kinds: their number by kind, most frequent first.
        dots: matrix products, alone or inside fusions; a library call that is one is a kind of its own.
        collectives: by opcode.
        donated: arguments whose memory an output takes over.
        arguments: how many there are.
        regions: kernels by part of the model.
    """

    kernels: int
    kinds: dict[str, int]
    dots: int
    collectives: dict[str, int]
    donated: int
    arguments: int
    regions: tuple[RegionCount, ...]

    def as_plain(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)


def parse(text: str) -> Module:
    """Read the text of an HLO module, as ``compiled.as_text()`` gives it.

    Raises:
        ValueError: if there is no entry computation in it.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, lines = "", "", list[Instruction]()
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if not name:
            if (header := _HEADER.match(line)) and not line.startswith("HloModule"):
                name = header["name"]
                entry = name if header["entry"] else entry
        elif line.startswith("}"):
            computations[name] = tuple(lines)
            name, lines = "", []
        elif match := _INSTRUCTION.match(line):
            lines.append(_instruction(match["name"], match["rest"]))
    if not entry or entry not in computations:
        raise ValueError(
            "expected the text of an HLO module with an ENTRY computation (compiled.as_text()), got "
            f"{text.strip().splitlines()[0][:60]!r}…"
            if text.strip()
            else "expected HLO text, got nothing"
        )
    return Module(entry, computations, _donated(text.split("\n", 1)[0]))


def kernels(module: Module) -> list[Kernel]:
    """Return the steps of a compiled program that do something."""
    found = []
    for instruction in module.executed():
        if instruction.opcode in _NO_KERNEL or instruction.opcode.endswith("-done"):
            continue
        target = _TARGET.search(instruction.attributes) or _BACKEND_KIND.search(instruction.attributes)
        phase, scopes = instruction.scopes
        found.append(
            Kernel(
                name=instruction.name,
                kind=_kind(instruction),
                target=target[1] if target else "",
                dots=sum(inner.opcode == "dot" for inner in module.inside(instruction)),
                phase=phase,
                region="/".join(scopes),
            )
        )
    return found


def count_by_kind(found: list[Kernel]) -> Counter[str]:
    """Return how many kernels there are of each kind, custom calls and custom fusions by name."""
    return Counter(f"{kernel.kind}: {kernel.target}" if kernel.target else kernel.kind for kernel in found)


def count_by_region(found: list[Kernel]) -> dict[tuple[str, Phase], list[Kernel]]:
    """Group kernels by the model's region and the phase, blocks of a number taken together: ``block*/attention``.

    Returns:
        Kernels by (region, phase), in the order in which the regions first appear; the innermost scopes that a library
        opened for itself (an einsum's formula) are left out: two levels remain.
    """
    groups: dict[tuple[str, Phase], list[Kernel]] = {}
    for kernel in found:
        parts = [re.sub(r"^([A-Za-z_]+)\d+$", r"\1*", part) for part in kernel.region.split("/")]
        depth = 2 if parts[0].endswith("*") else 1
        groups.setdefault(("/".join(parts[:depth]), kernel.phase), []).append(kernel)
    return groups


def summarise(text: str) -> Summary:
    """Count what is in the text of an optimised HLO module.

    Raises:
        ValueError: if it is not one.
    """
    module = parse(text)
    found = kernels(module)
    kinds = count_by_kind(found)
    return Summary(
        kernels=len(found),
        kinds=dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))),
        dots=sum(kernel.dots for kernel in found),
        collectives={kind: count for kind, count in kinds.items() if kind in COLLECTIVES},
        donated=len(module.donated),
        arguments=module.parameters,
        regions=tuple(
            RegionCount(region, phase, len(group), sum(kernel.dots for kernel in group))
            for (region, phase), group in count_by_region(found).items()
        ),
    )


def _instruction(name: str, rest: str) -> Instruction:
    """Split ``shape opcode(operands), attributes``; a tuple's shape has brackets and blanks of its own."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    match = _OPCODE.match(rest, end)
    if match is None:
        raise ValueError(
            f"cannot read the HLO instruction {name!r}: expected an opcode after the shape in {rest[:80]!r}"
        )
    return Instruction(name, rest[:end], match["opcode"], rest[_closing(rest, match.end() - 1) + 1 :])


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at ``start``, strings skipped."""
    depth, quoted = 0, False
    for index in range(start, len(text)):
        character = text[index]
        if character == '"' and text[index - 1] != "\\":
            quoted = not quoted
        elif not quoted and character == "(":
            depth += 1
        elif not quoted and character == ")":
            depth -= 1
            if depth == 0:
                return index
    raise ValueError(f"a bracket is never closed in the HLO text {text[start : start + 80]!r}")


def _unwrap(part: str) -> tuple[list[str], str]:
    """``transpose(jvp(block0))`` → (["transpose", "jvp"], "block0")."""
    wrappers = []
    while match := _WRAPPER.match(part):
        wrappers.append(part.split("(", 1)[0])
        part = match[1]
    return wrappers, part


def _kind(instruction: Instruction) -> str:
    if instruction.opcode == "fusion":
        kind = _KIND.search(instruction.attributes)
        return f"fusion {kind[1].lower()}" if kind else "fusion"
    if instruction.opcode == "custom-call":
        return "custom call"
    return instruction.opcode


def _donated(first_line: str) -> frozenset[int]:
    start = first_line.find("input_output_alias={")
    if start < 0:
        return frozenset()
    # The list ends where the next module attribute begins: "}, name=".
    end = re.search(r"\}, \w+=|\}$", first_line[start:])
    return frozenset(int(number) for number in _ALIAS.findall(first_line[start : start + end.end() if end else None]))
