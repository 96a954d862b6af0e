"""The report's section on what autotuning costs and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchkit import numbers
from benchkit.report import markdown_table
from benchkit.results import Quantity, Results
from compile_bench.measure.verdict import difference
from compile_bench.report.queries import MeasuredCase, case_named, in_order, title

# Marks first steps that found in the caches what another mode's autotuning had chosen.
MARK = "ᵃ"


@dataclass(frozen=True)
class Autotuned:
    """A mode that autotunes, compared with the same mode without autotuning.

    Attributes:
        case: The case that autotunes.
        untuned_mode: The mode that it is compared with.
        speed: Time of a step in the untuned mode over that of this case, paired, with its interval.
        gain: Seconds gained a step; 0 where the two are not distinguishable.
        extra_cost: Seconds that autotuning adds to the first steps; None if not known.
        borrowed: Whether ``extra_cost`` was measured in the other mode that autotunes the same kernels.
    """

    case: MeasuredCase
    untuned_mode: str
    speed: Quantity
    gain: float
    extra_cost: float | None
    borrowed: bool


def autotuned(results: Results, cases: Sequence[MeasuredCase]) -> list[Autotuned]:
    """Every case that autotunes, compared with the untuned step of the same rounds."""
    found = []
    for case in in_order(results, cases):
        untuned = case.steady.untuned
        if untuned is None:
            continue
        seen = difference(untuned.speedup, case.steady.control)
        gain = 0.0 if seen == "none" else untuned.step.value * (1 - 1 / untuned.speedup.value)
        borrowed = case.record.tuned
        tuner = case_named(cases, case.model, "max-autotune-no-cudagraphs") if borrowed else case
        plain = case_named(cases, case.model, "default" if borrowed else untuned.mode)
        extra = None if tuner is None or plain is None else tuner.verdict.cost - plain.verdict.cost
        found.append(Autotuned(case, untuned.mode, untuned.speedup, gain, extra, borrowed and extra is not None))
    return found


def autotuning_section(results: Results, cases: Sequence[MeasuredCase]) -> dict[str, Any]:
    """A table, and how often a step was faster or slower; empty where nothing was autotuned."""
    found = autotuned(results, cases)
    if not found:
        return {}
    header = ["case", "compared with", "step, times as fast", "first steps", "paid for after"]
    return {
        "table": markdown_table(header, [_row(each) for each in found], left=2),
        "all": len(found),
        "faster": sum(each.gain > 0 for each in found),
        "slower": sum(each.gain < 0 for each in found),
        "equal": sum(each.gain == 0 for each in found),
        "borrowed": any(each.borrowed for each in found),
        "ends": [
            f"{title(each.case)}, {numbers.quantity(each.speed)}"
            for each in (pick(found, key=lambda each: each.speed.value) for pick in (max, min))
        ],
    }


def signed_seconds(seconds: float) -> str:
    """Seconds with their sign."""
    return f"{'+' if seconds >= 0 else '−'}{numbers.with_unit(abs(seconds), 's')}"


def _row(each: Autotuned) -> tuple[str, ...]:
    cost = after = "–"
    if each.extra_cost is not None:
        cost = signed_seconds(each.extra_cost) + MARK * each.borrowed
        after = f"{numbers.count(max(each.extra_cost, 0) / each.gain)} steps" if each.gain > 0 else "never"
    return title(each.case), each.untuned_mode, numbers.quantity(each.speed), cost, after
