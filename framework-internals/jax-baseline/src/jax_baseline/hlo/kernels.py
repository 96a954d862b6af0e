"""The steps of a compiled program that do something: what each is, holds, costs, and what it serves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jax_baseline.hlo.cost import Cost, cost, scratch
from jax_baseline.hlo.text import Instruction, Module, Place, Shape, member_name

Phase = Literal["forward", "backward", "other"]
Category = Literal[
    "product", "attention", "collective", "gather/scatter", "reduction", "element-wise", "data movement", "library call"
]

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
_MOVES_DATA = frozenset(
    [
        "copy",
        "copy-start",
        "transpose",
        "bitcast",
        "bitcast-convert",
        "reshape",
        "broadcast",
        "slice",
        "dynamic-slice",
        "dynamic-update-slice",
        "concatenate",
        "pad",
        "iota",
        "reverse",
        "convert",
        "tuple",
        "get-tuple-element",
    ]
)
# Their label says where a value is used, not where something is computed.
_CARRIES_NO_WORK = frozenset({"parameter", "constant", "broadcast", "bitcast", "tuple", "get-tuple-element", "iota"})

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_KIND = re.compile(r"kind=k(\w+)")
_BACKEND_KIND = re.compile(r'"fusion(?:_backend)?_config":\{[^{}]*?"kind":"([^"]+)"')
_WRAPPER = re.compile(r"^[\w.]+\((.*)\)$")
# What JAX writes into names for its own control flow and transformations, and not a scope of the user's.
_NOT_A_SCOPE = frozenset(
    [
        "while",
        "body",
        "cond",
        "body_pred",
        "branch_0_fun",
        "branch_1_fun",
        "closed_call",
        "checkpoint",
        "remat",
        "rematted_computation",
        "custom_jvp_call",
        "custom_vjp_call",
        "shard_map",
    ]
)


@dataclass(frozen=True)
class Label:
    """Where an operation belongs.

    Attributes:
        phase: forward, backward, or other (the update).
        scopes: ``jax.named_scope`` names from the outermost in.
    """

    phase: Phase
    scopes: tuple[str, ...]

    @property
    def region(self) -> str:
        """The scopes joined by ``/``."""
        return "/".join(self.scopes)


@dataclass(frozen=True)
class Kernel:
    """One step of the compiled program.

    Attributes:
        name: of the instruction.
        kind: ``fusion loop``, ``fusion input``, ``fusion custom``, … for a fusion; ``custom call``; else the opcode.
        target: of a custom call, or what the back end calls a custom fusion (``__triton_gemm``); empty otherwise.
        category: what it mainly is.
        ops: the operations inside by opcode, most frequent first; names for memory are left out.
        dots: matrix products inside.
        label: of the operation that does most of its work: a product if there is one, else the largest.
        labels: of all operations inside, most elements first.
        place: line of the user's source behind that operation; None where the compiler kept none.
        calls: how often it runs, more than once in a loop.
        cost: of one run.
        whole_bytes: of all operands and results as if each were read and written whole, an operand that is named twice
            counted twice: what XLA's CPU and generic analyses call "bytes accessed".
        operands: names of the instructions it reads.
        writes: the arrays of its result by name (``name[0]`` in a tuple), a library's scratch memory left out.
        computation: the computation it calls, for quoting; empty if none.
    """

    name: str
    kind: str
    target: str
    category: Category
    ops: dict[str, int]
    dots: int
    label: Label
    labels: tuple[Label, ...]
    place: Place | None
    calls: int
    cost: Cost
    whole_bytes: int
    operands: tuple[str, ...]
    writes: tuple[tuple[str, Shape], ...]
    computation: str

    @property
    def phase(self) -> Phase:
        """Of the operation that does most of its work."""
        return self.label.phase

    @property
    def region(self) -> str:
        """Named scopes of the same, outermost first, joined by ``/``; empty where the compiler gave none."""
        return self.label.region

    @property
    def description(self) -> str:
        """The kind, and by which name a library or a back end makes it."""
        return f"{self.kind}: {self.target}" if self.target else self.kind

    @property
    def total(self) -> Cost:
        """Of all its runs in one run of the program."""
        return self.cost.times(self.calls)


def kernels(module: Module) -> list[Kernel]:
    """Return the steps of a compiled program that do something, in the order of the program.

    What is inside a fusion is no step of its own; the body of a loop is listed once, with how often it runs.
    """
    return [
        _kernel(module, instruction, types, calls)
        for instruction, types, calls in _executed(module, module.entry, 1)
        if instruction.opcode not in _NO_KERNEL and not instruction.opcode.endswith("-done")
    ]


def label_of(instruction: Instruction) -> Label:
    """Read phase and scopes from an operation's name: ``jit(step)/transpose(jvp(block0))/mlp/add``."""
    phase: Phase = "other"
    scopes = []
    for part in instruction.op_name.split("/")[:-1]:
        wrappers, inner = _unwrap(part)
        if "transpose" in wrappers:
            phase = "backward"
        elif "jvp" in wrappers and phase == "other":
            phase = "forward"
        if part == "rematted_computation":
            phase = "backward"  # the forward pass done again, for the gradient
        if inner and not {"jit", "pjit"} & set(wrappers) and inner not in _NOT_A_SCOPE:
            scopes.append(inner)
    return Label(phase, tuple(scopes))


def quote(module: Module, kernel: Kernel) -> str:
    """The HLO text of what is inside a kernel: its computation, or its own line."""
    if kernel.computation:
        return module.lines[kernel.computation]
    return next(
        line.strip()
        for text in module.lines.values()
        for line in text.splitlines()
        if re.match(rf"\s+(ROOT )?%?{re.escape(kernel.name)} = ", line)
    )


def _executed(
    module: Module, computation: str, calls: int
) -> Iterator[tuple[Instruction, dict[str, Instruction], int]]:
    body = module.computations[computation]
    types = {instruction.name: instruction for instruction in body}
    for instruction in body:
        if instruction.opcode in _CONTROL_FLOW:
            trips = instruction.trip_count if instruction.opcode == "while" else None
            condition = instruction.attribute("condition").lstrip("%")
            for name in instruction.callees:
                # The condition is asked once more than the body runs; a loop of unknown length counts as one run.
                times = 1 if trips is None else trips + (name == condition)
                yield from _executed(module, name, calls * times)
        else:
            yield instruction, types, calls


def _kernel(module: Module, instruction: Instruction, types: dict[str, Instruction], calls: int) -> Kernel:
    inside = list(module.inside(instruction)) if instruction.opcode == "fusion" else [instruction]
    content = [one for one in inside if one.opcode not in ("parameter", "constant", "fusion")] or [instruction]
    working = [one for one in content if one.opcode not in _CARRIES_NO_WORK] or content
    chief = max(working, key=lambda one: (one.opcode == "dot", bool(one.op_name), one.elements))
    weights = _weights(working) or _weights(_functions_of_its_own(module, inside))
    if chief.opcode == "dot" or not weights:
        label = label_of(chief if chief.op_name else instruction)
    else:
        label = weights.most_common(1)[0][0]
    target = _TARGET.search(instruction.attributes) or _BACKEND_KIND.search(instruction.attributes)
    ops = Counter(one.opcode for one in working)
    return Kernel(
        name=instruction.name,
        kind=_kind(instruction),
        target=target[1] if target else "",
        category=_category(instruction, target[1] if target else "", working),
        ops=dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
        dots=ops["dot"],
        label=label,
        labels=tuple(found for found, _ in weights.most_common()),
        place=module.place(chief) or module.place(instruction),
        calls=calls,
        cost=cost(module, instruction, types),
        whole_bytes=instruction.bytes + sum(types[name].bytes for name in instruction.operands if name in types),
        operands=instruction.operands,
        writes=_writes(instruction),
        computation=instruction.callees[0] if instruction.opcode == "fusion" and instruction.callees else "",
    )


def _weights(instructions: Iterable[Instruction]) -> Counter[Label]:
    """Elements by label."""
    weights: Counter[Label] = Counter()
    for one in instructions:
        if one.op_name:
            weights[label_of(one)] += max(one.elements, 1)
    return weights


def _functions_of_its_own(module: Module, inside: Sequence[Instruction]) -> Iterator[Instruction]:
    """What the functions do that nothing else in the module uses.

    XLA splits a long reduction in two, and only one of them keeps the label; the function of the other still has it.
    """
    users = Counter(name for body in module.computations.values() for one in body for name in one.callees)
    for name in (name for one in inside for name in one.callees if users[name] == 1):
        yield from (one for one in module.computations.get(name, ()) if one.opcode not in _CARRIES_NO_WORK)


def _writes(instruction: Instruction) -> tuple[tuple[str, Shape], ...]:
    shapes = instruction.shapes[:-1] if scratch(instruction) else instruction.shapes
    return tuple((member_name(instruction, index), shape) for index, shape in enumerate(shapes))


def _kind(instruction: Instruction) -> str:
    if instruction.opcode == "fusion":
        kind = _KIND.search(instruction.attributes)
        return f"fusion {kind[1].lower()}" if kind else "fusion"
    if instruction.opcode == "custom-call":
        return "custom call"
    return instruction.opcode


def _category(instruction: Instruction, target: str, working: list[Instruction]) -> Category:
    # Arithmetic on an index does not make a slice more than a slice.
    ops = {one.opcode for one in working if one.elements > 1} or {one.opcode for one in working}
    if instruction.opcode in COLLECTIVES:
        return "collective"
    if "fmha" in target or "flash" in target:
        return "attention"
    if ops & {"dot", "convolution"} or re.search("gemm|matmul", target):
        return "product"
    if instruction.opcode == "custom-call":
        return "library call"
    if ops & {"gather", "scatter"}:
        return "gather/scatter"
    if any(one.opcode in ("reduce", "reduce-window") for one in working):
        return "reduction"
    return "data movement" if ops <= _MOVES_DATA else "element-wise"


def _unwrap(part: str) -> tuple[list[str], str]:
    """``transpose(jvp(block0))`` → (["transpose", "jvp"], "block0")."""
    wrappers = []
    while match := _WRAPPER.match(part):
        wrappers.append(part.split("(", 1)[0])
        part = match[1]
    return wrappers, part
