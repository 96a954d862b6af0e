"""The data of a trace: calls, hops and their facts. Plain data that goes to JSON and back."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal

import torch

from benchkit.typed_records import from_plain

SCHEMA_VERSION = 2

# The source of each kind of fact. Every output of a trace has this table.
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
    """``torch.bfloat16`` → ``bf16``; a dtype without a short name keeps its own."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class TensorFact:
    """One tensor at one hop.

    Attributes:
        label: Number of the tensor, ``$2``. The same tensor object has the same label in the whole trace.
        dtype: Short name, ``bf16``.
        shape: Sizes; a symbolic size is text.
        device: ``cpu``, ``cuda:0``.
        keys: Dispatch keys of the tensor, highest priority first.
        strides: Strides in elements; empty if the tensor has none (sparse, nested).
        storage: Label of the storage, ``s0``. Tensors with the same storage share memory. Empty if there is none.
        version: Version counter when the hop began (of a result: when it ended); None for an inference tensor.
        pinned: Whether the tensor is in pinned memory. Only set for the target of a non-blocking copy from a GPU.
        subclass: Name of the type of a tensor subclass; empty for ``torch.Tensor`` and ``torch.nn.Parameter``.
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
    subclass: str = ""

    @property
    def elements(self) -> int | None:
        """Number of elements; None if a size is symbolic."""
        sizes = [size for size in self.shape if isinstance(size, int)]
        return math.prod(sizes) if len(sizes) == len(self.shape) else None

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f"@{self.device}"
        text = f"{self.dtype}[{', '.join(map(str, self.shape))}]{where}"
        return f"{self.label}: {self.subclass}({text})" if self.subclass else f"{self.label}: {text}"


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a hop, or one result.

    Attributes:
        name: Name in the schema; empty for a result without a name.
        text: The value as text: ``$0: f32[3, 4]``, ``alpha=2``.
        tensors: The tensors in the value: none for a number, several for a list.
    """

    name: str
    text: str
    tensors: tuple[TensorFact, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """One device kernel that a call launched, from the profiler.

    Attributes:
        name: Demangled name.
        grid: Number of blocks in each dimension; empty if the profiler does not say.
        block: Number of threads of a block in each dimension; empty if the profiler does not say.
        seconds: Time on the device.
        registers: Registers per thread; None if the profiler does not say.
        shared_memory: Bytes of shared memory per block; None if the profiler does not say.
        stream: CUDA stream; None if the profiler does not say.
        start_ns: Start on the trace's clock; 0 if the clocks could not be aligned.
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
        """The library that the kernel belongs to by its name: ``cuBLAS``, ``cuDNN``, … or empty."""
        return next((library for pattern, library in _LIBRARIES if pattern.search(self.name)), "")


# Patterns of kernel names; the first match counts. From CUDA 12.8 on cuBLAS names its own kernels nvjet_…; it also
# launches CUTLASS, xmma and gemv kernels.
_LIBRARIES = (
    (re.compile(r"flash_(fwd|bwd)|pytorch_flash|flash::"), "FlashAttention"),
    (re.compile(r"fmha_cutlass"), "memory-efficient attention"),
    (re.compile(r"cudnn|xmma_(fprop|dgrad|wgrad)|implicit_convolve"), "cuDNN"),
    (re.compile(r"nvjet_|cublas|gemv\w*_kernel|(?<!tiny)gemm|splitKreduce"), "cuBLAS"),
    (re.compile(r"\bcub::"), "CUB"),
)


@dataclass(frozen=True)
class NativeFrame:
    """One function that ran below a kernel, from single-stepping the kernel.

    Attributes:
        function: Demangled name.
        file: Source file from the library's symbol table, ``BinaryOpsKernel.cpp.AVX512.cpp``; empty if it has none.
        library: File name of the shared library.
        depth: Number of calls between the kernel's entry and this function.
        instructions: Number of instructions between the kernel's entry and the entry of this function.
    """

    function: str
    file: str
    library: str
    depth: int
    instructions: int


@dataclass(frozen=True)
class NativeStep:
    """The result of single-stepping a kernel.

    Attributes:
        frames: The notable functions, in order; see :mod:`dispatcher_trace.capture.native_step`.
        instructions: Number of user-space instructions of the kernel, without operators that it called through a shim.
        cut: Whether the stepping stopped before the kernel ended. ``instructions`` is then a lower bound.
    """

    frames: tuple[NativeFrame, ...]
    instructions: int
    cut: bool


@dataclass(slots=True)
class Hop:
    """One arrival at one kernel: the dispatcher chose ``key`` out of ``keys`` and ran the kernel of that key.

    Attributes:
        number: Order of arrival in the trace, from 1.
        operator: Operator with overload.
        key: The key that the dispatcher chose.
        keys: The key set that the kernel got, highest priority first.
        how: ``call`` if the dispatcher computed the key set from the arguments and the thread state; ``redispatch`` if
            the previous kernel redispatched with the rest of its own key set.
        skipped: Keys above ``key`` in the key set at which this operator falls through.
        included: The thread's include set.
        excluded: The thread's exclude set. A per-backend functionality appears under the name of one backend.
        removed: Keys of the arguments that the exclude set removed from the key set of this call.
        kind: Kind of the kernel in the dispatch table without shims.
        where: File and line of the kernel's registration.
        native: C++ function of a backend kernel, from the wheel's ``native_functions.yaml``; empty if it is not there.
        predicted: The key that the static prediction has at this position; empty if it has none.
        arguments: Arguments of the kernel.
        results: Results of the kernel.
        thread: ``main``, or ``thread 1``, ``autograd worker 2``: numbers of this trace, which are not used again.
        node: The autograd node whose backward made this hop, with its sequence number; empty in a forward.
        made_node: The autograd node that this hop made: the results have it and the arguments do not.
        start_ns: Start in nanoseconds from the start of the trace.
        stop_ns: End on the same clock. The time between includes everything below, and the tracer.
        error: The exception that left the kernel, or empty.
        effects: Effects on tensors, one clause each: which results share memory with arguments, whose version went up.
        native_step: What ran below, if the kernel was single-stepped.
        task: ``task 1``, the asyncio task that made the hop, by a number of this trace; empty outside of any.
        calls: Operator calls that the kernel made, in order.
        why: The reason for this hop, in one sentence that is computed from the other fields.
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
    task: str = ""
    calls: list[Call] = field(default_factory=list)
    why: str = ""

    @property
    def verdict(self) -> str:
        """``as predicted``, or the prediction if it differs."""
        return "as predicted" if self.predicted == self.key else f"predicted {self.predicted or 'no hop'}"

    @property
    def tensors(self) -> tuple[TensorFact, ...]:
        """All tensors of the arguments."""
        return tuple(tensor for argument in self.arguments for tensor in argument.tensors)


@dataclass(slots=True)
class Call:
    """One call of an operator: its hops from the highest key down to the kernel that did not redispatch.

    Attributes:
        operator: Operator with overload.
        hops: The hops, in order.
        missed: Predicted keys that were not seen after the last hop.
        stack: Lines of the user's code that made the call, innermost first: ``step.py:12 in loss``. A nested call has
            the lines of the outermost call.
        forward: In a backward, the number of the forward hop that made the running node; 0 if there is none.
        forward_source: The user's line of that forward hop.
        kernels: Device kernels that this call launched, without those of nested calls.
        alike: Number of later calls in the same place that differed only in tensors, numbers and times, and were
            counted instead of kept.
        called: Name of the function or method that the innermost line of the stack called, such as ``contiguous``;
            the bytecode operation for an operator of Python; empty if it is not known.
        direct: Whether that line called the operator itself, without Python code of torch in between.
    """

    operator: str
    hops: list[Hop]
    missed: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()
    forward: int = 0
    forward_source: str = ""
    kernels: tuple[Kernel, ...] = ()
    alike: int = 0
    called: str = ""
    direct: bool = False

    @property
    def source(self) -> str:
        """The innermost line of the stack, or empty."""
        return self.stack[0] if self.stack else ""

    @property
    def agrees(self) -> bool:
        """Whether the prediction named exactly the keys of the call."""
        return not self.missed and all(hop.predicted == hop.key for hop in self.hops)

    @property
    def path(self) -> tuple[str, ...]:
        """The keys of the hops, in order."""
        return tuple(hop.key for hop in self.hops)

    @property
    def predicted(self) -> tuple[str, ...]:
        """The keys that the prediction named, in order."""
        return (*(hop.predicted for hop in self.hops if hop.predicted), *self.missed)

    @property
    def title(self) -> str:
        """``$2: f32[3, 2] = aten::mm($0: f32[3, 4], $1: f32[4, 2])``."""
        first = self.hops[0]
        results = ", ".join(result.text for result in first.results)
        arguments = ", ".join(argument.text for argument in first.arguments)
        return f"{results + ' = ' if results else ''}{self.operator}({arguments})"

    @property
    def shapes(self) -> str:
        """Dtypes and shapes of the tensor arguments: ``f32[3, 4], f32[4, 2]``."""
        return ", ".join(str(tensor).partition(": ")[2] for tensor in self.hops[0].tensors)

    def main_path(self) -> list[Hop]:
        """The hops that lead to the kernel which computes the result.

        After a composite kernel, an autocast kernel or a functorch transform, the path continues in the last call of
        the same operator that the kernel made, or else in its last call. It ends at the first kernel of another kind.
        """
        last = self.hops[-1]
        composite = last.kind in ("math kernel", "default backend kernel")
        continues = composite or last.key.startswith(("Autocast", "FuncTorch", "Functionalize", "Python"))
        if not continues or not last.calls:
            return self.hops
        again = [call for call in last.calls if call.operator == self.operator]
        return [*self.hops, *(again or last.calls)[-1].main_path()]

    def walk(self) -> Iterator[Call]:
        """Iterate over this call and every call inside it, in order."""
        yield self
        for hop in self.hops:
            for call in hop.calls:
                yield from call.walk()


def calls_to_json(calls: list[Call]) -> list[dict[str, Any]]:
    """Calls as plain JSON."""
    return [_to_plain(call) for call in calls]


def _to_plain(value: Any) -> Any:
    """The same as ``dataclasses.asdict``, without its deep copies."""
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    names = _field_names(value.__class__)
    return {name: _to_plain(getattr(value, name)) for name in names} if names else value


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def calls_from_json(document: list[dict[str, Any]]) -> list[Call]:
    """The inverse of :func:`calls_to_json`."""
    return [from_plain(Call, entry) for entry in document]
