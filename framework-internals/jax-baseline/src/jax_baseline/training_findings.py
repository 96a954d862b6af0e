"""What the results say of parity and throughput: sentences, tables and figures, computed from the records alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure as MatplotlibFigure

from benchkit import Quantity, Record, Results, numbers
from benchkit.plotting import COLOURS, HATCHES, MARKERS, new_figure
from benchkit.report import Figure, markdown_table

_QUANTITIES = ("loss", "gradient norm", "gradients", "weights")
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
            f"{numbers.error_size(shown['loss, jax'].value)} nats; torch with another attention is "
            f"{numbers.error_size(shown['loss, control'].value)} from itself)"
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
    engines = results.select("engine")
    return {
        "parity": results.configuration["parity"],
        "bench": results.configuration["bench"],
        "times_control": {
            record.labels["dtype"]: numbers.count(record["times control"].value) for record in results.select("parity")
        },
        "parity_rows": [_parity_row(record) for record in results.select("parity")],
        "divergences": [
            (record.labels["dtype"], record.data["divergence"])
            for record in results.select("parity")
            if record.data["divergence"]
        ],
        "first_losses": _first_losses(results),
        "engine_table": _engine_table(results, engines),
        "compile_rows": [_compile_row(record) for record in engines],
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
    if results.select("parity"):
        found.append(
            Figure(
                "differences",
                "How far JAX's loss is from torch's at each step (filled), and how far torch is from itself when "
                "its attention is written out (hollow); dashed: the bound for JAX. Each dtype has its own level of "
                "rounding; steps at which the losses are equal to the last bit have no marker.",
                lambda: _draw_differences(results.select("parity")),
            )
        )
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
        jax, control, bound = (record[f"{quantity}, {of}"].value for of in ("jax", "control", "bound"))
        return f"{numbers.error_size(jax)} / {numbers.error_size(control)} ≤ {numbers.error_size(bound)}"

    verdict = "outside" if record.data["divergence"] else "within"
    return [*(str(record.labels[key]) for key in ("dtype", "steps", "batch_size")), *map(cell, _QUANTITIES), verdict]


def _first_losses(results: Results) -> list[list[str]]:
    """Some steps of the float32 run, digit by digit."""
    rows = []
    for record in results.select("parity", dtype="float32"):
        steps = len(record.data["torch"])
        for step in sorted({step for step in (0, 1, 2, 4, 9, 19, 29, 39, steps - 1) if step < steps}):
            torch, jax, control = (record.data[side][step] for side in ("torch", "jax", "control"))
            rows.append(
                [str(step), f"{torch:.7f}", f"{jax:.7f}", *(numbers.error_size(abs(x - torch)) for x in (jax, control))]
            )
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
    axes.legend()
    return figure


def _draw_differences(records: Sequence[Record]) -> MatplotlibFigure:
    figure, axes = new_figure(7.0, 4.6)
    for index, record in enumerate(records):
        torch, jax, control = (np.array(record.data[side]) for side in ("torch", "jax", "control"))
        steps, colour = np.arange(len(torch)), COLOURS[(0, 5, 2)[index % 3]]
        for losses, side, fill in ((jax, "JAX", colour), (control, "torch, other attention", "none")):
            difference = np.abs(losses - torch)
            axes.plot(
                steps,
                np.where(difference > 0, difference, np.nan),
                MARKERS[index],
                color=colour,
                markerfacecolor=fill,
                markersize=4,
                label=f"{record.labels['dtype']}: {side}",
            )
        axes.axhline(record["loss, bound"].value, color=colour, linestyle="--", linewidth=1.0)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("|Δ loss| against torch (nats per byte)")
    axes.legend(ncols=len(records), fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


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
    axes.xaxis.set_major_formatter(lambda value, _: numbers.count(value))
    return figure
