"""Rewrites an optimised module to return its intermediates: the arrays that its kernels write to memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from jax_baseline.hlo.text import Instruction, Shape, member_name, parse

_FUSION = re.compile(r" fusion\((.*?)\), kind=k\w+, .*?calls=(%?[\w.\-]+).*$")
_METADATA = re.compile(r', (?:metadata|frontend_attributes)=\{(?:[^"{}]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*\}')
_LAYOUT = re.compile(r"(?<=\])\{([\d,]*)[^}]*\}")
_CUSTOM_CALL = re.compile(r"^(\s+(?:ROOT )?)%?([\w.\-]+) = .* custom-call\(")
_BITCAST = re.compile(r"^(\s+(?:ROOT )?)%?([\w.\-]+) = (\S+) bitcast\(%?([\w.\-]+)\)")


def expose_intermediates(text: str, names: Collection[str]) -> tuple[str, list[str]]:
    """Make the entry computation return the results of the named instructions.

    Only the values matter, so the new text leaves all choices to the compiler. Fusions become calls, matrix products of
    cuBLAS become dots, and layouts, schedule and donations are removed. A bitcast depends on layouts, so it becomes the
    equivalent transposes and reshape. Names outside the entry computation are ignored. Returns the new text, and the
    names of its results in order; a member of a tuple is ``name[0]``.

    Raises:
        ValueError: If the module calls a library for anything but a plain matrix product.
    """
    module = parse(text)
    taken = [instruction for instruction in module.computations[module.entry] if instruction.name in names]
    members = [(instruction, index) for instruction in taken for index in range(len(instruction.shapes))]
    types = ", ".join(str(instruction.shapes[index]) for instruction, index in members)
    lines = [f"HloModule {module.name}"]
    for name, quoted in module.lines.items():
        body = {instruction.name: instruction for instruction in module.computations[name]}
        header, *inner, _ = quoted.splitlines()
        if name == module.entry:
            header = re.sub(r" -> .* \{$", f" -> ({types}) {{", header)
            inner = [line.replace("  ROOT ", "  ", 1) for line in inner]
        lines += [_LAYOUT.sub("", header), *(plain for line in inner for plain in _without_layout(line, body))]
        if name == module.entry:
            lines += _results(members, types)
        lines.append("}")
    return "\n".join(lines) + "\n", [member_name(instruction, index) for instruction, index in members]


def _results(members: list[tuple[Instruction, int]], types: str) -> Iterator[str]:
    operands = []
    for instruction, index in members:
        operand = instruction.name
        if instruction.shape.startswith("("):
            operand = f"{instruction.name}.member.{index}"
            yield f"  %{operand} = {instruction.shapes[index]} get-tuple-element(%{instruction.name}), index={index}"
        operands.append(f"%{operand}")
    yield f"  ROOT %exposed.intermediates = ({types}) tuple({', '.join(operands)})"


def _without_layout(line: str, body: dict[str, Instruction]) -> Iterator[str]:
    """Yield a line of a computation without layouts, as one line or several."""
    line = _FUSION.sub(r" call(\1), to_apply=\2", _METADATA.sub("", line))
    if match := _BITCAST.match(line):
        yield from _bitcast(match[1], match[2], match[3], body[match[4]])
    elif match := _CUSTOM_CALL.match(line):
        yield from _matmul(match[1], body[match[2]])
    else:
        yield _LAYOUT.sub("", line)


def _bitcast(indent: str, name: str, shape: str, operand: Instruction) -> Iterator[str]:
    """Replace a bitcast: transpose to the order in memory, reshape, transpose back from the new order in memory."""
    source, target = _in_memory(operand.shape), _in_memory(shape)
    dtype = operand.shapes[0].dtype
    sizes = dict(enumerate(operand.shapes[0].dimensions))
    result = [int(size) for size in re.findall(r"\d+", shape[shape.index("[") : shape.index("]")])]
    axes = ",".join(map(str, source))
    memory = ",".join(str(sizes[axis]) for axis in source)
    reshaped = ",".join(str(result[axis]) for axis in target)
    back = ",".join(str(target.index(axis)) for axis in range(len(target)))
    yield f"  %{name}.memory = {dtype}[{memory}] transpose(%{operand.name}), dimensions={{{axes}}}"
    yield f"  %{name}.reshaped = {dtype}[{reshaped}] reshape(%{name}.memory)"
    yield f"{indent}%{name} = {_LAYOUT.sub('', shape)} transpose(%{name}.reshaped), dimensions={{{back}}}"


def _matmul(indent: str, call: Instruction) -> Iterator[str]:
    """Replace a matrix product of cuBLAS, α·a·b + β·c. The call also returns its scratch memory."""
    target, config = call.attribute("custom_call_target"), call.attributes
    scales = {key: re.search(rf'"{key}":(-?[\d.eE+-]+)', config) for key in ("alpha_real", "beta")}
    if not re.search("gemm|matmul", target) or '"epilogue":"DEFAULT"' not in config or not all(scales.values()):
        raise ValueError(f"the kernel {call.name} calls the library function {target}, which the text does not define")
    alpha, beta = (float(match[1]) for match in scales.values() if match)
    axes = {
        key: ",".join(re.findall(r"\d+", match[1]))
        for key in ("lhs_batch", "lhs_contracting", "rhs_batch", "rhs_contracting")
        if (match := re.search(rf'"{key}_dimensions":\[([^\]]*)\]', config))
    }
    shape, *scratch = call.shapes
    a, b, *c = call.operands
    numbers = ", ".join(f"{key}_dims={{{value}}}" for key, value in axes.items())
    value = f"{call.name}.product"
    yield f"  %{value} = {shape} dot(%{a}, %{b}), {numbers}"
    if alpha != 1:
        yield from _scaled(value, alpha, shape)
        value += ".scaled"
    if c and beta:
        yield f"  %{call.name}.c = {shape} copy(%{c[0]})"
        yield from _scaled(f"{call.name}.c", beta, shape)
        yield f"  %{call.name}.sum = {shape} add(%{value}, %{call.name}.c.scaled)"
        value = f"{call.name}.sum"
    if not scratch:
        yield f"{indent}%{call.name} = {shape} copy(%{value})"
        return
    yield f"  %{call.name}.zero = {scratch[0].dtype}[] constant(0)"
    yield f"  %{call.name}.scratch = {scratch[0]} broadcast(%{call.name}.zero), dimensions={{}}"
    yield f"{indent}%{call.name} = ({shape}, {scratch[0]}) tuple(%{value}, %{call.name}.scratch)"


def _scaled(name: str, factor: float, shape: Shape) -> Iterator[str]:
    """Define ``name.scaled`` as ``name`` times a factor."""
    yield f"  %{name}.factor = {shape.dtype}[] constant({factor!r})"
    yield f"  %{name}.factors = {shape} broadcast(%{name}.factor), dimensions={{}}"
    yield f"  %{name}.scaled = {shape} multiply(%{name}, %{name}.factors)"


def _in_memory(shape: str) -> tuple[int, ...]:
    """Return the axes from the slowest to the fastest varying. Without a layout they are row-major."""
    match = _LAYOUT.search(shape)
    if match:
        return tuple(int(axis) for axis in reversed(match[1].split(","))) if match[1] else ()
    sizes = shape[shape.index("[") + 1 : shape.index("]")]
    return tuple(range(len(sizes.split(",")))) if sizes else ()
