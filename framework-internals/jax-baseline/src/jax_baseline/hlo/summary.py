"""Counts of an optimised module: by kind of kernel, by part of the model, and in total."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax_baseline.hlo.cost import Cost
from jax_baseline.hlo.kernels import COLLECTIVES, Kernel, Phase, kernels
from jax_baseline.hlo.text import parse


@dataclass(frozen=True)
class RegionCount:
    """Kernels of one part of the model in one phase."""

    region: str  # name of the part, ``block*/attention``. Empty for operations without a scope
    phase: Phase
    kernels: int
    dots: int  # number of matrix products inside them
    flops: int
    bytes: int
    seconds: float | None = None  # time of all of them in one run. None if it was not measured


@dataclass(frozen=True)
class Summary:
    """Counts of an optimised module."""

    kernels: int  # number of kernels. The body of a loop counts once
    kinds: dict[str, int]  # number of kernels by kind, most frequent first
    dots: int  # number of matrix products, alone or inside fusions. Library calls are not among them
    collectives: dict[str, int]
    donated: int
    donated_bytes: int
    arguments: int
    argument_bytes: int
    flops: int  # floating-point operations of one run. The body of a loop counts once for each iteration
    # Bytes that the kernels read and write in one run. Of an array that is sliced, gathered from or updated in place,
    # only the touched part counts.
    bytes: int
    whole_bytes: int  # bytes of all operands and results, each whole, with the body of a loop once. XLA counts this way
    library_flops: int  # share of ``flops`` in library calls, which XLA does not count
    library_bytes: int  # share of ``whole_bytes`` in library calls
    regions: tuple[RegionCount, ...]


def star_blocks(scopes: Sequence[str]) -> tuple[str, ...]:
    """Merge numbered scopes: ("block3", "mlp") → ("block*", "mlp")."""
    return tuple(re.sub(r"^([A-Za-z_.]+)\d+$", r"\1*", scope) for scope in scopes)


def region_of(starred: Sequence[str]) -> str:
    """Return the part of the model for the scopes that :func:`star_blocks` returned; empty for no scope.

    The part has two levels below a numbered scope and one level elsewhere. Deeper levels are scopes that libraries
    open.
    """
    return "/".join(starred[: 2 if starred and starred[0].endswith("*") else 1])


def summarise(text: str, seconds: Mapping[str, float] | None = None) -> Summary:
    """Count what is in the text of an optimised HLO module.

    Args:
        text: Text of the module.
        seconds: Time in one run by name of the kernel. None if it was not measured.

    Raises:
        ValueError: If the text is not an HLO module.
    """
    module = parse(text)
    listed = kernels(module)
    kinds = Counter(kernel.description for kernel in listed)
    arguments = module.arguments
    libraries = [kernel for kernel in listed if kernel.kind == "custom call"]
    total = sum((kernel.total for kernel in listed), Cost())
    return Summary(
        kernels=len(listed),
        kinds=dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))),
        dots=sum(kernel.dots for kernel in listed),
        collectives={kind: count for kind, count in kinds.items() if kind in COLLECTIVES},
        donated=len(module.donated),
        donated_bytes=sum(arguments[number].bytes for number in module.donated),
        arguments=len(arguments),
        argument_bytes=sum(argument.bytes for argument in arguments.values()),
        flops=total.flops,
        bytes=total.bytes,
        whole_bytes=sum(kernel.whole_bytes for kernel in listed),
        library_flops=sum(kernel.total.flops for kernel in libraries),
        library_bytes=sum(kernel.whole_bytes for kernel in libraries),
        regions=_count_by_region(listed, seconds),
    )


def _count_by_region(listed: Iterable[Kernel], seconds: Mapping[str, float] | None) -> tuple[RegionCount, ...]:
    """Add up kernels by part of the model and phase, in the order in which the parts first appear."""
    groups: dict[tuple[str, Phase], list[Kernel]] = {}
    for kernel in listed:
        groups.setdefault((region_of(star_blocks(kernel.label.scopes)), kernel.phase), []).append(kernel)
    return tuple(
        RegionCount(
            region,
            phase,
            len(group),
            sum(kernel.dots for kernel in group),
            sum(kernel.total.flops for kernel in group),
            sum(kernel.total.bytes for kernel in group),
            sum(seconds.get(kernel.name, 0.0) for kernel in group) if seconds else None,
        )
        for (region, phase), group in groups.items()
    )
