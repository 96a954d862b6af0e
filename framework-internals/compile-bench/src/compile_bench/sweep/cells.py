"""The cells of a sweep: which there are, which are missing, and the order in which they begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchkit.results import Label, Results
from compile_bench.measure.serialize import case_labels
from compile_bench.targets.case import Case

# What is begun before what within a group of models: autotuning takes longest, and what is long is begun early. In the
# last group it comes last all the same: there is nothing behind it, and it is what a time limit should cut off.
_PAIR = ("max-autotune-no-cudagraphs", "max-autotune")
_BEGUN = (_PAIR, ("default",), ("reduce-overhead",))
_BEGUN_IN_THE_LAST = (("default",), ("reduce-overhead",), _PAIR)

# Cells that are measured in order: the second one of a pair finds in its cache what autotuning chose in the first.
Unit = tuple[Case, ...]

Key = tuple[Label, ...]


def cells(configuration: Mapping[str, Any]) -> list[Case]:
    """All cells of a sweep's configuration, in the order of the report; the device is that of the configuration."""
    return [
        Case(target, configuration["device"], kind == "training", mode)
        for group in configuration["groups"]
        for target in group
        for kind in configuration["kinds"]
        for mode in configuration["modes"]
    ]


def missing(results: Results) -> list[Case]:
    """The cells of a run's sweep that were neither measured nor failed."""
    done = {key_of(record.labels) for name in ("verdict", "cell") for record in results.select(name)}
    return [case for case in cells(results.configuration["sweep"]) if key_of(case_labels(case)) not in done]


def units(configuration: Mapping[str, Any], cases: Sequence[Case]) -> list[Unit]:
    """The cells in the order in which they are begun: one group after the other, autotuning first in all but the last.

    Cells of one model are kept apart by those of others: together they could fill a GPU's memory.
    """
    wanted = {key_of(case_labels(case)): case for case in cases}
    found: list[Unit] = []
    for group in configuration["groups"]:
        for modes in _BEGUN_IN_THE_LAST if group is configuration["groups"][-1] else _BEGUN:
            for kind in configuration["kinds"]:
                for target in group:
                    unit = tuple(wanted[target, kind, mode] for mode in modes if (target, kind, mode) in wanted)
                    found += [unit] if unit else []
    return found


def key_of(labels: Mapping[str, Label]) -> Key:
    """Target, kind of step and mode of a record's labels."""
    return labels["target"], labels["kind"], labels["mode"]
