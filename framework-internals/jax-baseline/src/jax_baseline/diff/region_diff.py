"""Two compilers' programs side by side: region by region, what each fused, moved and took."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from jax_baseline.diff.alignment import Aligned, Matches, align, count_by, match_values, region_of
from jax_baseline.diff.programs import Program, Scopes, Step, Tensor

_PHASES = ("forward", "backward", "other")
_CPP_WORK = re.compile(r"for\(|auto tmp\d+ =|\.store\(|_ptr\d+\[.*\] =|tmp_acc\d+\w* = (?!0|at::vec::Vectorized)")


@dataclass(frozen=True)
class Side:
    """What one compiler made of a region.

    Attributes:
        kernels: that run, loops counted.
        bytes: they read and write.
        seconds: they take; None if not measured.
        flops: they do; None if not counted.
        categories: kernels by category.
        libraries: calls of libraries and of kernels a back end has by name, by that name.
    """

    kernels: int
    bytes: int
    seconds: float | None
    flops: int | None
    categories: Mapping[str, int]
    libraries: Mapping[str, int]


@dataclass(frozen=True)
class Written:
    """Tensors of one shape, from one line of the source, that a compiler leaves in memory.

    Attributes:
        tensor: ``float32[16,4,128,128]``.
        count: how many.
        bytes: all of them.
        kernel: the first that writes one.
        kind: of that kernel.
        place: line of the source behind it.
    """

    tensor: str
    count: int
    bytes: int
    kernel: str
    kind: str
    place: str


@dataclass(frozen=True)
class Fusion:
    """Parts of the model that one compiler puts into one kernel and the other never does.

    Attributes:
        parts: the two, or more.
        kernels: how many kernels of the region hold them together.
        kernel: the first of those.
        ops: inside it.
        source: its text.
    """

    parts: tuple[str, ...]
    kernels: int
    kernel: str
    ops: Mapping[str, int]
    source: str


@dataclass(frozen=True)
class Quote:
    """A kernel shown as what it is, abridged.

    Attributes:
        kernel: its name.
        kind: what it is.
        language: ``text`` (HLO), ``cpp`` or ``python``.
        source: its text.
    """

    kernel: str
    kind: str
    language: str
    source: str


@dataclass(frozen=True)
class Region:
    """One part of the model in one phase, in both compilers. The mappings have the compilers' names as keys.

    Attributes:
        name: ``block*/attention``; empty for what could not be placed.
        phase: forward, backward or other.
        sides: what each made of it.
        only: tensors that only this one leaves in memory, most bytes first.
        again: tensors that this one leaves in memory a second time, in another order or shape.
        fusions: that only this one makes.
        hosts: kernels of other regions that hold operations of this one.
        quotes: of the kernel of each that tells most.
    """

    name: str
    phase: str
    sides: Mapping[str, Side]
    only: Mapping[str, tuple[Written, ...]]
    again: Mapping[str, tuple[Written, ...]]
    fusions: Mapping[str, tuple[Fusion, ...]]
    hosts: Mapping[str, tuple[str, ...]]
    quotes: Mapping[str, Quote]

    def as_plain(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class Diff:
    """Two programs side by side.

    Attributes:
        regions: in the order of the model.
        placed: per compiler, how many steps were placed by label, by value, by nothing.
        same: bytes of the tensors that both leave in memory.
        repeated: per compiler, bytes of copies of those.
        only: per compiler, bytes of tensors that only it leaves in memory.
        largest_difference: between what the two functions returned, relative, see :func:`_between`; infinite between
            other shapes; None where the numbers of results differ.
    """

    regions: tuple[Region, ...]
    placed: Mapping[str, Mapping[str, int]]
    same: int
    repeated: Mapping[str, int]
    only: Mapping[str, int]
    largest_difference: float | None


def compare_programs(one: Program, other: Program) -> Diff:
    """Put two programs side by side.

    Args:
        one: of one compiler.
        other: of the other; the same function of the same inputs.
    """
    matches = match_values(one, other)
    aligned = align(one, other, matches)
    pairs = {compiler: _fused_pairs(steps) for compiler, steps in aligned.items()}
    names = (one.compiler, other.compiler)
    regions = tuple(
        _region(key, aligned, matches, pairs, names)
        for key in _region_keys(aligned[one.compiler], aligned[other.compiler])
    )
    return Diff(
        regions,
        {compiler: dict(count_by(steps)) for compiler, steps in aligned.items()},
        sum(pair[0][1].bytes for pair in matches.pairs),
        {name: sum(tensor.bytes for _, tensor in matches.repeated[name]) for name in names},
        {name: sum(tensor.bytes for _, tensor in matches.only[name]) for name in names},
        _largest_difference(one.values, other.values),
    )


def instructive(regions: Iterable[Region], count: int = 3) -> list[Region]:
    """The regions whose bytes differ most, at most one of a name first, and none that could not be placed."""
    placed = sorted((region for region in regions if region.name), key=_difference, reverse=True)
    best: dict[str, Region] = {}
    for region in placed:
        best.setdefault(region.name, region)
    firsts = list(best.values())
    return (firsts + [region for region in placed if region not in firsts])[:count]


def _difference(region: Region) -> int:
    one, other = region.sides.values()
    return abs(one.bytes - other.bytes)


def _region_keys(*programs: Sequence[Aligned]) -> list[tuple[str, str]]:
    """(name, phase) in the order in which forward regions first appear, then backward, then the rest."""
    seen = dict.fromkeys((region_of(item.part), item.phase) for steps in programs for item in steps)
    order = list(dict.fromkeys(name for name, _ in seen if name))
    return sorted(seen, key=lambda key: (_PHASES.index(key[1]), order.index(key[0]) if key[0] else len(order)))


def _region(
    key: tuple[str, str],
    aligned: Mapping[str, Sequence[Aligned]],
    matches: Matches,
    pairs: Mapping[str, Mapping[tuple[Scopes, Scopes], list[Aligned]]],
    names: tuple[str, str],
) -> Region:
    members = {name: [item for item in aligned[name] if (region_of(item.part), item.phase) == key] for name in names}
    only = {name: _written(members[name], matches.only[name]) for name in names}
    fusions = {name: _fusions(members[name], pairs[name], pairs[other]) for name, other in (names, names[::-1])}
    sides = {name: _side(members[name]) for name in names}
    hosts = {name: _hosts(key, aligned[name]) for name in names}
    again = {name: _written(members[name], matches.repeated[name]) for name in names}
    return Region(*key, sides, only, again, fusions, hosts, _quotes(members, only, fusions))


def _hosts(key: tuple[str, str], steps: Iterable[Aligned]) -> tuple[str, ...]:
    """Kernels of the phase that belong to another region but hold operations of this one."""
    name, phase = key
    return tuple(
        item.step.name
        for item in steps
        if name and item.phase == phase and region_of(item.part) != name and name in map(region_of, item.parts)
    )


def _side(items: Sequence[Aligned]) -> Side:
    steps = [item.step for item in items]
    times = [step.seconds for step in steps]
    flops = [step.flops for step in steps]
    return Side(
        sum(step.calls for step in steps),
        sum(step.bytes for step in steps),
        None if not times or None in times else sum(time for time in times if time is not None),
        None if None in flops else sum(flop for flop in flops if flop is not None),
        dict(Counter(step.category for step in steps).most_common()),
        dict(Counter(name for step in steps if (name := _library(step))).most_common()),
    )


def _library(step: Step) -> str:
    """The name under which a library, or a back end's own generator of products, made the kernel; empty for others."""
    kind = step.kind
    if kind in ("C++ kernel", "Triton kernel") or kind.startswith(("fusion loop", "fusion input", "fusion output")):
        return ""
    if kind.startswith(("custom call: ", "fusion custom: ")):
        return kind.split(": ", 1)[1]
    return kind if "." in kind else ""


def _written(members: Sequence[Aligned], tensors: Iterable[tuple[Step, Tensor]]) -> tuple[Written, ...]:
    steps = {item.step.name for item in members}
    groups: dict[tuple[str, str], list[tuple[Step, Tensor]]] = defaultdict(list)
    for step, tensor in tensors:
        if step.name in steps:
            groups[str(tensor), step.place].append((step, tensor))
    found = [
        Written(
            text,
            len(group),
            sum(tensor.bytes for _, tensor in group),
            group[0][0].name,
            group[0][0].kind,
            place,
        )
        for (text, place), group in groups.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.bytes))


def _fused_pairs(steps: Iterable[Aligned]) -> dict[tuple[Scopes, Scopes], list[Aligned]]:
    """The kernels that hold operations of two parts, by the two."""
    found: dict[tuple[Scopes, Scopes], list[Aligned]] = defaultdict(list)
    for item in steps:
        for one, other in combinations(sorted(item.parts), 2):
            found[one, other].append(item)
    return found


def _fusions(
    members: Sequence[Aligned],
    mine: Mapping[tuple[Scopes, Scopes], list[Aligned]],
    theirs: Mapping[tuple[Scopes, Scopes], list[Aligned]],
) -> tuple[Fusion, ...]:
    """Fusions across parts with a kernel in the region, that the other compiler makes nowhere in the same phase."""
    names = {item.step.name for item in members}
    groups: dict[tuple[Scopes, ...], list[Aligned]] = defaultdict(list)
    for pair, items in mine.items():
        for item in items:
            if item.step.name in names and not any(other.phase == item.phase for other in theirs.get(pair, [])):
                key = tuple(sorted(item.parts))
                if item not in groups[key]:
                    groups[key].append(item)
    return tuple(
        Fusion(
            tuple("/".join(part) for part in parts),
            len(items),
            items[0].step.name,
            items[0].step.ops,
            items[0].step.source,
        )
        for parts, items in sorted(groups.items(), key=lambda entry: -len(entry[1]))
    )


def _quotes(
    members: Mapping[str, Sequence[Aligned]],
    only: Mapping[str, tuple[Written, ...]],
    fusions: Mapping[str, tuple[Fusion, ...]],
) -> dict[str, Quote]:
    """Of the side that writes more the kernel that tells most, and of the other the one that serves the same part."""
    leader, other = sorted(members, key=lambda name: -sum(one.bytes for one in only[name]))
    steps = {name: {item.step.name: item for item in items} for name, items in members.items()}
    largest = {name: sorted(found, key=lambda kernel: -found[kernel].step.bytes) for name, found in steps.items()}
    quotes = {}
    telling = [one.kernel for one in only[leader]] + [one.kernel for one in fusions[leader]] + largest[leader]
    shown = next((steps[leader][kernel] for kernel in telling if kernel in steps[leader]), None)
    if shown is not None:
        quotes[leader] = _quote(shown.step)
    parts = set(shown.parts) if shown else set()
    best = max(
        steps[other].values(),
        key=lambda item: (
            shown is not None and item.part == shown.part,
            len(parts & set(item.parts)),
            item.step.name in [one.kernel for one in fusions[other]],
            item.step.bytes,
        ),
        default=None,
    )
    if best is not None:
        quotes[other] = _quote(best.step)
    return quotes


def _quote(step: Step) -> Quote:
    if "C++" in step.kind:
        language = "cpp"
    elif "Triton" in step.kind or "." in step.kind.split(":")[0]:
        language = "python"
    else:
        language = "text"
    return Quote(step.name, step.kind, language, _abridged(step.source, language))


def _abridged(source: str, language: str) -> str:
    """A source without what a reader of the kernel does not need; what remains is as the compiler wrote it.

    HLO: metadata and back-end configuration go. C++: lines that compute or open a loop remain, the scalar tail of a
    vectorised loop does not. Triton: the decorators' tables of hints go.
    """
    if language == "cpp":
        return _abridged_cpp(source)
    if language == "python" and (start := source.find("@triton.jit")) >= 0:
        return source[start:]
    source = re.sub(r', metadata=\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\}', "", source)
    return re.sub(r", backend_config=\{.*$", "", source, flags=re.MULTILINE)


def _abridged_cpp(source: str) -> str:
    kept, tail = list[str](), False
    for line in source.splitlines():
        if "for(" in line:
            tail = False
        tail = tail or ("C10_UNLIKELY" in line)
        if not tail and _CPP_WORK.search(line):
            line = re.sub(r"static_cast<int64_t>\((\d+)L\)", r"\1", line)
            kept.append(line.replace("at::vec::Vectorized", "Vectorized").replace("static_cast<int64_t>", ""))
    depths = sorted({len(line) - len(line.lstrip()) for line in kept})
    return "\n".join("  " * depths.index(len(line) - len(line.lstrip())) + line.lstrip() for line in kept)


def _largest_difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float | None:
    """The largest over the results; None where there are more on one side; NaN where a result is not finite."""
    if not one or len(one) != len(other):
        return None
    differences = [difference_between(*pair) for pair in zip(one, other, strict=True)]
    return float(np.max(differences))  # unlike max, it keeps a NaN


def difference_between(one: Tensor, other: Tensor) -> float:
    """‖x − y‖ over the larger norm by the sketches; without them between moments, over the larger sum of magnitudes."""
    if one.sketch and other.sketch:
        if one.shape != other.shape:
            return math.inf
        (square, *sums), (other_square, *others) = one.sketch, other.sketch
        distance = math.sqrt(sum((a - b) ** 2 for a, b in zip(sums, others, strict=True)))
        return distance / (math.sqrt(max(square, other_square)) or 1.0) if math.isfinite(distance) else math.nan
    if one.moments and other.moments:
        scale = max(one.moments[2], other.moments[2]) or 1.0
        return float(np.max([abs(one.moments[index] - other.moments[index]) / scale for index in (1, 2)]))
    return 0.0
