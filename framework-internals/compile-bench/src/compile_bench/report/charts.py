"""The report's charts, from the records alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Literal

from benchkit import numbers
from benchkit.report import Axis, Chart, Limit, Panel, Point, Series, series_by
from benchkit.results import Quantity, Results
from compile_bench.measure.records import CACHES, Bench, FirstSteps, ShapeStudy
from compile_bench.measure.verdict import PLAN_STEPS, judge
from compile_bench.report.autotuning import Autotuned, signed_seconds
from compile_bench.report.queries import NamedStart, in_order, mode_index, models, named_starts, start_parts, title
from compile_bench.targets.case import FIRST_STEPS

_EQUAL = Limit(1)

# Points of a smooth line, 24 in a decade: lengths of a run, and passes through a schedule of shapes.
_RUN_LENGTHS = sorted({*PLAN_STEPS, *(round(30 * 10 ** (index / 24)) for index in range(110))})
_PASSES = {round(10 ** (index / 24)) for index in range(121)}

# How a verdict is drawn: its name in the legend, number of its look, and whether the marker is hollow.
_ADVICE = {
    "compile": ("faster", 0, False),
    "not compared": ("faster, results not compared", 0, True),
    "inconclusive": ("inconclusive", 4, True),
    "don't": ("slower, or results outside their bounds", 5, False),
}


def speedup_chart(results: Results, cases: Sequence[Bench]) -> Chart:
    """A row for each case of mode default: its speed-up, and the length of a run from which on compiling is worth it.

    Without any break-even there is one panel.
    """
    default = [case for case in in_order(results, cases) if case.variant == "default"]
    by_speed = sorted(default, key=lambda case: -case.steady.speedup.value)
    gains = []
    for advice, (name, look, hollow) in _ADVICE.items():
        points = [
            Point(title(case, mode=False), case.steady.speedup) for case in default if _drawn_advice(case) == advice
        ]
        gains += [Series(name, points, look=look, line="", hollow=hollow)] if points else []
    words = {"don't": "never", "inconclusive": "inconclusive"}
    notes = {title(case, mode=False): words[judge(case).advice] for case in default if judge(case).advice in words}
    gain = Axis("eager step / compiled step, × (higher is better)", log=10)
    if evens := _break_even_series(default):
        even = Axis("break-even, steps (lower is better)", log=10)
        panels = [Panel(gains, limits=[_EQUAL], values=gain), Panel(evens, notes=notes, values=even)]
    else:
        panels = [Panel(gains, limits=[_EQUAL], values=gain, notes=notes)]
    return Chart(
        "speedup",
        "points",
        panels,
        Axis(),
        caption=(
            "Mode default. Left: time of an eager step over that of a compiled one, after all compiling, with its 95 % "
            "interval. Right: length of a run from which on compiling is worth its cost."
        ),
        alt="Points by model: speed-up of the compiled step, and the number of steps after which compiling has paid",
        share="none",
        legend=3,
        size=(9.0, 1.9 + 0.24 * len(default)),
        order=[title(case, mode=False) for case in by_speed],
    )


def _drawn_advice(case: Bench) -> str:
    verdict = judge(case)
    return "not compared" if verdict.advice == "compile" and verdict.not_compared else verdict.advice


def _break_even_series(cases: Sequence[Bench]) -> list[Series]:
    """The break-evens of the cases that are worth compiling, a series for each state of the caches."""
    series = []
    for look, (field, caches) in enumerate(CACHES.items(), 1):
        evens = [(case, getattr(judge(case), field)) for case in cases if judge(case).advice == "compile"]
        points = [
            Point(title(case, mode=False), even.steps, hover=f"{title(case, mode=False)}, {caches}: {even.text}")
            for case, even in evens
            if even is not None and even.steps is not None
        ]
        series += [Series(caches, points, look=look, line="")] if points else []
    return series


def first_steps_chart(cases: Sequence[Bench]) -> Chart:
    """One bar for each process of these cases, divided into what happened in it."""
    return _stacked_starts(
        "first_step",
        named_starts(cases),
        f"Where the first {FIRST_STEPS} steps of a fresh process go, from an imported torch on. Each instant is "
        "counted once, for the innermost phase.",
        "Stacked bars: seconds of the first steps by phase of compiling",
    )


def models_chart(results: Results, cases: Sequence[Bench]) -> Chart:
    """The first steps of every model with empty caches in mode default; empty for a single model."""
    default = [case for case in cases if case.variant == "default" and not case.tuned]
    starts = [NamedStart(title(case), "", case.cold) for case in in_order(results, default)]
    return _stacked_starts(
        "models",
        starts if len(starts) > 1 else [],
        f"The first {FIRST_STEPS} steps of every model with empty caches, mode default, divided in the same way.",
        "Stacked bars by model: seconds of the first steps by phase",
    )


def _stacked_starts(name: str, starts: Sequence[NamedStart], caption: str, alt: str) -> Chart:
    places = ["\n".join(filter(None, (start.title, start.caches))) for start in starts]
    parts = [start_parts(start.start) for start in starts]
    series = [
        Series(
            part,
            [
                Point(
                    place,
                    seconds[part],
                    hover=f"{place}: {part} {numbers.with_unit(seconds[part], 's')}".replace("\n", ", "),
                )
                for place, seconds in zip(places, parts, strict=True)
            ],
            look=look,
        )
        for look, part in enumerate(parts[0] if parts else ())
        if any(seconds[part] for seconds in parts)
    ]
    totals = {
        place: numbers.with_unit(sum(seconds.values()), "s") for place, seconds in zip(places, parts, strict=True)
    }
    two_lines = any(start.caches for start in starts)
    return Chart(
        name,
        "stacked",
        [Panel(series, notes=totals)],
        Axis(f"first {FIRST_STEPS} steps of a process, seconds (lower is better)", unit="s"),
        caption=caption,
        alt=alt,
        legend=3,
        size=(8.0, 1.6 + (0.42 if two_lines else 0.26) * len(starts)),
    )


_LINES: dict[str, Literal["-", "--", ":"]] = {"empty caches": "-", "warm caches": "--", "cache artifacts": ":"}


def break_even_chart(cases: Sequence[Bench]) -> Chart:
    """Total time of a run, eager over compiled, against its number of steps."""
    series = [
        Series(
            f"{title(case)}, {caches}",
            [
                Point(steps, _run_ratio(case, start, steps), hover=_run_text(case, caches, start, steps))
                if steps in PLAN_STEPS
                else Point(steps, _run_ratio(case, start, steps), mark=False)
                for steps in _RUN_LENGTHS
            ],
            look=look,
            line=_LINES[caches],
            band=True,
        )
        for look, case in enumerate(cases)
        for caches, start in case.starts
    ]
    return Chart(
        "break_even",
        "lines",
        [Panel(series, limits=[_EQUAL])],
        Axis("time of the run, eager / compiled, × (higher is better)", low=0),
        places=Axis("steps of the run, in one process", log=10),
        caption=(
            "Time of a whole run, eager over compiled: above 1 compiling has paid for itself. The band is the "
            "speed-up's 95 % interval."
        ),
        alt="Lines: time of a run, eager over compiled, which rises with its length",
        legend=2,
        size=(8.0, 4.8),
    )


def _run_text(case: Bench, caches: str, start: FirstSteps, steps: int) -> str:
    ratio = numbers.significant(_run_ratio(case, start, steps).value)
    return f"{title(case)}, {caches}, {numbers.count(steps)} steps: {ratio}×"


def _run_ratio(case: Bench, start: FirstSteps, steps: int) -> Quantity:
    """Time of a run of so many steps, eager over compiled, at the speed-up and at both ends of its interval."""
    eager, speedup = case.steady.eager.value, case.steady.speedup
    more = steps - FIRST_STEPS

    def ratio(factor: float | None) -> float:
        assert factor is not None
        return (case.eager.total + more * eager) / (start.total + more * eager / factor)

    return Quantity(
        ratio(speedup.value), "×", ratio(speedup.low), ratio(speedup.high), speedup.samples, speedup.interval
    )


def autotuning_chart(results: Results, tuned: Sequence[Autotuned]) -> Chart:
    """A row for each model and kind, a mark for each mode that autotunes, and the compile cost that it adds.

    Empty for two comparisons or fewer.
    """
    shown = tuned if len(tuned) > 2 else []
    order = models(results, [line.case for line in shown])
    by_mode = sorted(shown, key=lambda line: (mode_index(line.case.variant), order.index(line.case.model)))
    against: dict[str, set[str]] = {}
    for line in shown:
        against.setdefault(line.case.variant, set()).add(line.untuned_mode)
    costs: dict[str, float] = {}
    for model, line in product(order, shown):
        if line.case.model == model and line.extra_cost is not None:
            name = " ".join(model)
            costs[name] = max(line.extra_cost, costs.get(name, line.extra_cost))
    series = series_by(
        by_mode,
        lambda line: f"{line.case.variant} against {' or '.join(sorted(against[line.case.variant]))}",
        lambda line: Point(
            " ".join(line.case.model),
            line.speed,
            hover=f"{title(line.case)}: {numbers.quantity(line.speed)} of {line.untuned_mode}",
        ),
    )
    return Chart(
        "autotuning",
        "points",
        [Panel(series, limits=[_EQUAL], notes={place: signed_seconds(seconds) for place, seconds in costs.items()})],
        Axis("step without autotuning / step with it, × (higher is better)", log=10),
        caption=(
            "A step of the same mode without autotuning over one with it, in alternation in one process, with its "
            "95 % interval; the seconds are what autotuning adds to the first steps."
        ),
        alt="Points with intervals: what autotuning gains, by model and mode",
        legend=1,
        size=(8.0, 1.8 + 0.36 * len(order)),
    )


def shapes_chart(record: ShapeStudy) -> Chart:
    """Total time of each strategy over that of the cheapest one, against the number of passes."""
    strategies = {name: passes for name, passes in record.strategies.items() if passes.later is not None}
    counts = sorted({*_PASSES, *record.ranked_for})
    totals = {name: [passes.total(count)[0] for count in counts] for name, passes in strategies.items()}
    cheapest = [min(column) for column in zip(*totals.values(), strict=True)]
    series = [
        Series(
            name,
            [
                Point(
                    count,
                    total / least,
                    hover=f"{name}, {numbers.count(count)} passes: {numbers.with_unit(total, 's')}",
                    mark=count in record.ranked_for,
                )
                for count, total, least in zip(counts, seconds, cheapest, strict=True)
            ],
        )
        for name, seconds in totals.items()
    ]
    return Chart(
        "shapes",
        "lines",
        [Panel(series)],
        Axis("total time / the cheapest's, × (lower is better)", log=10),
        places=Axis("passes through the schedule, in one process", log=10),
        caption="Time of all passes through the schedule together, compiling included, over the cheapest strategy's.",
        alt="Lines: total time of each strategy for changing shapes, over the cheapest",
    )
