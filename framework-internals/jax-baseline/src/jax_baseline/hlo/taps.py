"""An optimised module rewritten so that it returns every array its kernels leave in memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from jax_baseline.hlo.text import Instruction, parse

_FUSION = re.compile(r" fusion\((.*?)\), kind=k\w+, .*?calls=(%?[\w.\-]+).*$")
_METADATA = re.compile(r', (?:metadata|frontend_attributes)=\{(?:[^"{}]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*\}')
_LAYOUT = re.compile(r"(?<=\])\{([\d,]*)[^}]*\}")
_BITCAST = re.compile(r"^(\s+(?:ROOT )?)%?([\w.\-]+) = (\S+) bitcast\(%?([\w.\-]+)\)")


def return_everything(text: str, names: Collection[str]) -> tuple[str, list[str]]:
    """Make the entry computation return the results of the named instructions.

    Only values are wanted, so the compiler that reads the text may choose everything anew: fusions become plain calls,
    layouts go, and with them the schedule and the donated arguments. A bitcast, which is a statement about memory,
    becomes the transpositions and the reshape that it stands for.

    Args:
        text: of the optimised module, constants written out.
        names: of instructions of the entry computation; those that give tuples or are not there are left out.

    Returns:
        The text, and the names of what it returns, in order.
    """
    module = parse(text)
    entry = module.computations[module.entry]
    wanted = [one for one in entry if one.name in names and not one.shape.startswith("(")]
    lines = [f"HloModule {module.name}"]
    for name, quoted in module.lines.items():
        body = {one.name: one for one in module.computations[name]}
        header, *inner, _ = quoted.splitlines()
        taken = name == module.entry
        if taken:
            header = re.sub(r" -> .* \{$", f" -> ({', '.join(str(one.shapes[0]) for one in wanted)}) {{", header)
            inner = [line.replace("  ROOT ", "  ", 1) for line in inner]
        lines += [_LAYOUT.sub("", header), *(plain for line in inner for plain in _without_layout(line, body))]
        if taken:
            types = ", ".join(str(one.shapes[0]) for one in wanted)
            lines.append(f"  ROOT %everything.taken = ({types}) tuple({', '.join('%' + one.name for one in wanted)})")
        lines.append("}")
    return "\n".join(lines) + "\n", [one.name for one in wanted]


def _without_layout(line: str, body: dict[str, Instruction]) -> Iterator[str]:
    """One line of a computation without what only matters to memory."""
    line = _FUSION.sub(r" call(\1), to_apply=\2", _METADATA.sub("", line))
    if match := _BITCAST.match(line):
        yield from _bitcast(match[1], match[2], match[3], body[match[4]])
    else:
        yield _LAYOUT.sub("", line)


def _bitcast(indent: str, name: str, shape: str, operand: Instruction) -> Iterator[str]:
    """The same memory under another shape: to the order in memory, reshape, back from the new order in memory."""
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


def _in_memory(shape: str) -> tuple[int, ...]:
    """Axes from the slowest to the fastest varying; row-major where no layout is printed."""
    match = _LAYOUT.search(shape)
    if match:
        return tuple(int(axis) for axis in reversed(match[1].split(","))) if match[1] else ()
    sizes = shape[shape.index("[") + 1 : shape.index("]")]
    return tuple(range(len(sizes.split(",")))) if sizes else ()
