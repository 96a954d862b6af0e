"""Which part of one compiler's program is which part of the other's: by labels, and by values where labels fail.

Labels: ``jax.named_scope`` on one side, ``torch.fx.traceback.annotate`` on the other. A compiler may drop the label of
a kernel, or never have had it; then the tensors that it leaves in memory tell: a tensor of the same values is the same
tensor, whatever its shape, order and name.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax_baseline.diff.programs import Program, Scopes, Step, Tensor, star_blocks

# How far sums over the same tensor, computed by two compilers, may be apart, relative to the sum of magnitudes: a
# thousand times the rounding of one operation, for the many behind a tensor, and far below the difference of any two
# different tensors of a model with random weights.
_TOLERANCE = {"float64": 1e-10, "float32": 2e-4, "float16": 2e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Matches:
    """Tensors of two programs that hold the same values.

    Attributes:
        pairs: (step, tensor) of one with (step, tensor) of the other; each tensor is in one pair at most.
        repeated: per compiler, tensors that are equal to one already in a pair: copies, other orders in memory.
        only: per compiler, tensors that the other never leaves in memory.
    """

    pairs: tuple[tuple[tuple[Step, Tensor], tuple[Step, Tensor]], ...]
    repeated: Mapping[str, tuple[tuple[Step, Tensor], ...]]
    only: Mapping[str, tuple[tuple[Step, Tensor], ...]]


@dataclass(frozen=True)
class Aligned:
    """A step with the part of the model it belongs to.

    Attributes:
        step: the kernel.
        part: the label that both sides know, blocks taken together; empty if nothing tells.
        parts: of all operations inside.
        phase: forward, backward or other.
        by: ``label``, ``value``, or empty.
    """

    step: Step
    part: Scopes
    parts: tuple[Scopes, ...]
    phase: str
    by: str


def same_values(one: Tensor, other: Tensor) -> bool:
    """Compare moments: number, Σx, Σ|x|, Σx², Σx³, largest and smallest, none of which a permutation changes.

    Tensors without moments, and tensors of one repeated value (zeros, ones, masks), are equal to nothing.
    """
    if one.moments is None or other.moments is None or one.moments[0] != other.moments[0]:
        return False
    if one.moments[5] == one.moments[6] or one.moments[0] < 2:
        return False
    tolerance = max(_TOLERANCE.get(tensor.dtype, 0.0) for tensor in (one, other))
    count, _, magnitude, square, *_ = one.moments
    root_mean_square = math.sqrt(square / count) + 1e-300
    largest = max(abs(one.moments[5]), abs(one.moments[6]), root_mean_square)
    # Sums against the sum of magnitudes of what is added; the extremes against the largest element.
    scales = (magnitude, magnitude, square, magnitude * largest**2, largest, largest)
    return all(
        abs(a - b) <= tolerance * scale + 1e-300
        for a, b, scale in zip(one.moments[1:], other.moments[1:], scales, strict=True)
    )


def match_values(one: Program, other: Program) -> Matches:
    """Pair the tensors of two programs by their values, large ones first, in the order of the programs.

    Where the values of one were not taken nothing is known: no pairs, and nothing that only one has.
    """
    if not (one.has_values and other.has_values):
        nothing = {one.compiler: (), other.compiler: ()}
        return Matches((), nothing, nothing)
    left = sorted(_tensors(one), key=lambda item: -item[1].bytes)
    right = _tensors(other)
    by_count: dict[float, list[int]] = defaultdict(list)
    for index, (_, tensor) in enumerate(right):
        if tensor.moments:
            by_count[tensor.moments[0]].append(index)
    pairs, lone, used = [], [], set[int]()
    for step, tensor in left:
        candidates = by_count.get(tensor.moments[0], []) if tensor.moments else []
        equal = [index for index in candidates if same_values(tensor, right[index][1])]
        free = [index for index in equal if index not in used]
        if free:
            # Of several equal tensors the one of the same name of label, if there is one.
            chosen = next((index for index in free if right[index][0].label == step.label), free[0])
            used.add(chosen)
            pairs.append(((step, tensor), right[chosen]))
        else:
            lone.append(((step, tensor), bool(equal)))
    rest = [item for index, item in enumerate(right) if index not in used]
    twice = [any(same_values(item[1], pair[1][1]) for pair in pairs) for item in rest]
    return Matches(
        tuple(pairs),
        {
            one.compiler: tuple(item for item, again in lone if again),
            other.compiler: tuple(item for item, again in zip(rest, twice, strict=True) if again),
        },
        {
            one.compiler: tuple(item for item, again in lone if not again),
            other.compiler: tuple(item for item, again in zip(rest, twice, strict=True) if not again),
        },
    )


def align(one: Program, other: Program, matches: Matches) -> dict[str, tuple[Aligned, ...]]:
    """Give every step of both programs its part of the model.

    A label is shortened to the longest beginning that the other side knows too. A step without one takes the part of
    the step on the other side that leaves the same values in memory. Where neither has a label, tensors that both leave
    in memory cut both programs into stretches, and each stretch is a part, named for the tensor it leads to.

    Returns:
        The steps in order, by compiler.
    """
    known = _beginnings(one) & _beginnings(other)
    found = {
        program.compiler: [_by_label(step, known, program.steps) for step in program.steps] for program in (one, other)
    }
    places = {
        compiler: {aligned.step.name: index for index, aligned in enumerate(steps)} for compiler, steps in found.items()
    }
    for left, right in matches.pairs:
        for (mine, theirs), (here, there) in zip(
            ((left, right), (right, left)), ((one, other), (other, one)), strict=True
        ):
            index = places[here.compiler][mine[0].name]
            source = found[there.compiler][places[there.compiler][theirs[0].name]]
            if not found[here.compiler][index].part and source.by == "label":
                found[here.compiler][index] = Aligned(mine[0], source.part, (source.part,), source.phase, "value")
    _cut_into_stretches(
        found[one.compiler], found[other.compiler], matches, places[one.compiler], places[other.compiler]
    )
    return {compiler: tuple(steps) for compiler, steps in found.items()}


def _cut_into_stretches(
    left: list[Aligned],
    right: list[Aligned],
    matches: Matches,
    left_places: Mapping[str, int],
    right_places: Mapping[str, int],
) -> None:
    """Place what has neither label nor value, between tensors that both programs make in the same order."""
    cuts = sorted(
        (left_places[mine[0].name], right_places[theirs[0].name], str(theirs[1]))
        for mine, theirs in matches.pairs
        if not left[left_places[mine[0].name]].part and not right[right_places[theirs[0].name]].part
    )
    starts = (0, 0)
    for number, (here, there, tensor) in enumerate(_longest_in_order(cuts), 1):
        part = (f"{number}: to {tensor}",)
        for steps, start, end in ((left, starts[0], here), (right, starts[1], there)):
            for index in range(start, end + 1):
                if not steps[index].part:
                    steps[index] = Aligned(steps[index].step, part, (part,), right[there].phase, "value")
        starts = here + 1, there + 1


def _longest_in_order(cuts: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """The longest run of cuts that advances in both programs."""
    best: list[list[tuple[int, int, str]]] = []
    for cut in cuts:
        before = [chain for chain in best if chain[-1][0] < cut[0] and chain[-1][1] < cut[1]]
        best.append([*max(before, key=len, default=[]), cut])
    return max(best, key=len, default=[])


def region_of(part: Scopes) -> str:
    """The region a part belongs to: two levels of a numbered scope, one of any other; empty for none."""
    return "/".join(part[: 2 if part and part[0].endswith("*") else 1])


def _by_label(step: Step, known: frozenset[Scopes], steps: Sequence[Step]) -> Aligned:
    part = _shorten(step.label, known)
    parts = tuple(dict.fromkeys(short for label in step.labels if (short := _shorten(label, known))))
    phase = step.phase
    if not part and parts:
        part = parts[0]
    if part and phase == "other":
        # XLA moves what depends on no gradient out of the differentiated part; it belongs to the forward pass.
        phase = "forward" if any(other.phase == "forward" for other in steps) else "other"
    return Aligned(step, part, parts, phase, "label" if part else "")


def _shorten(label: Scopes, known: frozenset[Scopes]) -> Scopes:
    starred = star_blocks(label)
    return next((starred[:depth] for depth in range(len(starred), 0, -1) if starred[:depth] in known), ())


def _beginnings(program: Program) -> frozenset[Scopes]:
    labels: Iterable[Scopes] = {label for step in program.steps for label in (step.label, *step.labels)}
    return frozenset(star_blocks(label)[:depth] for label in labels for depth in range(1, len(label) + 1))


def _tensors(program: Program) -> list[tuple[Step, Tensor]]:
    return [(step, tensor) for step in program.steps for tensor in step.writes]


def count_by(items: Iterable[Aligned]) -> Counter[str]:
    """How many steps were placed by what."""
    return Counter(item.by or "nothing" for item in items)
