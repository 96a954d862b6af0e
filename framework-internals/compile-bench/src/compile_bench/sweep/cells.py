"""The cells of a sweep: all, the missing ones, and the order in which they begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchkit.results import Results
from compile_bench.measure.records import Bench, FailedCell
from compile_bench.targets.case import Case

# The order of modes within a group of models. Autotuning takes longest, so it begins first. In the last group it begins
# last: no other work follows there, and a time limit should cut off autotuning rather than anything else.
_PAIR = ("max-autotune-no-cudagraphs", "max-autotune")
_MODES_IN_ORDER = (_PAIR, ("default",), ("reduce-overhead",))
_MODES_OF_LAST_GROUP = (("default",), ("reduce-overhead",), _PAIR)

# Cells that are measured one after the other. The second of a pair finds in its cache what autotuning chose in the
# first.
Unit = tuple[Case, ...]


def cells(configuration: Mapping[str, Any]) -> list[Case]:
    """All cells of a configuration, in the order of the report."""
    return [
        Case(target, configuration["device"], kind == "training", mode)
        for group in configuration["groups"]
        for target in group
        for kind in configuration["kinds"]
        for mode in configuration["modes"]
    ]


def missing(results: Results) -> list[Case]:
    """The cells of a run's sweep that were neither measured nor failed."""
    measured = {(*case.model, case.mode) for case in Bench.select(results) if case.scope == "whole"}
    done = measured | {(*cell.model, cell.mode) for cell in FailedCell.select(results)}
    return [case for case in cells(results.configuration["sweep"]) if (case.target, case.kind, case.mode) not in done]


def units(configuration: Mapping[str, Any], cases: Sequence[Case]) -> list[Unit]:
    """The cells in the order in which they begin: one group after the other, autotuning first in all but the last.

    Cells of one model are separated by cells of others: together they could fill a GPU's memory.
    """
    wanted: dict[tuple[str, str, str], Case] = {(case.target, case.kind, case.mode): case for case in cases}
    ordered: list[Unit] = []
    for group in configuration["groups"]:
        for modes in _MODES_OF_LAST_GROUP if group is configuration["groups"][-1] else _MODES_IN_ORDER:
            for kind in configuration["kinds"]:
                for target in group:
                    unit = tuple(wanted[target, kind, mode] for mode in modes if (target, kind, mode) in wanted)
                    ordered += [unit] if unit else []
    return ordered
