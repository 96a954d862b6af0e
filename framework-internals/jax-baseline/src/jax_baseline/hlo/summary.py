"""An optimised module in numbers: by kind of kernel, by part of the model, in all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jax_baseline.hlo.cost import Cost
from jax_baseline.hlo.kernels import COLLECTIVES, Kernel, Phase, kernels
from jax_baseline.hlo.text import Module, parse


@dataclass(frozen=True)
class RegionCount:
    """Kernels of one part of the model in one phase.

    Attributes:
        region: the part, ``block*/attention``; empty for operations without a scope.
        phase: forward, backward or other.
        kernels: how many.
        dots: matrix products inside.
        flops: of all of them.
        bytes: read and written by all of them.
        seconds: they take in one run, where measured.
    """

    region: str
    phase: Phase
    kernels: int
    dots: int
    flops: int
    bytes: int
    seconds: float | None = None


@dataclass(frozen=True)
class Summary:
    """An optimised module in numbers.

    Attributes:
        kernels: steps of the program that do something, a loop's body once.
        kinds: their number by kind, most frequent first.
        dots: matrix products, alone or inside fusions; a library call that is one is a kind of its own.
        collectives: by opcode.
        donated: arguments whose memory an output takes over.
        donated_bytes: their size.
        arguments: how many there are.
        argument_bytes: their size.
        output_bytes: size of the results.
        flops: of a run, loop bodies as often as they run.
        transcendentals: likewise.
        bytes: that kernels read and write in a run; of what is only sliced, gathered from or updated in place, a part.
        whole_bytes: the same with every operand and result taken whole and loop bodies once, which is how XLA counts.
        library_flops: the share of ``flops`` that calls of libraries do, which XLA does not count.
        library_bytes: likewise of ``whole_bytes``.
        regions: kernels by part of the model.
    """

    kernels: int
    kinds: dict[str, int]
    dots: int
    collectives: dict[str, int]
    donated: int
    donated_bytes: int
    arguments: int
    argument_bytes: int
    output_bytes: int
    flops: int
    transcendentals: int
    bytes: int
    whole_bytes: int
    library_flops: int
    library_bytes: int
    regions: tuple[RegionCount, ...]

    def as_plain(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)


def count_by_kind(found: Iterable[Kernel]) -> Counter[str]:
    """Return how many kernels there are of each kind, custom calls and custom fusions by name."""
    return Counter(kernel.description for kernel in found)


def part_of_model(scopes: Sequence[str]) -> str:
    """Name the part that scopes stand for, blocks of a number taken together: block3, attention, … → block*/attention.

    Two levels of a numbered part remain, one of any other: what follows are scopes a library opened for itself.
    """
    parts = [re.sub(r"^([A-Za-z_]+)\d+$", r"\1*", part) for part in scopes]
    depth = 2 if parts and parts[0].endswith("*") else 1
    return "/".join(parts[:depth])


def count_by_region(found: Iterable[Kernel], seconds: Mapping[str, float] | None = None) -> tuple[RegionCount, ...]:
    """Add up kernels by part of the model and phase, in the order in which the parts first appear.

    Args:
        found: the kernels.
        seconds: of one run by name of the kernel, where measured.
    """
    groups: dict[tuple[str, Phase], list[Kernel]] = {}
    for kernel in found:
        groups.setdefault((part_of_model(kernel.label.scopes), kernel.phase), []).append(kernel)
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


def summarise(text: str, seconds: Mapping[str, float] | None = None) -> Summary:
    """Count what is in the text of an optimised HLO module.

    Args:
        text: of the module.
        seconds: of one run by name of the kernel, where measured.

    Raises:
        ValueError: if it is not one.
    """
    return summarise_module(parse(text), seconds)


def summarise_module(module: Module, seconds: Mapping[str, float] | None = None) -> Summary:
    """The same of a module that has been parsed."""
    found = kernels(module)
    kinds = count_by_kind(found)
    arguments = module.arguments
    libraries = [kernel for kernel in found if kernel.kind == "custom call"]
    total = sum((kernel.total for kernel in found), Cost())
    return Summary(
        kernels=len(found),
        kinds=dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))),
        dots=sum(kernel.dots for kernel in found),
        collectives={kind: count for kind, count in kinds.items() if kind in COLLECTIVES},
        donated=len(module.donated),
        donated_bytes=sum(arguments[number].bytes for number in module.donated),
        arguments=len(arguments),
        argument_bytes=sum(argument.bytes for argument in arguments.values()),
        output_bytes=module.result.bytes,
        flops=total.flops,
        transcendentals=total.transcendentals,
        bytes=total.bytes,
        whole_bytes=sum(kernel.whole_bytes for kernel in found),
        library_flops=sum(kernel.total.flops for kernel in libraries),
        library_bytes=sum(kernel.whole_bytes for kernel in libraries),
        regions=count_by_region(found, seconds),
    )
