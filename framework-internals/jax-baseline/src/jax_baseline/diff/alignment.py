"""Assigns the kernels of two compilers to the parts of the model: by label, and by value where a label is missing.

A label is ``jax.named_scope`` in JAX and ``torch.fx.traceback.annotate`` in torch. A compiler may drop the label of a
kernel, and a user may give none. The values of the tensors in memory then identify the kernel: two tensors with the
same values are the same tensor, whatever their shapes, layouts and names.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from jax_baseline.diff.programs import KernelLaunch, Program, Scopes, Tensor
from jax_baseline.hlo.summary import star_blocks

# Tolerance for sums over the same tensor, computed by two compilers, relative to the sum of magnitudes. It is a
# thousand times the rounding of one operation, because many operations precede a tensor. Two different tensors of a
# model with random weights are much further apart.
_TOLERANCE = {"float64": 1e-10, "float32": 2e-4, "float16": 2e-2, "bfloat16": 5e-2}

Write = tuple[KernelLaunch, Tensor]  # a tensor and the launch that writes it


@dataclass(frozen=True)
class Matches:
    """Tensors of two programs with equal values."""

    # A tensor of the first program and an equal tensor of the second. Each tensor is in at most one pair.
    pairs: tuple[tuple[Write, Write], ...]
    # By compiler, tensors that equal a tensor in a pair: copies and transpositions.
    copies: Mapping[str, tuple[Write, ...]]
    only: Mapping[str, tuple[Write, ...]]  # by compiler, tensors that the other compiler never writes to memory


def same_values(one: Tensor, other: Tensor) -> bool:
    """Compare moments: the number of elements, Σx, Σ|x|, Σx², Σx³, the maximum and the minimum.

    None of them depends on the order of the elements. A tensor without moments and a tensor of one repeated value
    (zeros, ones, masks) equal no tensor.
    """
    if one.moments is None or other.moments is None or one.moments[0] != other.moments[0]:
        return False
    if one.moments[5] == one.moments[6] or one.moments[0] < 2:
        return False
    tolerance = max(_TOLERANCE.get(tensor.dtype, 0.0) for tensor in (one, other))
    count, _, magnitude, square, *_ = one.moments
    root_mean_square = math.sqrt(square / count) + 1e-300
    largest = max(abs(one.moments[5]), abs(one.moments[6]), root_mean_square)
    # The scale of a sum is the sum of magnitudes. The scale of an extreme is the largest element.
    scales = (magnitude, magnitude, square, magnitude * largest**2, largest, largest)
    return all(
        abs(a - b) <= tolerance * scale + 1e-300
        for a, b, scale in zip(one.moments[1:], other.moments[1:], scales, strict=True)
    )


def match_values(one: Program, other: Program) -> Matches:
    """Pair the tensors of two programs by their values, the largest first.

    Without the values of both programs the result is empty.
    """
    if not (one.has_values and other.has_values):
        nothing = {one.compiler: (), other.compiler: ()}
        return Matches((), nothing, nothing)
    left = sorted(_writes(one), key=lambda write: -write[1].bytes)
    right = _writes(other)
    by_count: dict[float, list[int]] = defaultdict(list)
    for index, (_, tensor) in enumerate(right):
        if tensor.moments:
            by_count[tensor.moments[0]].append(index)
    pairs: list[tuple[Write, Write]] = []
    unmatched, used = list[Write](), set[int]()
    for launch, tensor in left:
        candidates = by_count.get(tensor.moments[0], []) if tensor.moments else []
        free = [index for index in candidates if index not in used and same_values(tensor, right[index][1])]
        if free:
            # Among several equal tensors, prefer the one with the same label.
            chosen = next((index for index in free if right[index][0].label == launch.label), free[0])
            used.add(chosen)
            pairs.append(((launch, tensor), right[chosen]))
        else:
            unmatched.append((launch, tensor))
    rest = {one.compiler: unmatched, other.compiler: [write for index, write in enumerate(right) if index not in used]}
    paired = [partner[1] for _, partner in pairs]
    copies: dict[str, tuple[Write, ...]] = {}
    only: dict[str, tuple[Write, ...]] = {}
    for compiler, writes in rest.items():
        is_copy = [any(same_values(tensor, equal) for equal in paired) for _, tensor in writes]
        copies[compiler] = tuple(compress(writes, is_copy))
        only[compiler] = tuple(compress(writes, map(operator.not_, is_copy)))
    return Matches(tuple(pairs), copies, only)


def assign_parts(one: Program, other: Program, matches: Matches) -> dict[str, tuple[KernelLaunch, ...]]:
    """Assign every launch of both programs to a part of the model.

    The part of a labelled launch is the longest prefix of its label that the other program has too. A launch without a
    label takes the part of the launch in the other program that writes an equal tensor. Where neither launch has a
    label, the common tensors cut both programs into stretches. Each stretch is then a part, with the name of the tensor
    at its end.
    """
    known = _label_prefixes(one) & _label_prefixes(other)
    assigned = {
        program.compiler: [_by_label(launch, known, program) for launch in program.launches] for program in (one, other)
    }
    index_of = {
        compiler: {item.name: index for index, item in enumerate(items)} for compiler, items in assigned.items()
    }
    for left, right in matches.pairs:
        ends = ((one.compiler, left[0]), (other.compiler, right[0]))
        for (here, mine), (there, theirs) in (ends, ends[::-1]):
            index, source = index_of[here][mine.name], assigned[there][index_of[there][theirs.name]]
            if not assigned[here][index].part and source.by == "label":
                assigned[here][index] = _by_value(mine, source.part, source.phase)
    cuts = [
        (index_of[one.compiler][mine.name], index_of[other.compiler][theirs.name], str(tensor))
        for (mine, _), (theirs, tensor) in matches.pairs
    ]
    _assign_stretches(assigned[one.compiler], assigned[other.compiler], cuts)
    return {compiler: tuple(items) for compiler, items in assigned.items()}


def _assign_stretches(
    left: list[KernelLaunch], right: list[KernelLaunch], cuts: Sequence[tuple[int, int, str]]
) -> None:
    """Assign, in place, what is left between tensors that both programs write: the index in each list, and its name."""
    unlabelled = sorted(cut for cut in cuts if not left[cut[0]].part and not right[cut[1]].part)
    starts = (0, 0)
    for number, (here, there, tensor) in enumerate(_longest_in_order(unlabelled), 1):
        part = (f"{number}: to {tensor}",)
        for items, start, end in ((left, starts[0], here), (right, starts[1], there)):
            for index in range(start, end + 1):
                if not items[index].part:
                    items[index] = _by_value(items[index], part, right[there].phase)
        starts = here + 1, there + 1


def _longest_in_order(cuts: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Return the longest sequence of cuts that advances in both programs."""
    best: list[list[tuple[int, int, str]]] = []
    for cut in cuts:
        before = [chain for chain in best if chain[-1][0] < cut[0] and chain[-1][1] < cut[1]]
        best.append([*max(before, key=len, default=[]), cut])
    return max(best, key=len, default=[])


def _by_label(launch: KernelLaunch, known: frozenset[Scopes], program: Program) -> KernelLaunch:
    parts = tuple(dict.fromkeys(part for label in launch.labels if (part := _longest_known(label, known))))
    part = _longest_known(launch.label, known) or next(iter(parts), ())
    phase = launch.phase
    if part and phase == "other" and any(other.phase == "forward" for other in program.launches):
        # XLA moves what depends on no gradient out of the differentiated part. It belongs to the forward pass.
        phase = "forward"
    return replace(launch, part=part, parts=parts, phase=phase, by="label" if part else "nothing")


def _by_value(launch: KernelLaunch, part: Scopes, phase: str) -> KernelLaunch:
    return replace(launch, part=part, parts=(part,), phase=phase, by="value")


def _longest_known(label: Scopes, known: frozenset[Scopes]) -> Scopes:
    starred = star_blocks(label)
    return next((starred[:depth] for depth in range(len(starred), 0, -1) if starred[:depth] in known), ())


def _label_prefixes(program: Program) -> frozenset[Scopes]:
    labels = {label for launch in program.launches for label in (launch.label, *launch.labels)}
    return frozenset(star_blocks(label)[:depth] for label in labels for depth in range(1, len(label) + 1))


def _writes(program: Program) -> list[Write]:
    return [(launch, tensor) for launch in program.launches for tensor in launch.writes]
