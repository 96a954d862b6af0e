"""What a walk is made of: calls, their hops, and the facts of each; plain data that goes to JSON and back."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal

import torch

SCHEMA_VERSION = 2

# How each kind of fact was come by; a walk carries this table wherever it goes.
EVIDENCE = {
    "operator, key, key sets, order, arguments, results, thread": "hop shim",
    "views, version counters, storages": "hop shim",
    "kind and place of a kernel": "dispatch table (static)",
    "at::native name": "the wheel's native_functions.yaml (static)",
    "predicted key": "dispatch table and key sets (static)",
    "source line": "Python's stack at the call",
    "device kernels": "profiler",
    "routines below a CPU kernel, instructions": "native step",
}

DTYPE_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` → ``bf16``; a dtype without a short name keeps torch's."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class TensorFact:
    """One tensor at one hop.

    Attributes:
        label: ``$2``: the same tensor object has the same label all through a trace.
        dtype: short name.
        shape: sizes; a symbolic size as text.
        device: ``cpu``, ``cuda:0``.
        keys: the dispatch keys it carried, highest priority first.
        strides: in elements; empty for a tensor without (sparse, nested).
        storage: ``s0``: tensors with the same storage share their memory; empty for a tensor without.
        version: of the version counter when the hop began (for a result: ended); None for an inference tensor.
        pinned: the target of a non-blocking copy from a GPU is pinned memory; of other tensors this is not asked.
    """

    label: str
    dtype: str
    shape: tuple[int | str, ...]
    device: str
    keys: tuple[str, ...]
    strides: tuple[int | str, ...] = ()
    storage: str = ""
    version: int | None = None
    pinned: bool = False

    @property
    def elements(self) -> int | None:
        """How many elements it has; None where a size is symbolic."""
        sizes = [size for size in self.shape if isinstance(size, int)]
        return math.prod(sizes) if len(sizes) == len(self.shape) else None

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f"@{self.device}"
        return f"{self.label}: {self.dtype}[{', '.join(map(str, self.shape))}]{where}"


@dataclass(frozen=True)
class Argument:
    """One argument of a hop, or one result.

    Attributes:
        name: from the schema; empty for a result without a name.
        text: as a reader sees it: ``$0: f32[3, 4]``, ``alpha=2``.
        tensors: the tensors in it: none for a number, several for a list.
    """

    name: str
    text: str
    tensors: tuple[TensorFact, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """One device kernel that ran under a call, from the profiler.

    Attributes:
        name: as the profiler prints it, demangled.
        grid: blocks, where the profiler says.
        block: threads of a block.
        seconds: on the device.
        registers: a thread, where the profiler says.
        shared_memory: bytes a block, where the profiler says.
        stream: of the device, where the profiler says.
        start_ns: on the walk's clock; 0 where the clocks could not be tied.
    """

    name: str
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    seconds: float = 0.0
    registers: int | None = None
    shared_memory: int | None = None
    stream: int | None = None
    start_ns: int = 0

    @property
    def library(self) -> str:
        """The library that the kernel's name belongs to: ``cuBLAS``, ``cuDNN``, … or empty."""
        return next((library for pattern, library in _LIBRARIES if pattern.search(self.name)), "")


# Families of kernel names, the first that fits. cuBLAS names its own nvjet_… from CUDA 12.8 on, and launches CUTLASS,
# xmma and gemv kernels besides.
_LIBRARIES = (
    (re.compile(r"flash_(fwd|bwd)|pytorch_flash|flash::"), "FlashAttention"),
    (re.compile(r"fmha_cutlass"), "memory-efficient attention"),
    (re.compile(r"cudnn|xmma_(fprop|dgrad|wgrad)|implicit_convolve"), "cuDNN"),
    (re.compile(r"nvjet_|cublas|gemv\w*_kernel|(?<!tiny)gemm|splitKreduce"), "cuBLAS"),
    (re.compile(r"\bcub::"), "CUB"),
)


@dataclass(frozen=True)
class NativeFrame:
    """One function that ran below a kernel, from single-stepping it.

    Attributes:
        function: demangled.
        file: the source file that the library's symbol table names, ``BinaryOpsKernel.cpp.AVX512.cpp``; empty without.
        library: the shared library.
        depth: calls between the kernel's entry and this one.
        instructions: executed when it was entered, counted from the kernel's entry.
    """

    function: str
    file: str
    library: str
    depth: int
    instructions: int


@dataclass(frozen=True)
class NativeStep:
    """What single-stepping a kernel saw.

    Attributes:
        frames: the functions worth naming, in order; see :mod:`dispatcher_trace.capture.native_step`.
        instructions: of the whole kernel, user space, without the operators that it called from a shim's Python.
        cut: the kernel was not stepped to its end, and ``instructions`` is a lower bound.
    """

    frames: tuple[NativeFrame, ...]
    instructions: int
    cut: bool


@dataclass
class Hop:
    """One arrival at one kernel: the dispatcher chose ``key`` out of ``keys`` and ran what the table holds there.

    Attributes:
        number: order of arrival in the trace, from 1.
        operator: with overload.
        key: the key that was chosen.
        keys: the key set that the kernel was handed, highest first.
        how: ``call``: the dispatcher computed the key set from arguments and thread state; ``redispatch``: the kernel
            before handed on what was left of its own.
        skipped: keys above ``key`` in the computed set at which this operator falls through.
        included: keys that the thread adds.
        excluded: keys that the thread takes out; a per-backend functionality shows under one backend's name.
        removed: keys that the arguments carry and the thread takes out of this call's set.
        kind: of the kernel, from the table before the shims came.
        where: file and line of its registration.
        native: the C++ function behind a backend key, where the wheel's ``native_functions.yaml`` says; else empty.
        predicted: the key that the static prediction names for this position; empty where it names none.
        arguments: what came in.
        results: what went out.
        thread: ``main`` or the name of another thread.
        node: the autograd node whose backward made this hop, with its sequence number; empty in forward.
        made_node: the autograd node that the results carry and the arguments did not.
        start_ns: on a monotonic clock, from the start of the trace.
        stop_ns: likewise; the time in between holds everything below, and the tracer.
        error: the exception that left the kernel, or empty.
        effects: what the kernel did to tensors, a clause each: who made a view of whom, whose version went up.
        native_step: what ran below, where the kernel was single-stepped.
        calls: what the kernel called, in order.
        why: one sentence computed from the above.
    """

    number: int
    operator: str
    key: str
    keys: tuple[str, ...]
    how: Literal["call", "redispatch"]
    skipped: tuple[str, ...]
    included: tuple[str, ...]
    excluded: tuple[str, ...]
    removed: tuple[str, ...]
    kind: str
    where: str
    native: str
    predicted: str
    arguments: tuple[Argument, ...]
    results: tuple[Argument, ...]
    thread: str
    node: str
    made_node: str
    start_ns: int
    stop_ns: int
    error: str
    effects: tuple[str, ...] = ()
    native_step: NativeStep | None = None
    calls: list[Call] = field(default_factory=list)
    why: str = ""

    @property
    def verdict(self) -> str:
        """``as predicted``, or what was predicted instead."""
        return "as predicted" if self.predicted == self.key else f"predicted {self.predicted or 'no hop'}"

    @property
    def tensors(self) -> tuple[TensorFact, ...]:
        """All tensors that came in."""
        return tuple(tensor for argument in self.arguments for tensor in argument.tensors)


@dataclass
class Call:
    """One call of an operator: its hops from the highest key down to the kernel that did not hand on.

    Attributes:
        operator: with overload.
        hops: in order.
        missed: keys that the prediction names after the last hop that was seen.
        stack: the lines of the user's own code that the call came from, innermost first: ``step.py:12 in loss``; calls
            inside others have those of the outermost.
        forward: in a backward, the number of the forward hop that made the node which is running; 0 for none.
        forward_source: the user's line of that forward hop.
        kernels: device kernels launched under this call and not under a call inside it.
    """

    operator: str
    hops: list[Hop]
    missed: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()
    forward: int = 0
    forward_source: str = ""
    kernels: tuple[Kernel, ...] = ()

    @property
    def source(self) -> str:
        """The innermost line of the stack, or empty."""
        return self.stack[0] if self.stack else ""

    @property
    def agrees(self) -> bool:
        """Whether the prediction named every key of the call and no other."""
        return not self.missed and all(hop.predicted == hop.key for hop in self.hops)

    @property
    def path(self) -> tuple[str, ...]:
        """The keys of the hops."""
        return tuple(hop.key for hop in self.hops)

    @property
    def title(self) -> str:
        """``$2: f32[3, 2] = aten::mm($0: f32[3, 4], $1: f32[4, 2])``."""
        first = self.hops[0]
        results = ", ".join(result.text for result in first.results)
        arguments = ", ".join(argument.text for argument in first.arguments)
        return f"{results + ' = ' if results else ''}{self.operator}({arguments})"

    def main_path(self) -> list[Hop]:
        """The hops that lead to the kernel which computes the result.

        From a composite, a caster or a transform the way goes on into the last operator that it called; it ends at the
        first kernel that is none of these.
        """
        last = self.hops[-1]
        composite = last.kind in ("math kernel", "default backend kernel")
        onward = composite or last.key.startswith(("Autocast", "FuncTorch", "Functionalize", "Python"))
        return [*self.hops, *(last.calls[-1].main_path() if onward and last.calls else ())]

    def walk(self) -> Iterator[Call]:
        """This call and every call inside it, in order."""
        yield self
        for hop in self.hops:
            for call in hop.calls:
                yield from call.walk()


def calls_to_json(calls: list[Call]) -> list[dict[str, Any]]:
    """Calls as plain JSON."""
    return [_to_plain(call) for call in calls]


def _to_plain(value: Any) -> Any:
    """As ``dataclasses.asdict`` has it, without its copies of what cannot change."""
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    names = _field_names(value.__class__)
    return {name: _to_plain(getattr(value, name)) for name in names} if names else value


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def calls_from_json(document: list[dict[str, Any]]) -> list[Call]:
    """The inverse of :func:`calls_to_json`."""
    return [_call(entry) for entry in document]


def _call(entry: dict[str, Any]) -> Call:
    kernels = tuple(Kernel(**_tuples(kernel, "grid", "block")) for kernel in entry["kernels"])
    hops = [_hop(hop) for hop in entry["hops"]]
    return Call(**{**_tuples(entry, "missed", "stack"), "hops": hops, "kernels": kernels})


def _hop(entry: dict[str, Any]) -> Hop:
    values = {name: tuple(_argument(value) for value in entry[name]) for name in ("arguments", "results")}
    sets = _tuples(entry, "keys", "skipped", "included", "excluded", "removed", "effects")
    step = entry["native_step"]
    if step is not None:
        step = NativeStep(**{**step, "frames": tuple(NativeFrame(**frame) for frame in step["frames"])})
    return Hop(**{**sets, **values, "native_step": step, "calls": calls_from_json(entry["calls"])})


def _argument(entry: dict[str, Any]) -> Argument:
    tensors = tuple(TensorFact(**_tuples(tensor, "shape", "keys", "strides")) for tensor in entry["tensors"])
    return Argument(entry["name"], entry["text"], tensors)


def _tuples(entry: dict[str, Any], *names: str) -> dict[str, Any]:
    """The entry with these lists as tuples."""
    return {**entry, **{name: tuple(entry[name]) for name in names}}
