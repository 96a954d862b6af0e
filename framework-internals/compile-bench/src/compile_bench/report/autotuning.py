"""The report's section on what autotuning costs and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchkit import numbers
from benchkit.report import Chart, Column, Section, Table
from benchkit.results import Quantity, Results
from compile_bench.measure.records import Bench
from compile_bench.measure.verdict import difference, judge
from compile_bench.report.queries import case_named, in_order, title

# Marks first steps that found in the caches what another mode's autotuning had chosen.
MARK = "ᵃ"


@dataclass(frozen=True)
class Autotuned:
    """A mode that autotunes, compared with the same mode without autotuning."""

    case: Bench  # the case that autotunes
    untuned_mode: str  # the mode that it is compared with
    speed: Quantity  # time of a step in the untuned mode over that of this case, paired, with its interval
    gain: float  # seconds gained a step; 0 where the two are not distinguishable
    extra_cost: float | None  # seconds that autotuning adds to the first steps; None if not known
    borrowed: bool  # whether extra_cost was measured in the other mode that autotunes the same kernels


def autotuned(results: Results, cases: Sequence[Bench]) -> list[Autotuned]:
    """Every case that autotunes, compared with the untuned step of the same rounds."""
    tuned = []
    for case in in_order(results, cases):
        untuned = case.steady.untuned
        if untuned is None:
            continue
        seen = difference(untuned.speedup, case.steady.control)
        gain = 0.0 if seen == "none" else untuned.step.value * (1 - 1 / untuned.speedup.value)
        borrowed = case.tuned
        tuner = case_named(cases, case.model, "max-autotune-no-cudagraphs") if borrowed else case
        plain = case_named(cases, case.model, "default" if borrowed else untuned.mode)
        extra = None if tuner is None or plain is None else judge(tuner).cost - judge(plain).cost
        tuned.append(Autotuned(case, untuned.mode, untuned.speedup, gain, extra, borrowed and extra is not None))
    return tuned


def autotuning_section(tuned: Sequence[Autotuned], chart: Chart) -> Section:
    """How often a step was faster or slower, a chart, and a table of every comparison; empty without any."""
    gains = [line.gain for line in tuned]
    ranked = sorted(tuned, key=lambda line: line.speed.value, reverse=True)
    ends = [f"{title(line.case)}, {numbers.quantity(line.speed)}" for line in (ranked[:1] + ranked[1:][-1:])]
    return Section(
        "Was max-autotune worth it?",
        [
            "Compared with the same mode without autotuning, a step was faster in "
            f"{sum(gain > 0 for gain in gains)} of {len(gains)} cases, slower in {sum(gain < 0 for gain in gains)} and "
            f"not distinguishable in {gains.count(0)}. {'The best is ' if len(ends) > 1 else 'It is '}"
            f"{'; the worst '.join(ends)}.",
            chart,
            Section(
                "",
                [
                    autotuning_table(tuned),
                    "Both steps were sampled in alternation in one process (bootstrap 95 %). Where they differ by no "
                    "more than eager from itself, autotuning is never paid for.",
                    f"{MARK} This mode found the choices of max-autotune-no-cudagraphs, whose kernels are the same; "
                    "what autotuning adds is taken from that mode."
                    if any(line.borrowed for line in tuned)
                    else "",
                ],
                fold="Every mode that autotunes: gain of a step, seconds added, and when they are paid for",
            ),
        ],
    )


def autotuning_table(tuned: Sequence[Autotuned]) -> Table[Autotuned]:
    """A row for each mode that autotunes."""
    return Table(
        tuned,
        [
            Column("case", lambda line: title(line.case)),
            Column("compared with", "untuned_mode", left=True),
            Column("step, times as fast", "speed"),
            Column("first steps", _added),
            Column("paid for after", _paid_after),
        ],
    )


def signed_seconds(seconds: float) -> str:
    """Seconds with their sign."""
    return f"{'+' if seconds >= 0 else '−'}{numbers.with_unit(abs(seconds), 's')}"


def _added(line: Autotuned) -> str | None:
    return None if line.extra_cost is None else signed_seconds(line.extra_cost) + MARK * line.borrowed


def _paid_after(line: Autotuned) -> str | None:
    if line.extra_cost is None:
        return None
    return f"{numbers.count(max(line.extra_cost, 0) / line.gain)} steps" if line.gain > 0 else "never"
