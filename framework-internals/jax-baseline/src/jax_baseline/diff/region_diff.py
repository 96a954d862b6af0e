"""Compares two compilers' programs region by region: what each fused, wrote to memory, and how long it took."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from benchkit import Quantity
from benchkit.timing.statistics import worst
from jax_baseline.diff.alignment import Matches, Write, assign_parts, match_values
from jax_baseline.diff.programs import KernelLaunch, Program, Scopes, Tensor
from jax_baseline.hlo.summary import region_of

_PHASES = ("forward", "backward", "other")
_CPP_WORK = re.compile(r"for\(|auto tmp\d+ =|\.store\(|_ptr\d+\[.*\] =|tmp_acc\d+\w* = (?!0|at::vec::Vectorized)")

_LaunchesByParts = Mapping[tuple[Scopes, Scopes], list[KernelLaunch]]


@dataclass(frozen=True)
class CompiledRegion:
    """What one compiler made of a region."""

    kernels: int  # number of kernel launches, each iteration of a loop counted
    bytes: int
    seconds: float | None
    flops: int | None
    categories: Mapping[str, int]
    # Number of library calls, and of kernels from a named generator of the back end, by name.
    libraries: Mapping[str, int]


@dataclass(frozen=True)
class WrittenTensors:
    """Tensors of one shape, from one line of the source, that a compiler writes to memory."""

    tensor: str  # dtype and shape: ``float32[16,4,128,128]``
    count: int
    bytes: int
    kernel: str  # name of the first kernel that writes one
    kind: str
    location: str


@dataclass(frozen=True)
class Fusion:
    """Parts of the model that one compiler fuses into one kernel and the other compiler never fuses."""

    parts: tuple[str, ...]  # names of the parts, at least two
    kernels: int  # number of kernels of the region that contain these parts
    kernel: str  # name of the first of these kernels
    ops: Mapping[str, int]
    source: str


@dataclass(frozen=True)
class Quote:
    """Abridged source of a kernel."""

    kernel: str
    kind: str
    language: str  # ``text`` (HLO), ``cpp`` or ``python``
    source: str
    left_out: int = 0  # number of lines that are missing at the end of the text


@dataclass(frozen=True)
class Region:
    """One part of the model in one phase, in both compilers. The mappings have the compilers' names as keys."""

    name: str  # name of the part, ``block*/attention``. Empty for kernels that are not assigned to a part
    phase: str
    compiled: Mapping[str, CompiledRegion]
    # Tensors that the other compiler never writes to memory, most bytes first.
    only: Mapping[str, tuple[WrittenTensors, ...]]
    # Tensors that this compiler writes a second time, in another order or shape.
    copies: Mapping[str, tuple[WrittenTensors, ...]]
    fusions: Mapping[str, tuple[Fusion, ...]]  # fusions that the other compiler does not make
    fused_into: Mapping[str, tuple[str, ...]]  # kernels of other regions that contain operations of this region
    quotes: Mapping[str, Quote]  # source of the kernel that shows the difference best


@dataclass(frozen=True)
class Assigned:
    """How many kernels were assigned to a part of the model by label, by equal values in memory, and not at all."""

    label: Quantity
    value: Quantity
    nothing: Quantity


@dataclass(frozen=True)
class CompilerTotals:
    """The program of one compiler."""

    kernels: Quantity
    bytes: Quantity
    compile_time: Quantity
    only: Quantity  # bytes of the tensors that the other compiler never writes to memory
    copies: Quantity  # bytes of second copies of common tensors
    assigned: Assigned
    time: Quantity | None = None


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The comparison of two programs."""

    common: Quantity  # bytes of the tensors that both compilers write to memory
    compilers: Mapping[str, CompilerTotals]  # the programs by compiler
    regions: tuple[Region, ...]
    notes: Mapping[str, tuple[str, ...]]  # by compiler, what could not be read or interpreted
    # Largest :func:`difference_between` two results. None if the numbers of results differ.
    largest_difference: Quantity | None = None


def compare_programs(one: Program, other: Program) -> Diff:
    """Compare the programs that two compilers made of the same function with the same inputs."""
    matches = match_values(one, other)
    assigned = assign_parts(one, other, matches)
    pairs = {compiler: _launches_by_parts(items) for compiler, items in assigned.items()}
    keys = _region_keys(assigned[one.compiler], assigned[other.compiler])
    difference = _largest_difference(one.values, other.values)
    return Diff(
        common=Quantity(sum(first[1].bytes for first, _ in matches.pairs), "B"),
        compilers={program.compiler: _totals(program, assigned[program.compiler], matches) for program in (one, other)},
        regions=tuple(_region(key, assigned, matches, pairs, (one.compiler, other.compiler)) for key in keys),
        notes={program.compiler: program.notes for program in (one, other)},
        largest_difference=None if difference is None else Quantity(difference, ""),
    )


def _totals(program: Program, assigned: Sequence[KernelLaunch], matches: Matches) -> CompilerTotals:
    launches, ways = program.launches, Counter(item.by for item in assigned)
    return CompilerTotals(
        kernels=Quantity(sum(launch.calls for launch in launches), ""),
        bytes=Quantity(sum(launch.bytes for launch in launches), "B"),
        compile_time=Quantity(program.compile_seconds, "s"),
        only=Quantity(sum(tensor.bytes for _, tensor in matches.only[program.compiler]), "B"),
        copies=Quantity(sum(tensor.bytes for _, tensor in matches.copies[program.compiler]), "B"),
        assigned=Assigned(*(Quantity(ways[way], "") for way in ("label", "value", "nothing"))),
        time=None if program.seconds is None else Quantity(program.seconds, "s"),
    )


def most_different(regions: Iterable[Region], count: int) -> list[Region]:
    """Return the regions with the largest differences in bytes.

    Each name comes once before any name comes twice. Kernels without a region are left out.
    """

    def difference(region: Region) -> int:
        one, other = region.compiled.values()
        return abs(one.bytes - other.bytes)

    named = sorted((region for region in regions if region.name), key=difference, reverse=True)
    best: dict[str, Region] = {}
    for region in named:
        best.setdefault(region.name, region)
    firsts = list(best.values())
    return (firsts + [region for region in named if region not in firsts])[:count]


def _region_keys(*programs: Sequence[KernelLaunch]) -> list[tuple[str, str]]:
    """Return (name, phase) of the regions: the forward pass in its order, then the backward pass, then the rest."""
    seen = dict.fromkeys((region_of(item.part), item.phase) for items in programs for item in items)
    order = list(dict.fromkeys(name for name, _ in seen if name))
    return sorted(seen, key=lambda key: (_PHASES.index(key[1]), order.index(key[0]) if key[0] else len(order)))


def _region(
    key: tuple[str, str],
    assigned: Mapping[str, Sequence[KernelLaunch]],
    matches: Matches,
    pairs: Mapping[str, _LaunchesByParts],
    names: tuple[str, str],
) -> Region:
    members = {name: [item for item in assigned[name] if (region_of(item.part), item.phase) == key] for name in names}
    only = {name: _written(members[name], matches.only[name]) for name in names}
    fusions = {name: _fusions(members[name], pairs[name], pairs[other]) for name, other in (names, names[::-1])}
    return Region(
        *key,
        {name: _compiled_region(members[name]) for name in names},
        only,
        {name: _written(members[name], matches.copies[name]) for name in names},
        fusions,
        {name: _fused_into(key, assigned[name]) for name in names},
        _quotes(members, only, fusions),
    )


def _fused_into(key: tuple[str, str], items: Iterable[KernelLaunch]) -> tuple[str, ...]:
    """Return the kernels of this phase that belong to another region and contain operations of this one."""
    name, phase = key
    return tuple(
        item.name
        for item in items
        if name and item.phase == phase and region_of(item.part) != name and name in map(region_of, item.parts)
    )


def _compiled_region(launches: Sequence[KernelLaunch]) -> CompiledRegion:
    times = [launch.seconds for launch in launches]
    flops = [launch.flops for launch in launches]
    return CompiledRegion(
        sum(launch.calls for launch in launches),
        sum(launch.bytes for launch in launches),
        None if not times or None in times else sum(time for time in times if time is not None),
        None if None in flops else sum(flop for flop in flops if flop is not None),
        dict(Counter(launch.category for launch in launches).most_common()),
        dict(Counter(name for launch in launches if (name := _library(launch))).most_common()),
    )


def _library(launch: KernelLaunch) -> str:
    """Return the library, or the named generator of the back end, that made the kernel. Empty for other kernels."""
    kind = launch.kind
    if kind in ("C++ kernel", "Triton kernel") or kind.startswith(("fusion loop", "fusion input", "fusion output")):
        return ""
    if kind.startswith(("custom call: ", "fusion custom: ")):
        return kind.split(": ", 1)[1]
    return kind if "." in kind else ""


def _written(members: Sequence[KernelLaunch], writes: Iterable[Write]) -> tuple[WrittenTensors, ...]:
    names = {item.name for item in members}
    groups: dict[tuple[str, str], list[Write]] = defaultdict(list)
    for launch, tensor in writes:
        if launch.name in names:
            groups[str(tensor), launch.location].append((launch, tensor))
    written = [
        WrittenTensors(
            text,
            len(group),
            sum(tensor.bytes for _, tensor in group),
            group[0][0].name,
            group[0][0].kind,
            location,
        )
        for (text, location), group in groups.items()
    ]
    return tuple(sorted(written, key=lambda tensors: -tensors.bytes))


def _launches_by_parts(items: Iterable[KernelLaunch]) -> _LaunchesByParts:
    """Return, for every pair of parts, the kernels that contain operations of both."""
    launches: dict[tuple[Scopes, Scopes], list[KernelLaunch]] = defaultdict(list)
    for item in items:
        for one, other in combinations(sorted(item.parts), 2):
            launches[one, other].append(item)
    return launches


def _fusions(members: Sequence[KernelLaunch], mine: _LaunchesByParts, theirs: _LaunchesByParts) -> tuple[Fusion, ...]:
    """Return the fusions of parts in the region's kernels that the other compiler makes nowhere in the same phase."""
    names = {item.name for item in members}
    groups: dict[tuple[Scopes, ...], list[KernelLaunch]] = defaultdict(list)
    for pair, items in mine.items():
        for item in items:
            if item.name in names and not any(other.phase == item.phase for other in theirs.get(pair, [])):
                key = tuple(sorted(item.parts))
                if item not in groups[key]:
                    groups[key].append(item)
    return tuple(
        Fusion(
            tuple("/".join(part) for part in parts),
            len(items),
            items[0].name,
            items[0].ops,
            items[0].source,
        )
        for parts, items in sorted(groups.items(), key=lambda entry: -len(entry[1]))
    )


def _quotes(
    members: Mapping[str, Sequence[KernelLaunch]],
    only: Mapping[str, tuple[WrittenTensors, ...]],
    fusions: Mapping[str, tuple[Fusion, ...]],
) -> dict[str, Quote]:
    """Quote the kernel with the largest difference of the compiler that writes more, and the other's for that part."""
    leader, other = sorted(members, key=lambda name: -sum(tensors.bytes for tensors in only[name]))
    items = {name: {item.name: item for item in assigned} for name, assigned in members.items()}
    by_bytes = sorted(items[leader], key=lambda kernel: -items[leader][kernel].bytes)
    candidates = (
        [shown_by.kernel for shown_by in only[leader]] + [shown_by.kernel for shown_by in fusions[leader]] + by_bytes
    )
    shown = next((items[leader][kernel] for kernel in candidates if kernel in items[leader]), None)
    parts = set(shown.parts) if shown else set()
    partner = max(
        items[other].values(),
        key=lambda item: (
            shown is not None and item.part == shown.part,
            len(parts & set(item.parts)),
            item.name in [fusion.kernel for fusion in fusions[other]],
            item.bytes,
        ),
        default=None,
    )
    return {name: _quote(item) for name, item in ((leader, shown), (other, partner)) if item is not None}


def _quote(launch: KernelLaunch) -> Quote:
    if "C++" in launch.kind:
        language = "cpp"
    elif "Triton" in launch.kind or "." in launch.kind.split(":")[0]:
        language = "python"
    else:
        language = "text"
    return Quote(launch.name, launch.kind, language, _abridged(launch.source, language))


def _abridged(source: str, language: str) -> str:
    """Shorten a source to the lines that show what the kernel computes."""
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
    """Return the largest difference; None if the numbers of results differ."""
    if not one or len(one) != len(other):
        return None
    return worst(difference_between(*pair) for pair in zip(one, other, strict=True))


def difference_between(one: Tensor, other: Tensor) -> float:
    """Return how far apart two results are.

    With sketches this is an estimate of ‖x − y‖ over the larger norm: infinite for different shapes, NaN where they are
    not finite at the same places. Without sketches it is the largest difference between Σx or Σ|x| of the two, over the
    larger Σ|x|.
    """
    if one.sketch and other.sketch:
        if one.shape != other.shape:
            return math.inf
        (square, *sums, places), (other_square, *others, other_places) = one.sketch, other.sketch
        if places != other_places:
            return math.nan
        distance, size = math.dist(sums, others), math.sqrt(max(square, other_square)) or 1.0
        return distance / size if math.isfinite(distance + size) else math.nan
    if one.moments and other.moments:
        scale = max(one.moments[2], other.moments[2]) or 1.0
        return worst(abs(one.moments[index] - other.moments[index]) / scale for index in (1, 2))
    return 0.0
