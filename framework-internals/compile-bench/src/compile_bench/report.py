"""Results into a report: text and figures, from the records alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchkit import numbers
from benchkit.plotting import COLOURS, HATCHES, MARKERS, new_figure
from benchkit.report import Figure, ReportSpec, markdown_table
from benchkit.results import Quantity, Record, Results
from compile_bench.records import case_title, plural
from compile_bench.results import FIRST_STEPS
from compile_bench.trace import PHASES
from compile_bench.triage_report import triage_context

# Parts of the first steps, in the order they happen: key of the value, name in the figure.
PARTS = (
    ("import", "import of the compiler"),
    ("toolchain", "toolchain check"),
    *((f"phase {name}", name) for name in PHASES),
    ("rest", "running the steps"),
)
PART_COLOURS = (*COLOURS, "#FFFFFF")
PART_HATCHES = (*HATCHES, "")


def finding(results: Results) -> str:
    """What the run found, in one sentence."""
    verdicts = results.select("verdict")
    if not verdicts:
        return "No case could be measured to the end."
    verdict = verdicts[0]
    steady = _same_case(results, "steady", verdict)
    return (
        f"{case_title(verdict)}: torch.compile costs {numbers.with_unit(verdict['price'].value, 's')} up front with "
        f"empty caches and makes a step {numbers.quantity(steady['speedup'])} as fast; {_advice(verdict)}."
    )


def context(results: Results) -> dict[str, Any]:
    """The template's variables."""
    verdicts = results.select("verdict")
    return {
        "answers": _answers(results, verdicts),
        "case_names": [case_title(verdict) for verdict in verdicts],
        "verdict_table": _verdict_table(results, verdicts),
        "first_table": _first_table(results),
        "steady_table": _steady_table(results, verdicts),
        "compilation_table": _compilation_table(results, verdicts),
        "accuracy_table": _accuracy_table(results),
        "memory_table": _memory_table(results),
        **triage_context(results),
        "toolchain": _toolchain(results),
        "pressures": _pressures(results),
        "clocks": sorted({record.data["method"] for record in results.select("steady")}),
        "on_gpu": results.environment.gpu is not None,
        "recorder_share": _recorder_share(results, verdicts),
        "first_steps": FIRST_STEPS,
    }


def figures(results: Results) -> Sequence[Figure]:
    """The figures; none where nothing was measured."""
    if not results.select("verdict"):
        return []
    return [
        Figure(
            "first_step",
            f"Where the first {FIRST_STEPS} steps of a fresh process go, from an imported torch on. Each instant is "
            "counted once, for the innermost phase.",
            lambda: draw_first_steps(results),
        ),
        Figure(
            "steady",
            "A step after all compiling: median, with the 20th and 80th percentile as whiskers; above the pair the "
            "paired speed-up with its 95 % interval.",
            lambda: draw_steady(results),
        ),
        Figure(
            "break_even",
            "Time of a whole run, eager over compiled: above 1 compiling has paid for itself. The band is the 95 % "
            "interval of the speed-up.",
            lambda: draw_break_even(results),
        ),
    ]


REPORT = ReportSpec("compile_bench", context, figures, finding)


def draw_first_steps(results: Results) -> MatplotlibFigure:
    """One bar a process, stacked by what happened in it."""
    records = results.select("first steps")
    figure, axes = new_figure(8.0, 1.6 + 0.42 * len(records))
    labels = [f"{case_title(record, mode=record.labels['cache'] != 'none')}\n{_cache(record)}" for record in records]
    left = np.zeros(len(records))
    for index, (key, name) in enumerate(PARTS):
        seconds = np.array([_value(record, key) for record in records])
        if not seconds.any():
            continue
        axes.barh(
            labels,
            seconds,
            left=left,
            label=name,
            color=PART_COLOURS[index],
            hatch=PART_HATCHES[index],
            edgecolor="#444444" if key == "rest" else "white",
            linewidth=0.5,
            height=0.7,
        )
        left += seconds
    for row, total in enumerate(left):
        axes.annotate(
            numbers.with_unit(total, "s"), (total, row), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"seconds of the first {FIRST_STEPS} steps")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def draw_steady(results: Results) -> MatplotlibFigure:
    """Eager and compiled side by side."""
    records = results.select("steady")
    figure, axes = new_figure(max(4.5, 2.0 + 1.7 * len(records)), 4.0)
    width = 0.36
    for offset, (key, colour, hatch) in enumerate((("eager", COLOURS[7], ""), ("compiled", COLOURS[0], "///"))):
        values = [record[key] for record in records]
        axes.bar(
            np.arange(len(records)) + (offset - 0.5) * width,
            [value.value * 1e3 for value in values],
            width,
            yerr=np.array([_whiskers(value) for value in values]).T * 1e3,
            label=key,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            capsize=4,
        )
    for index, record in enumerate(records):
        top = max(record[key].high or record[key].value for key in ("eager", "compiled")) * 1e3
        axes.annotate(
            numbers.quantity(record["speedup"]), (index, top), xytext=(0, 6), textcoords="offset points", ha="center"
        )
    axes.set_xticks(range(len(records)), [f"{record.labels['kind']}\n{record.labels['mode']}" for record in records])
    axes.margins(y=0.15)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("milliseconds a step")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def draw_break_even(results: Results) -> MatplotlibFigure:
    """Total time of a run, eager over compiled, against its number of steps."""
    figure, axes = new_figure(7.0, 4.2)
    for index, verdict in enumerate(results.select("verdict")):
        steady = _same_case(results, "steady", verdict)
        eager = _eager_first(results, verdict)
        for record in _compiled_first(results, verdict):
            steps = np.geomspace(FIRST_STEPS, 1e6, 200)
            e = steady["eager"].value

            colour = COLOURS[index % len(COLOURS)]
            speedup = steady["speedup"]
            cache = str(record.labels["cache"])
            ratio = partial(_run_ratio, steps, e, eager["total"].value, record["total"].value)
            axes.plot(
                steps,
                ratio(speedup.value),
                color=colour,
                linestyle="-" if cache == "cold" else "--",
                marker=MARKERS[index % len(MARKERS)],
                markevery=(20 + 7 * index, 50),
                label=f"{case_title(verdict)}, {_cache(record)}",
            )
            assert speedup.low is not None
            assert speedup.high is not None
            axes.fill_between(steps, ratio(speedup.low), ratio(speedup.high), color=colour, alpha=0.12, linewidth=0)
    axes.axhline(1.0, color="#444444", linewidth=1.0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.count(value)))
    axes.set_xlabel("steps of the run, in one process")
    axes.set_ylabel("time of the run, eager / compiled")
    axes.legend(fontsize=9, loc="lower right")
    return figure


def _run_ratio(steps: Any, eager_step: float, eager_first: float, compiled_first: float, speedup: float) -> Any:
    """Time of a run of so many steps, eager over compiled."""
    more = steps - FIRST_STEPS
    return (eager_first + more * eager_step) / (compiled_first + more * eager_step / speedup)


def _answers(results: Results, verdicts: Sequence[Record]) -> list[tuple[str, str]]:
    """The four lines: costs, gives, breaks, when."""
    if not verdicts:
        return []
    first = verdicts[0]
    costs = []
    for record in _compiled_first(results, first):
        extra = record["total"].value - _eager_first(results, first)["total"].value
        amount = f"{numbers.with_unit(extra, 's')} more" if extra > 0 else "no more"
        costs.append(f"{amount} with {_cache(record)}")
    gives = [
        f"{case_title(verdict)} {numbers.quantity(_same_case(results, 'steady', verdict)['speedup'])}"
        for verdict in verdicts
    ]
    compilations = [_same_case(results, "compilation", verdict) for verdict in verdicts]
    breaks, again = (int(sum(record[key].value for record in compilations)) for key in ("breaks", "recompiles"))
    compared = [record for record in results.select("accuracy") if not record.data["skipped"]]
    right = sum(record.data["holds"] for record in compared)
    return [
        ("It costs", f"{' and '.join(costs)} than eager for the first {FIRST_STEPS} steps ({case_title(first)})."),
        ("It gives", f"{'; '.join(gives)}."),
        (
            "It breaks",
            f"{plural(breaks, 'graph break')} and {plural(again, 'recompilation')} "
            f"in {plural(len(verdicts), 'measured case')}; "
            f"results within the float64 bound in {right} of {plural(len(compared), 'compared case')}.",
        ),
        ("Use it when", " ".join(f"{case_title(verdict)}: {_advice(verdict)}." for verdict in verdicts)),
    ]


def _advice(verdict: Record) -> str:
    advice = verdict.data["advice"]
    if advice != "compile":
        return f"{advice}, since {verdict.data['why']}"
    warm = verdict.data["warm"]
    text = f"compile from {_range(verdict.data['cold'])} steps on"
    return text + (f", or {_range(warm)} with warm caches" if warm else "")


def _range(even: dict[str, Any]) -> str:
    if even["steps"] is None:
        return "∞"
    if even["high"] is None or even["low"] is None:
        return numbers.count(even["steps"])
    return f"{numbers.count(even['steps'])} ({numbers.count(even['low'])}–{numbers.count(even['high'])})"


def _verdict_table(results: Results, verdicts: Sequence[Record]) -> str:
    rows = []
    for verdict in verdicts:
        speedup = _same_case(results, "steady", verdict)["speedup"]
        warm = verdict.data["warm"]
        rows.append(
            (
                case_title(verdict),
                verdict.data["advice"],
                numbers.quantity(speedup),
                numbers.with_unit(verdict["price"].value, "s"),
                _break_even(verdict.data["cold"]),
                _break_even(warm) if warm else "not measured",
            )
        )
    header = ["case", "verdict", "speed-up (95 %)", "price, cold", "break-even, cold", "break-even, warm"]
    return markdown_table(header, rows, left=2)


def _break_even(even: dict[str, Any]) -> str:
    return "never" if even["steps"] is None else f"{_range(even)} steps"


def _first_table(results: Results) -> str:
    records = results.select("first steps")
    parts = [(key, name) for key, name in PARTS if any(_value(record, key) for record in records)]
    rows = [
        (
            f"{case_title(record, mode=record.labels['cache'] != 'none')}, {_cache(record)}",
            numbers.with_unit(record["total"].value, "s"),
            *(numbers.significant(_value(record, key)) if _value(record, key) else "–" for key, _ in parts),
        )
        for record in records
    ]
    return markdown_table(["process", "total", *(f"{name}, s" for _, name in parts)], rows)


def _steady_table(results: Results, verdicts: Sequence[Record]) -> str:
    rows = []
    for verdict in verdicts:
        steady = _same_case(results, "steady", verdict)
        rows.append(
            (
                case_title(verdict),
                numbers.quantity(steady["eager"]),
                numbers.quantity(steady["compiled"]),
                numbers.quantity(steady["speedup"]),
                steady["speedup"].samples,
            )
        )
    return markdown_table(["case", "eager (p20–p80)", "compiled (p20–p80)", "speed-up (95 %)", "rounds"], rows)


def _compilation_table(results: Results, verdicts: Sequence[Record]) -> str:
    keys = ("graphs", "operations", "breaks", "recompiles", "guards", "kernels")
    rows = []
    for verdict in verdicts:
        record = _same_case(results, "compilation", verdict)
        check = record.values.get("guard check")
        rows.append(
            (
                case_title(verdict),
                *(numbers.count(record[key].value) for key in keys),
                numbers.with_unit(check.value, "s") if check else "–",
            )
        )
    header = [
        "case",
        "graphs",
        "operations",
        "breaks",
        "recompiles",
        "guards",
        "generated kernels",
        "guard check a call",
    ]
    return markdown_table(header, rows)


def _accuracy_table(results: Results) -> str:
    size = numbers.error_size
    rows: list[tuple[str, ...]] = []
    for record in results.select("accuracy"):
        if record.data["skipped"]:
            rows.append((case_title(record), record.data["skipped"], "", "", "", ""))
            continue
        for kind in ("output", "gradient"):
            if f"{kind} eager" in record.values:
                name = kind if kind == "output" else f"gradient of `{record.data['gradient']}`"
                values = [size(record[f"{kind} {part}"].value) for part in ("eager", "compiled", "bound")]
                holds = record[f"{kind} compiled"].value <= record[f"{kind} bound"].value
                rows.append((case_title(record), name, *values, "yes" if holds else "**no**"))
    return markdown_table(["case", "tensor", "eager error", "compiled error", "bound", "within"], rows, left=2)


def _memory_table(results: Results) -> str:
    rows = [
        (case_title(record), *(numbers.with_unit(record[key].value, "B") for key in ("eager", "compiled")))
        for record in results.select("memory")
    ]
    return markdown_table(["case", "eager", "compiled"], rows) if rows else ""


def _toolchain(results: Results) -> str:
    records = results.select("toolchain")
    return numbers.with_unit(records[0].data["seconds"], "s") if records else ""


def _pressures(results: Results) -> list[float]:
    known = (record.data["pressure"] for record in results.select("steady"))
    return [pressure for pressure in known if pressure is not None]


def _recorder_share(results: Results, verdicts: Sequence[Record]) -> str:
    if not verdicts:
        return ""
    handler = _same_case(results, "compilation", verdicts[0])["handler"].value
    cold = _compiled_first(results, verdicts[0])[0]["total"].value
    return f"{numbers.with_unit(handler, 's')} of {numbers.with_unit(cold, 's')} ({numbers.percent(handler / cold, 2)})"


def _same_case(results: Results, name: str, other: Record) -> Record:
    return results.one(name, target=other.labels["target"], kind=other.labels["kind"], mode=other.labels["mode"])


def _compiled_first(results: Results, verdict: Record) -> list[Record]:
    labels = {key: verdict.labels[key] for key in ("target", "kind", "mode")}
    return results.select("first steps", **labels)


def _eager_first(results: Results, verdict: Record) -> Record:
    labels = {key: verdict.labels[key] for key in ("target", "kind")}
    return results.one("first steps", mode="eager", **labels)


def _cache(record: Record) -> str:
    return {"none": "eager", "cold": "empty caches", "warm": "warm caches"}[str(record.labels["cache"])]


def _value(record: Record, key: str) -> float:
    return record.values[key].value if key in record.values else 0.0


def _whiskers(value: Quantity) -> tuple[float, float]:
    assert value.low is not None
    assert value.high is not None
    return value.value - value.low, value.high - value.value
