"""What an instruction costs: floating-point operations, transcendental functions, bytes.

The conventions are those of XLA's ``HloCostAnalysis`` (openxla/xla, ``xla/service/hlo_cost_analysis.cc``): an
element-wise operation is one a result element, a product 2·m·n·k, a reduction one application of its function for each
element that disappears, a sort of n elements n·⌈log₂ n⌉, a Fourier transform 8·n·⌊log₂ length⌋; functions such as exp
are counted apart. Where XLA's totals mislead, this one differs: a library call that is a product counts as one (XLA's
analysis gives custom calls nothing), bytes are those that are touched, and :mod:`jax_baseline.hlo.kernels` counts the
body of a loop as often as it runs (XLA: once). Left out here, and counted by XLA where its optimised text still has
them: Cholesky decompositions and triangular solves, random numbers, the sums of an all-reduce.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jax_baseline.hlo.text import Instruction, Module, Shape

_ELEMENTWISE = frozenset(
    [
        "add",
        "subtract",
        "multiply",
        "divide",
        "maximum",
        "minimum",
        "negate",
        "abs",
        "compare",
        "select",
        "and",
        "or",
        "not",
        "xor",
        "clamp",
        "sign",
        "floor",
        "ceil",
        "round-nearest-even",
        "round-nearest-afz",
        "remainder",
        "shift-left",
        "shift-right-logical",
        "shift-right-arithmetic",
        "convert",
        "popcnt",
        "count-leading-zeros",
        "is-finite",
        "real",
        "imag",
        "complex",
    ]
)
_TRANSCENDENTAL = frozenset(
    [
        "exponential",
        "exponential-minus-one",
        "log",
        "log-plus-one",
        "tanh",
        "tan",
        "sine",
        "cosine",
        "rsqrt",
        "sqrt",
        "cbrt",
        "power",
        "erf",
        "logistic",
        "atan2",
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atanh",
        "cosh",
        "sinh",
    ]
)
_BY_ELEMENT = _ELEMENTWISE | _TRANSCENDENTAL
# Only a part of their first operand is read.
_READS_A_PART = frozenset({"dynamic-slice", "gather", "slice"})
_NESTED = frozenset({"fusion", "async-start"})
_APPLIES = frozenset({"map", "reduce", "reduce-window", "scatter"})


@dataclass(frozen=True)
class Cost:
    """Of one run.

    Attributes:
        flops: floating-point operations.
        transcendentals: exp, tanh, rsqrt, …: one each, not counted in ``flops``.
        bytes_read: operands, each distinct array once; of an array that is only sliced or gathered from, the part.
        bytes_written: results; of a result updated in place, the part.
    """

    flops: int = 0
    transcendentals: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.transcendentals + other.transcendentals,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )

    def times(self, count: int) -> Cost:
        """The cost of running it ``count`` times."""
        return Cost(*(count * part for part in (self.flops, self.transcendentals, self.bytes_read, self.bytes_written)))


def arithmetic(module: Module, instruction: Instruction, types: Mapping[str, Instruction]) -> tuple[int, int]:
    """Return (FLOPs, transcendentals) of one instruction, with everything it calls.

    Args:
        module: it belongs to.
        instruction: which one.
        types: the instructions of its computation by name, for the shapes of its operands.
    """
    opcode, elements = instruction.opcode, instruction.elements
    if opcode == "dot":
        return _product(types[instruction.operands[0]], instruction.dimensions("lhs_contracting_dims"), elements), 0
    if opcode == "convolution":
        return _convolution(types[instruction.operands[1]], instruction), 0
    if opcode == "custom-call":
        return _library_product(instruction, types), 0
    if opcode in _ELEMENTWISE:
        return elements, 0
    if opcode in _TRANSCENDENTAL:
        return 0, elements
    if opcode == "fft":
        return _fourier_transform(instruction, types), 0
    if opcode == "sort":
        count = types[instruction.operands[0]].elements
        return count * max(count - 1, 0).bit_length(), 0
    if opcode == "select-and-scatter":
        return _select_and_scatter(module, instruction, types)
    if opcode in _APPLIES:
        return _applications(module, instruction, types)
    if opcode in _NESTED:
        found = [computation_arithmetic(module, name) for name in instruction.callees]
        return sum(flops for flops, _ in found), sum(functions for _, functions in found)
    return 0, 0


def computation_arithmetic(module: Module, name: str) -> tuple[int, int]:
    """Return (FLOPs, transcendentals) of a computation that is called from within a kernel."""
    body = module.computations.get(name, ())
    types = {instruction.name: instruction for instruction in body}
    found = [arithmetic(module, instruction, types) for instruction in body]
    return sum(flops for flops, _ in found), sum(functions for _, functions in found)


def cost(module: Module, instruction: Instruction, types: Mapping[str, Instruction]) -> Cost:
    """Return what one run of an instruction costs.

    Args:
        module: it belongs to.
        instruction: an instruction that is a kernel.
        types: the instructions of its computation by name.
    """
    flops, functions = arithmetic(module, instruction, types)
    operands = [types[name] for name in dict.fromkeys(instruction.operands) if name in types]
    parts = _parts_read(module, instruction)
    read = sum(min(parts.get(operand.name, operand.bytes), operand.bytes) for operand in operands)
    return Cost(flops, functions, read, _bytes_written(module, instruction, types))


def _product(left: Instruction, contracted: tuple[int, ...], elements: int) -> int:
    return 2 * elements * math.prod(left.shapes[0].dimensions[axis] for axis in contracted)


def _convolution(kernel: Instruction, instruction: Instruction) -> int:
    """2 · outputs · kernel elements per output feature; padding is not taken off."""
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    sizes = kernel.shapes[0].dimensions
    features = sizes[labels[1].index("o")] if labels else 1
    return 2 * instruction.elements * kernel.elements // max(features, 1)


def _library_product(instruction: Instruction, types: Mapping[str, Instruction]) -> int:
    """Of cuBLAS's matrix products and cuDNN's attention; 0 for other calls."""
    target, operands = instruction.attribute("custom_call_target"), [types.get(name) for name in instruction.operands]
    if "gemm" in target or "matmul" in target:
        axes = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        if axes and operands and operands[0]:
            return _product(operands[0], tuple(map(int, re.findall(r"\d+", axes[1]))), instruction.elements)
    if "fmha" in target and operands and operands[0] and operands[1]:
        # q and k are (B, T, H, D) and (B, S, H, D), or (B, H, ·, D): q's elements times S, two products forward and
        # five backward, no discount for the mask.
        query, key = operands[0].shapes[0], operands[1].shapes[0]
        keys = _sequence_length(instruction, key.dimensions)
        return (10 if "Backward" in target else 4) * query.elements * keys
    return 0


def _sequence_length(instruction: Instruction, key: tuple[int, ...]) -> int:
    """S of the keys: from the attention's own configuration, else the second dimension."""
    found = re.search(r'"intermediate_tensor_shape":\{.*?"dimensions":\[([^\]]*)\]', instruction.attributes)
    sizes = [int(size) for size in re.findall(r"\d+", found[1])] if found else []
    return sizes[-1] if sizes else key[1]


def _applications(module: Module, instruction: Instruction, types: Mapping[str, Instruction]) -> tuple[int, int]:
    """Of a map, reduction or scatter: how often its function is applied, times what one application costs."""
    source = types.get(instruction.operands[-1 if instruction.opcode == "scatter" else 0])
    incoming = source.elements if source else instruction.elements
    if instruction.opcode == "map":
        times = instruction.elements
    elif instruction.opcode == "reduce":
        times = incoming - instruction.elements
    elif instruction.opcode == "scatter":
        times = incoming
    else:
        times = instruction.elements * (_window(instruction) - 1)
    once = [computation_arithmetic(module, name) for name in instruction.callees]
    return times * sum(flops for flops, _ in once), times * sum(functions for _, functions in once)


def _select_and_scatter(module: Module, instruction: Instruction, types: Mapping[str, Instruction]) -> tuple[int, int]:
    """Every source element is put where its window has, by that many comparisons less one, the element to select."""
    sources = types[instruction.operands[1]].elements
    total = [0, 0]
    for name, times in (("select", sources * (_window(instruction) - 1)), ("scatter", sources)):
        once = computation_arithmetic(module, instruction.attribute(name).lstrip("%"))
        total = [before + times * part for before, part in zip(total, once, strict=True)]
    return total[0], total[1]


def _window(instruction: Instruction) -> int:
    """Elements of it; 1 where none is printed."""
    size = re.search(r"size=([\dx]+)", instruction.attributes)
    return math.prod(map(int, size[1].split("x"))) if size else 1


def _fourier_transform(instruction: Instruction, types: Mapping[str, Instruction]) -> int:
    """A complex product of four multiplications and additions an element and stage."""
    stages = math.prod(length.bit_length() - 1 for length in instruction.dimensions("fft_length"))
    return 2 * 4 * types[instruction.operands[0]].elements * stages


def _parts_read(module: Module, instruction: Instruction) -> dict[str, int]:
    """Bytes read of those operands of which only a part is."""
    if instruction.opcode in _READS_A_PART:
        return {instruction.operands[0]: instruction.bytes}
    if instruction.opcode == "dynamic-update-slice":
        return {instruction.operands[0]: 0}
    if instruction.opcode != "fusion" or not instruction.callees:
        return {}
    body = module.computations[instruction.callees[0]]
    readers: dict[str, list[Instruction]] = {}
    for inner in body:
        for name in inner.operands:
            readers.setdefault(name, []).append(inner)
    parts: dict[str, int] = {}
    for parameter in (inner for inner in body if inner.opcode == "parameter"):
        found = _part_of_parameter(parameter, readers)
        if found is not None:
            operand = instruction.operands[int(parameter.argument)]
            parts[operand] = parts.get(operand, 0) + found
    return parts


def _part_of_parameter(parameter: Instruction, readers: Mapping[str, list[Instruction]]) -> int | None:
    """Bytes that a fusion reads of a parameter; None if all of it.

    An element-wise operation between the parameter and a slice is made for the elements of the slice alone.
    """
    total, waiting = 0, [parameter.name]
    itemsize = parameter.bytes // max(parameter.elements, 1)
    while waiting:
        name = waiting.pop()
        for reader in readers.get(name, []):
            if reader.opcode in _READS_A_PART and reader.operands[0] == name:
                total += reader.elements * itemsize
            elif not reader.root and (reader.opcode == "bitcast" or reader.opcode in _BY_ELEMENT):
                waiting.append(reader.name)
            elif reader.opcode == "dynamic-update-slice" and reader.operands[0] == name:
                continue  # written in place: nothing of the old is read
            else:
                return None
    return total


def _bytes_written(module: Module, instruction: Instruction, types: Mapping[str, Instruction]) -> int:
    if instruction.opcode == "dynamic-update-slice":
        update = types.get(instruction.operands[1])
        return update.bytes if update else instruction.bytes
    if instruction.opcode == "fusion" and instruction.callees:
        body = {inner.name: inner for inner in module.computations[instruction.callees[0]]}
        root = next((inner for inner in body.values() if inner.root), None)
        results = [body[name] for name in root.operands] if root and root.opcode == "tuple" else [root] if root else []
        return sum(_result_bytes(result, body) for result in results) or instruction.bytes
    unused = scratch(instruction)
    return instruction.bytes - (unused.bytes if unused else 0)


def _result_bytes(result: Instruction, body: Mapping[str, Instruction]) -> int:
    """Of one result of a fusion; a buffer that is updated in place counts with the update."""
    inner = result
    while inner.opcode == "bitcast" and inner.operands and inner.operands[0] in body:
        inner = body[inner.operands[0]]
    if inner.opcode == "dynamic-update-slice":
        return body[inner.operands[1]].bytes
    return result.bytes


def scratch(instruction: Instruction) -> Shape | None:
    """A library call's scratch memory, which it returns as the last member of a tuple of bytes; None if it has none."""
    *_, last = instruction.shapes
    has = instruction.opcode == "custom-call" and len(instruction.shapes) > 1 and last.dtype in ("s8", "u8")
    return last if has else None
