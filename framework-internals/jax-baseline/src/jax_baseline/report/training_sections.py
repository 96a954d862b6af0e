"""What the results say of parity and throughput: sentences, tables and figures, computed from the records alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure
from numpy.typing import NDArray

from benchkit import Quantity, Record, Results, numbers
from benchkit.environment import commit_label
from benchkit.report import Figure, markdown_table
from benchkit.report.plotting import COLOURS, HATCHES, MARKERS, label_ticks, new_figure

_QUANTITIES = ("loss", "gradient norm", "gradients", "weights", "optimizer state")
# Which mistakes count as caught: a comparison is wanted in seconds.
_CAUGHT_WITHIN = 4
_STAGES = ("trace", "lower", "compile")


def clauses(results: Results) -> list[str]:
    """What this half has to say in the sentence that opens the report."""
    parts = []
    if parities := results.select("parity"):
        within = [record for record in parities if record.data["divergence"] is None]
        shown = next((record for record in parities if record.labels["dtype"] == "float32"), parities[0])
        parts.append(
            f"from the same weights JAX stays within its bounds of torch in {len(within)} of "
            f"{len(parities)} dtypes (largest loss difference over {shown.labels['steps']} "
            f"steps in {shown.labels['dtype']} "
            f"{numbers.error_size(shown['loss, jax'].value)} nats; torch in another basis is "
            f"{numbers.error_size(shown['loss, control'].value)} from itself)"
        )
    if mistakes := _mistakes(results):
        caught = [record for record in mistakes if _caught(record)]
        parts.append(
            f"of {len(mistakes)} planted porting mistakes {len(caught)} are caught within {_CAUGHT_WITHIN} steps"
        )
    if best := fastest(results, "jax"):
        rival = fastest(results, "torch")
        parts.append(
            f"`{best.labels['engine']}` trains {_preset(results)} at {rate(best)}"
            + (f", `{rival.labels['engine']}` at {rate(rival)}" if rival else "")
        )
    return parts


def context(results: Results) -> dict[str, Any]:
    """The template's variables for this half."""
    parities, engines = results.select("parity"), results.select("engine")
    return {
        "parity": results.configuration["parity"],
        "bench": results.configuration["bench"],
        "times_control": {record.labels["dtype"]: numbers.count(record["times control"].value) for record in parities},
        "parity_rows": [_parity_row(record) for record in parities],
        "divergences": [
            (record.labels["dtype"], record.data["divergence"]) for record in parities if record.data["divergence"]
        ],
        "first_losses": _first_losses(results),
        "mutations": _mutations(results),
        "has_mfu": any("MFU" in record.values for record in engines),
        "engine_table": _engine_table(results, engines),
        "compile_rows": [_compile_row(record) for record in engines],
        "meshes": _meshes(results),
        "scaling": _scaling(results),
        "convergence": _convergence(results),
    }


def _mistakes(results: Results) -> list[Record]:
    return [record for record in results.select("mutation") if record.labels["mistake"]]


def _caught(record: Record) -> bool:
    return record.data["step"] is not None and record.data["step"] < _CAUGHT_WITHIN


def _mutations(results: Results) -> dict[str, Any] | None:
    mistakes = _mistakes(results)
    if not mistakes:
        return None
    faithful = results.one("mutation", mistake="")
    return {
        "within": _CAUGHT_WITHIN,
        "number": len(mistakes),
        "last": results.configuration["mutations"]["last"],
        "caught": sum(map(_caught, mistakes)),
        "missed": [record.labels["mistake"] for record in mistakes if not _caught(record)],
        "faithful": "passes" if faithful.data["step"] is None else f"is caught too ({faithful.data['where']})",
        "rows": [
            [
                str(record.labels["mistake"]),
                "–" if record.data["step"] is None else str(record.data["step"]),
                record.data["where"] or "–",
                "–" if record.data["step"] is None else numbers.significant(record["times"].value),
            ]
            for record in mistakes
        ],
    }


def _meshes(results: Results) -> dict[str, Any] | None:
    records = results.select("mesh")
    if not records:
        return None
    alone, *others = records
    orders = [
        max(abs(one - other) for one, other in zip(losses, alone.data["losses"], strict=True))
        for losses in alone.data["controls"]
    ]
    return {
        "steps": len(alone.data["losses"]),
        "order": numbers.error_size(max(orders)),
        "largest": numbers.error_size(max(record["difference"].value for record in others)),
        "rows": [
            [
                _mesh(record),
                numbers.error_size(record["difference"].value),
                numbers.quantity(record["state"]),
                _collectives(record),
            ]
            for record in records
        ],
    }


def _scaling(results: Results) -> dict[str, Any] | None:
    records = results.select("scaling")
    if not records:
        return None
    asked = results.configuration["sweep"]
    measured = [record for record in records if "failed" not in record.data]
    return {
        **asked,
        "on": sorted({_measured_on(record) for record in records}),
        "failed": [(_mesh(record), record.data["failed"]) for record in records if "failed" in record.data],
        "rows": [
            [
                _mesh(record),
                _interval(record),
                numbers.quantity(record["step"]),
                numbers.quantity(record["step of one"]),
                _share(record["efficiency"]),
                numbers.quantity(record["peak memory"]) if "peak memory" in record.values else "–",
                _collectives(record),
            ]
            for record in measured
        ],
    }


def _mesh(record: Record) -> str:
    return f"{record.labels['data']} × {record.labels['fsdp']}"


def _collectives(record: Record) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(record.data["collectives"].items())) or "none"


def _share(figure: Quantity) -> str:
    low, high = (figure.value if end is None else end for end in (figure.low, figure.high))
    return f"{numbers.percent(figure.value)} ({numbers.percent(low)}–{numbers.percent(high)})"


def _measured_on(record: Record) -> str:
    return f"{record.data['date'][:10]} at {commit_label(record.data['commit'], record.data['dirty'])}"


def _convergence(results: Results) -> dict[str, Any] | None:
    runs = results.select("converged")
    if not runs:
        return None
    found = results.one("convergence")
    return {
        "steps": results.configuration["convergence"]["steps"],
        "preset": results.configuration["convergence"]["preset"],
        "difference": f"{found['difference'].value:+.4f}".replace("-", "−"),
        "noise": f"{found['seed noise'].value:.4f}",
        "unigram": f"{found['unigram'].value:.3f}",
        "verdict": "arrive at the same loss" if found.data["alike"] else "do not arrive at the same loss",
        "rows": [
            [str(record.labels["seed"]), f"{record['torch'].value:.4f}", f"{record['jax'].value:.4f}"]
            for record in runs
        ],
    }


def figures(results: Results) -> Sequence[Figure]:
    """The figures that the records allow."""
    found = []
    if results.select("parity", dtype="float32"):
        found.append(
            Figure(
                "losses",
                "Loss by step in float32: the line is torch, the circles are JAX on the same weights and batches.",
                lambda: _draw_losses(results.one("parity", dtype="float32")),
            )
        )
    found += [
        Figure(
            f"differences-{record.labels['dtype']}",
            f"In {record.labels['dtype']}: how far JAX's loss is from torch's at each step (filled), and how far torch "
            "in other bases is from itself (hollow); dashed: the bound for JAX, which follows what the hollow ones "
            "reach. Steps at which the losses are equal to the last bit have no marker.",
            functools.partial(_draw_differences, record),
        )
        for record in results.select("parity")
    ]
    if results.select("engine"):
        found.append(
            Figure(
                "throughput",
                f"Tokens per second of one whole training step of {_preset(results)}; whiskers from the 20th to the "
                "80th percentile of the rounds.",
                lambda: _draw_throughput(results.select("engine")),
            )
        )
    return found


def fastest(results: Results, framework: str) -> Record | None:
    """The engine of a framework with the highest median rate; None if none was timed."""
    return max(results.select("engine", framework=framework), key=lambda record: record["rate"].value, default=None)


def rate(record: Record) -> str:
    """Its tokens per second, as text."""
    return f"{numbers.count(record['rate'].value)} tokens/s"


def _preset(results: Results) -> str:
    return f"`{results.configuration['bench']['preset']}`"


def _parity_row(record: Record) -> list[str]:
    def cell(quantity: str) -> str:
        jax, control = (numbers.error_size(record[f"{quantity}, {of}"].value) for of in ("jax", "control"))
        return f"{jax} / {control} ({numbers.significant(record[f'{quantity}, ratio'].value)})"

    verdict = "outside" if record.data["divergence"] else "within"
    return [*(str(record.labels[key]) for key in ("dtype", "steps", "batch_size")), *map(cell, _QUANTITIES), verdict]


def _first_losses(results: Results) -> list[list[str]]:
    """Some steps of the float32 run, digit by digit."""
    rows = []
    for record in results.select("parity", dtype="float32"):
        steps = len(record.data["torch"])
        for step in sorted({step for step in (0, 1, 2, 4, 9, 19, 29, 39, steps - 1) if step < steps}):
            torch, jax = record.data["torch"][step], record.data["jax"][step]
            control = max(abs(losses[step] - torch) for losses in record.data["controls"])
            strays = map(numbers.error_size, (abs(jax - torch), control))
            rows.append([str(step), f"{torch:.7f}", f"{jax:.7f}", *strays])
    return rows


def _engine_table(results: Results, engines: Iterable[Record]) -> str:
    reference = results.configuration["bench"]["reference"]
    columns: list[tuple[str, Callable[[Quantity], str]]] = [
        ("MFU", lambda quantity: numbers.percent(quantity.value)),
        ("peak memory", numbers.quantity),
    ]
    engines = list(engines)
    columns = [column for column in columns if any(column[0] in record.values for record in engines)]
    header = ["engine", "tokens/s", "step", f"speed over {reference}", *(name for name, _ in columns)]
    rows = []
    for record in sorted(engines, key=lambda record: -record["rate"].value):
        own = record.labels["engine"] == reference
        extra = [show(record[name]) if name in record.values else "–" for name, show in columns]
        rows.append(
            [
                str(record.labels["engine"]),
                _interval(record),
                numbers.quantity(record["step"]),
                "1" if own else numbers.quantity(record["speedup"]),
                *extra,
            ]
        )
    return markdown_table(header, rows)


def _interval(record: Record) -> str:
    found = record["rate"]
    ends = (
        "" if found.low is None or found.high is None else f" ({numbers.count(found.low)}–{numbers.count(found.high)})"
    )
    return f"{numbers.count(found.value)}{ends}"


def _compile_row(record: Record) -> list[str]:
    stages = [
        numbers.quantity(record[f"{stage} time"]) if f"{stage} time" in record.values else "–" for stage in _STAGES
    ]
    return [
        str(record.labels["engine"]),
        numbers.quantity(record["first step"]),
        *stages,
        f"{record['loss'].value:.6f}",
    ]


def _draw_losses(record: Record) -> MatplotlibFigure:
    figure, axes = new_figure(7.0, 3.6)
    steps = np.arange(len(record.data["torch"]))
    axes.plot(steps, record.data["torch"], color=COLOURS[0], linewidth=1.4, label="torch")
    axes.plot(
        steps, record.data["jax"], MARKERS[0], color=COLOURS[5], markersize=5, markerfacecolor="none", label="JAX"
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend(frameon=False)
    return figure


def _draw_differences(record: Record) -> MatplotlibFigure:
    figure, axes = new_figure(7.0, 3.6)
    torch, jax = np.array(record.data["torch"]), np.array(record.data["jax"])
    steps, bounds = np.arange(len(torch)), record.data["bounds"]
    for number, losses in enumerate(record.data["controls"]):
        label = "torch in other bases" if number == 0 else None
        _markers(axes, steps, np.abs(np.array(losses) - torch), COLOURS[0], "none", label)
    _markers(axes, steps, np.abs(jax - torch), COLOURS[5], COLOURS[5], "JAX")
    axes.step(steps, bounds, where="mid", color=COLOURS[5], linestyle="--", linewidth=1.0, label="bound for JAX")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("|Δ loss| against torch (nats per byte)")
    axes.legend(ncols=3, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def _markers(axes: Axes, steps: NDArray, differences: NDArray, colour: str, fill: str, label: str | None) -> None:
    shown = np.where(differences > 0, differences, np.nan)
    axes.plot(steps, shown, MARKERS[0], color=colour, markerfacecolor=fill, markersize=4, label=label)


def _draw_throughput(records: Sequence[Record]) -> MatplotlibFigure:
    records = sorted(records, key=lambda record: record["rate"].value)
    figure, axes = new_figure(7.0, 0.9 + 0.5 * len(records))
    for index, record in enumerate(records):
        found = record["rate"]
        style = 0 if record.labels["framework"] == "torch" else 1
        whiskers = (
            None if found.low is None or found.high is None else [[found.value - found.low], [found.high - found.value]]
        )
        axes.barh(
            index,
            found.value,
            xerr=whiskers,
            color=COLOURS[style],
            hatch=HATCHES[style],
            edgecolor="white",
            height=0.6,
            error_kw={"capsize": 4, "elinewidth": 1.2},
        )
        axes.annotate(
            numbers.count(found.value),
            (max(found.value, found.high or 0), index),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(range(len(records)), [str(record.labels["engine"]) for record in records])
    axes.set_xlabel("tokens per second")
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.18 * max(record["rate"].high or record["rate"].value for record in records))
    label_ticks(axes.xaxis)
    return figure
