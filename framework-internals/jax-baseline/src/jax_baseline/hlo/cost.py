"""Counts the cost of an instruction: floating-point operations and bytes.

The conventions are those of XLA's ``HloCostAnalysis`` (openxla/xla, ``xla/service/hlo_cost_analysis.cc``):

- An element-wise operation costs one operation for each element of the result.
- A matrix product costs 2·m·n·k.
- A convolution costs 2 for each product of a number of its operands; zeros of the padding and of dilation cost nothing.
- A reduction applies its function once for each element that it removes.
- A sort of n elements costs n·⌈log₂ length⌉, and a Fourier transform 8·n·⌊log₂ length⌋; length is that of their axis.
- Transcendental functions such as exp are not counted.

These conventions differ from XLA's. A sort takes the length of its axis (XLA: all elements). A matrix product or a
convolution in a library counts like any other (XLA: nothing). Bytes are those that are touched (XLA: whole arrays).
:mod:`jax_baseline.hlo.kernels` counts the body of a loop once for each iteration (XLA: once) and every branch of a
conditional (XLA: the largest). Cholesky decompositions, triangular solves, random numbers and the sums of an all-reduce
are not counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jax_baseline.hlo.text import Instruction, Module, Shape

_ELEMENTWISE = frozenset({
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "abs", "compare", "select", "and", "or",
    "not", "xor", "clamp", "sign", "floor", "ceil", "round-nearest-even", "round-nearest-afz", "remainder",
    "shift-left", "shift-right-logical", "shift-right-arithmetic", "convert", "popcnt", "count-leading-zeros",
    "is-finite", "real", "imag", "complex",
})  # fmt: skip
_TRANSCENDENTAL = frozenset({
    "exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "tan", "sine", "cosine", "rsqrt", "sqrt",
    "cbrt", "power", "erf", "logistic", "atan2", "acos", "acosh", "asin", "asinh", "atanh", "cosh", "sinh",
})  # fmt: skip
_BY_ELEMENT = _ELEMENTWISE | _TRANSCENDENTAL
# Operations that read only a part of their first operand.
_READS_A_PART = frozenset({"dynamic-slice", "gather", "slice"})
_NESTED = frozenset({"fusion", "async-start"})
_APPLIES = frozenset({"map", "reduce", "reduce-window", "scatter"})


@dataclass(frozen=True)
class Cost:
    """The cost of one run of an instruction."""

    flops: int = 0  # floating-point operations
    # Bytes of the operands, each distinct array once. A sliced or gathered array counts with the part that is read.
    bytes_read: int = 0
    bytes_written: int = 0  # bytes of the results. A result that is updated in place counts with the update

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )

    def times(self, count: int) -> Cost:
        """Return the cost of ``count`` runs."""
        return Cost(count * self.flops, count * self.bytes_read, count * self.bytes_written)


def _flops(module: Module, instruction: Instruction, types: Mapping[str, Instruction]) -> int:
    """Floating-point operations of an instruction and of what it calls; ``types`` are its neighbours by name."""
    opcode, elements = instruction.opcode, instruction.elements
    if opcode == "dot":
        return _dot_flops(types[instruction.operands[0]], instruction.dimensions("lhs_contracting_dims"), elements)
    if opcode == "convolution":
        left, right = (types[name].shapes[0] for name in instruction.operands)
        return _convolution(left, right, instruction.shapes[0], instruction)
    if opcode == "custom-call":
        return _library_flops(instruction, types)
    if opcode in _ELEMENTWISE:
        return elements
    if opcode == "fft":
        # Each element takes a complex product and a complex sum in each stage: 8 operations.
        stages = math.prod(length.bit_length() - 1 for length in instruction.dimensions("fft_length"))
        return 8 * types[instruction.operands[0]].elements * stages
    if opcode == "sort":
        keys = types[instruction.operands[0]]
        (axis,) = instruction.dimensions("dimensions")
        return keys.elements * max(keys.shapes[0].dimensions[axis] - 1, 0).bit_length()
    if opcode == "select-and-scatter":
        return _select_and_scatter(module, instruction, types)
    if opcode in _APPLIES:
        return _applications(module, instruction, types)
    if opcode in _NESTED:
        return sum(_computation_flops(module, name) for name in instruction.callees)
    return 0


def _computation_flops(module: Module, name: str) -> int:
    body = module.computations.get(name, ())
    types = {instruction.name: instruction for instruction in body}
    return sum(_flops(module, instruction, types) for instruction in body)


def cost(module: Module, instruction: Instruction, types: Mapping[str, Instruction]) -> Cost:
    """Return the cost of one run of an instruction."""
    operands = [types[name] for name in dict.fromkeys(instruction.operands) if name in types]
    parts = _parts_read(module, instruction)
    read = sum(min(parts.get(operand.name, operand.bytes), operand.bytes) for operand in operands)
    return Cost(_flops(module, instruction, types), read, _bytes_written(module, instruction, types))


def _dot_flops(left: Instruction, contracted: tuple[int, ...], elements: int) -> int:
    return 2 * elements * math.prod(left.shapes[0].dimensions[axis] for axis in contracted)


def _convolution(left: Shape, kernel: Shape, result: Shape, instruction: Instruction) -> int:
    """Return 2 · outputs per position · input features of the kernel · pairs of an output and a kernel's position."""
    of_left, of_kernel, of_result = re.split("_|->", instruction.attribute("dim_labels"))
    axes = range(len(of_left) - 2)
    places = [
        [shape.dimensions[labels.index(str(axis))] for axis in axes]
        for shape, labels in ((left, of_left), (kernel, of_kernel), (result, of_result))
    ]
    window = dict(re.findall(r"(\w+)=([-\dx_]+)", instruction.attribute("window")))
    stride, spread, gaps = (
        [int(size) for size in window[name].split("x")] if name in window else [1] * len(axes)
        for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    before = [int(pad.split("_")[0]) for pad in window["pad"].split("x")] if "pad" in window else [0] * len(axes)
    pairs = math.prod(map(_pairs, *places, stride, spread, gaps, before))
    return 2 * (result.elements // math.prod(places[2])) * kernel.dimensions[of_kernel.index("i")] * pairs


def _pairs(size: int, width: int, outputs: int, stride: int, spread: int, gaps: int, before: int) -> int:
    """Along one axis, the pairs of an output and a position of the kernel that meet an element of the input.

    ``size`` elements lie ``spread`` apart, after ``before`` zeros; the ``width`` positions lie ``gaps`` apart.
    """
    met = 0
    for position in range(width):
        shift = gaps * position - before  # of the place that output 0 meets
        inside = range(max(0, -(shift // stride)), min(outputs, (spread * (size - 1) - shift) // stride + 1))
        met += sum((stride * output + shift) % spread == 0 for output in inside) if spread > 1 else len(inside)
    return met


def _library_flops(instruction: Instruction, types: Mapping[str, Instruction]) -> int:
    """Return the FLOPs of a matrix product in cuBLAS, a convolution or attention in cuDNN; 0 for other calls."""
    target, operands = instruction.attribute("custom_call_target"), [types.get(name) for name in instruction.operands]
    if target.startswith("__cudnn$conv") and len(operands) > 1 and operands[0] and operands[1]:
        # Window and labels are those of the forward pass, of which a gradient has the result as an operand.
        first, second, result = operands[0].shapes[0], operands[1].shapes[0], instruction.shapes[0]
        if target.endswith("BackwardInput"):
            first, result = result, first
        elif target.endswith("BackwardFilter"):
            second, result = result, second
        return _convolution(first, second, result, instruction)
    if "gemm" in target or "matmul" in target:
        axes = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        if axes and operands and operands[0]:
            return _dot_flops(operands[0], tuple(map(int, re.findall(r"\d+", axes[1]))), instruction.elements)
    if "fmha" in target and operands and operands[0] and operands[1]:
        # q is (B, T, H, D) and k is (B, S, H, D), or both are (B, H, ·, D). A product costs 2·S for each element of q.
        # The forward pass has two products and the backward pass five. The mask saves nothing.
        query, key = operands[0].shapes[0], operands[1].shapes[0]
        keys = _sequence_length(instruction, key.dimensions)
        return (10 if "Backward" in target else 4) * query.elements * keys
    return 0


def _sequence_length(instruction: Instruction, key: tuple[int, ...]) -> int:
    """Return the length S of the keys: from the configuration of the call, or else from their second dimension."""
    match = re.search(r'"intermediate_tensor_shape":\{.*?"dimensions":\[([^\]]*)\]', instruction.attributes)
    sizes = [int(size) for size in re.findall(r"\d+", match[1])] if match else []
    return sizes[-1] if sizes else key[1]


def _applications(module: Module, instruction: Instruction, types: Mapping[str, Instruction]) -> int:
    """Return the cost of a map, reduction or scatter: the number of applications times the cost of its function."""
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
    return times * sum(_computation_flops(module, name) for name in instruction.callees)


def _select_and_scatter(module: Module, instruction: Instruction, types: Mapping[str, Instruction]) -> int:
    """Return, for each source element, (window − 1) comparisons to select one of its window, and one scatter."""
    select, scatter = (
        _computation_flops(module, instruction.attribute(name).lstrip("%")) for name in ("select", "scatter")
    )
    return types[instruction.operands[1]].elements * ((_window(instruction) - 1) * select + scatter)


def _window(instruction: Instruction) -> int:
    """Return the number of elements of the window; 1 if the text has none."""
    size = re.search(r"size=([\dx]+)", instruction.attributes)
    return math.prod(map(int, size[1].split("x"))) if size else 1


def _parts_read(module: Module, instruction: Instruction) -> dict[str, int]:
    """Return the bytes read by operand, for the operands that are read in part."""
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
        read = _part_of_parameter(parameter, readers)
        if read is not None:
            operand = instruction.operands[int(parameter.argument)]
            parts[operand] = parts.get(operand, 0) + read
    return parts


def _part_of_parameter(parameter: Instruction, readers: Mapping[str, list[Instruction]]) -> int | None:
    """Return the bytes of a parameter that a fusion reads, also through other operations; None if it reads all."""
    total, pending = 0, [parameter.name]
    itemsize = parameter.bytes // max(parameter.elements, 1)
    while pending:
        name = pending.pop()
        for reader in readers.get(name, []):
            if reader.opcode in _READS_A_PART and reader.operands[0] == name:
                total += reader.elements * itemsize
            elif not reader.root and (reader.opcode == "bitcast" or reader.opcode in _BY_ELEMENT):
                pending.append(reader.name)
            elif reader.opcode == "dynamic-update-slice" and reader.operands[0] == name:
                continue  # an update in place reads nothing of the old array
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
    """Return the bytes of one result of a fusion. A result that is updated in place counts with the update."""
    inner = result
    while inner.opcode == "bitcast" and inner.operands and inner.operands[0] in body:
        inner = body[inner.operands[0]]
    if inner.opcode == "dynamic-update-slice":
        return body[inner.operands[1]].bytes
    return result.bytes


def scratch(instruction: Instruction) -> Shape | None:
    """Return the scratch memory that a library call returns as the last member of a tuple; None if it has none."""
    *_, last = instruction.shapes
    has = instruction.opcode == "custom-call" and len(instruction.shapes) > 1 and last.dtype in ("s8", "u8")
    return last if has else None
