"""Lists the kernels of a compiled program: kind, operations, cost, and part of the model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jax_baseline.hlo.cost import Cost, cost, scratch
from jax_baseline.hlo.text import Instruction, Module, Shape, SourceLocation, member_name

Phase = Literal["forward", "backward", "other"]
Category = Literal[
    "matmul", "attention", "collective", "gather/scatter", "reduction", "element-wise", "data movement", "library call"
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
# Operations that only name existing memory. No kernel runs for them.
_NO_KERNEL = frozenset(
    {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id"}
)
_CONTROL_FLOW = frozenset({"while", "conditional", "call"})
_MOVES_DATA = frozenset({
    "copy", "copy-start", "transpose", "bitcast", "bitcast-convert", "reshape", "broadcast", "slice", "dynamic-slice",
    "dynamic-update-slice", "concatenate", "pad", "iota", "reverse", "convert", "tuple", "get-tuple-element",
})  # fmt: skip
# The label of these operations says where a value is used, not where it is computed.
_CARRIES_NO_WORK = frozenset({"parameter", "constant", "broadcast", "bitcast", "tuple", "get-tuple-element", "iota"})

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_KIND = re.compile(r"kind=k(\w+)")
_BACKEND_KIND = re.compile(r'"fusion(?:_backend)?_config":\{[^{}]*?"kind":"([^"]+)"')
_WRAPPER = re.compile(r"^[\w.]+\((.*)\)$")
# Names that JAX adds for its control flow and transformations. They are not scopes of the user.
_NOT_A_SCOPE = frozenset({
    "while", "body", "cond", "body_pred", "branch_0_fun", "branch_1_fun", "closed_call", "checkpoint", "remat",
    "rematted_computation", "custom_jvp_call", "custom_vjp_call", "shard_map",
})  # fmt: skip


@dataclass(frozen=True)
class Label:
    """The label of an operation."""

    phase: Phase  # forward, backward, or other (the update)
    scopes: tuple[str, ...]  # names of ``jax.named_scope``, from the outermost to the innermost

    @property
    def region(self) -> str:
        """The scopes joined by ``/``."""
        return "/".join(self.scopes)


@dataclass(frozen=True)
class Kernel:
    """One kernel of the compiled program."""

    name: str  # name of the instruction
    kind: str  # ``fusion loop``, ``fusion input``, ``fusion custom``, … for a fusion; ``custom call``; else the opcode
    # Target of a custom call, or the back end's name of a custom fusion (``__triton_gemm``). Empty otherwise.
    target: str
    category: Category  # main kind of work
    # Number of operations inside by opcode, most frequent first. Operations that only name memory are left out.
    ops: dict[str, int]
    dots: int  # number of matrix products inside
    # Label of the operation that does most of the work: a matrix product if there is one, else the largest.
    label: Label
    labels: tuple[Label, ...]  # labels of all operations inside, most elements first
    location: SourceLocation | None  # line of the user's source of that operation. None if the compiler kept none
    calls: int  # number of runs. It is above 1 inside a loop
    cost: Cost  # cost of one run
    # Bytes of all operands and results, each whole, with repeated operands counted each time. XLA's CPU and generic
    # analyses call this "bytes accessed".
    whole_bytes: int
    operands: tuple[str, ...]  # names of the instructions that it reads
    # Names and shapes of the arrays of its result (``name[0]`` in a tuple). A library's scratch memory is not among
    # them.
    writes: tuple[tuple[str, Shape], ...]
    computation: str  # name of the computation that it calls. Empty if there is none

    @property
    def phase(self) -> Phase:
        """Phase of the operation that does most of the work."""
        return self.label.phase

    @property
    def region(self) -> str:
        """Scopes of the same operation joined by ``/``. Empty if there are none."""
        return self.label.region

    @property
    def description(self) -> str:
        """Kind, and the name that a library or the back end has for the kernel."""
        return f"{self.kind}: {self.target}" if self.target else self.kind

    @property
    def total(self) -> Cost:
        """Cost of all runs in one run of the program."""
        return self.cost.times(self.calls)


def kernels(module: Module) -> list[Kernel]:
    """Return the kernels of a compiled program in the order of execution.

    A fusion is one kernel. The body of a loop is listed once, with its number of iterations.
    """
    return [
        _kernel(module, instruction, types, calls)
        for instruction, types, calls in _executed(module, module.entry, 1)
        # The "-done" half of an asynchronous pair only waits.
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
            phase = "backward"  # the backward pass computes the forward pass again
        if inner and not {"jit", "pjit"} & set(wrappers) and inner not in _NOT_A_SCOPE:
            scopes.append(inner)
    return Label(phase, tuple(scopes))


def join_ops(ops: Mapping[str, int]) -> str:
    """Return operations and their numbers as text: ``{"add": 2, "tanh": 1}`` → ``add×2 tanh``."""
    return " ".join(op if count == 1 else f"{op}×{count}" for op, count in ops.items())


def quote(module: Module, kernel: Kernel) -> str:
    """Return the HLO text of a kernel: the computation that it calls, or its line."""
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
                # The condition runs once more than the body. A loop of unknown length counts as one iteration.
                times = 1 if trips is None else trips + (name == condition)
                yield from _executed(module, name, calls * times)
        else:
            yield instruction, types, calls


def _kernel(module: Module, instruction: Instruction, types: dict[str, Instruction], calls: int) -> Kernel:
    inside = list(module.inside(instruction)) if instruction.opcode == "fusion" else [instruction]
    content = [inner for inner in inside if inner.opcode not in ("parameter", "constant", "fusion")] or [instruction]
    computing = [inner for inner in content if inner.opcode not in _CARRIES_NO_WORK] or content
    main = max(computing, key=lambda inner: (inner.opcode == "dot", bool(inner.op_name), inner.elements))
    weights = _weights(computing) or _weights(_unshared_functions(module, inside))
    if main.opcode == "dot" or not weights:
        label = label_of(main if main.op_name else instruction)
    else:
        label = weights.most_common(1)[0][0]
    target = _TARGET.search(instruction.attributes) or _BACKEND_KIND.search(instruction.attributes)
    ops = Counter(inner.opcode for inner in computing)
    shapes = instruction.shapes[:-1] if scratch(instruction) else instruction.shapes
    return Kernel(
        name=instruction.name,
        kind=_kind(instruction),
        target=target[1] if target else "",
        category=_category(instruction, target[1] if target else "", computing),
        ops=dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
        dots=ops["dot"],
        label=label,
        labels=tuple(label_inside for label_inside, _ in weights.most_common()),
        location=module.location(main) or module.location(instruction),
        calls=calls,
        cost=cost(module, instruction, types),
        whole_bytes=instruction.bytes + sum(types[name].bytes for name in instruction.operands if name in types),
        operands=instruction.operands,
        writes=tuple((member_name(instruction, index), shape) for index, shape in enumerate(shapes)),
        computation=instruction.callees[0] if instruction.opcode == "fusion" and instruction.callees else "",
    )


def _weights(instructions: Iterable[Instruction]) -> Counter[Label]:
    """Return the number of elements by label."""
    weights: Counter[Label] = Counter()
    for instruction in instructions:
        if instruction.op_name:
            weights[label_of(instruction)] += max(instruction.elements, 1)
    return weights


def _unshared_functions(module: Module, inside: Sequence[Instruction]) -> Iterator[Instruction]:
    """Yield what the functions do that nothing else calls: they keep the label that half of a split reduction lost."""
    users = Counter(
        name for body in module.computations.values() for instruction in body for name in instruction.callees
    )
    for name in (name for instruction in inside for name in instruction.callees if users[name] == 1):
        yield from (
            instruction
            for instruction in module.computations.get(name, ())
            if instruction.opcode not in _CARRIES_NO_WORK
        )


def _kind(instruction: Instruction) -> str:
    if instruction.opcode == "fusion":
        kind = _KIND.search(instruction.attributes)
        return f"fusion {kind[1].lower()}" if kind else "fusion"
    if instruction.opcode == "custom-call":
        return "custom call"
    return instruction.opcode


def _category(instruction: Instruction, target: str, computing: list[Instruction]) -> Category:
    # A slice stays a slice when it computes its index, a scalar.
    ops = {inner.opcode for inner in computing if inner.elements > 1} or {inner.opcode for inner in computing}
    if instruction.opcode in COLLECTIVES:
        return "collective"
    if "fmha" in target or "flash" in target:
        return "attention"
    if ops & {"dot", "convolution"} or re.search("gemm|matmul|conv", target):
        return "matmul"
    if instruction.opcode == "custom-call":
        return "library call"
    if ops & {"gather", "scatter"}:
        return "gather/scatter"
    if any(inner.opcode in ("reduce", "reduce-window") for inner in computing):
        return "reduction"
    return "data movement" if ops <= _MOVES_DATA else "element-wise"


def _unwrap(part: str) -> tuple[list[str], str]:
    """Split ``transpose(jvp(block0))`` into (["transpose", "jvp"], "block0")."""
    wrappers = []
    while match := _WRAPPER.match(part):
        wrappers.append(part.split("(", 1)[0])
        part = match[1]
    return wrappers, part
