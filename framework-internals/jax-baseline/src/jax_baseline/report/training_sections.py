"""The report sections on parity and throughput: sentences, tables and figures, computed from the records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure
from numpy.typing import NDArray

from benchkit import Quantity, Results, numbers
from benchkit.environment import commit_label
from benchkit.report import Figure, markdown_table
from benchkit.report.plotting import COLOURS, HATCHES, MARKERS, label_ticks, new_figure
from jax_baseline.parity import QUANTITIES
from jax_baseline.parity.records import ConvergedRecord, ConvergenceRecord, MeshRecord, MistakeRecord, ParityRecord
from jax_baseline.timing.records import EngineRecord, ScalingFigures, ScalingRecord

# A mistake counts as caught if the comparison finds it in this many steps, which take seconds.
_CAUGHT_WITHIN = 4
_STAGES = ("trace", "lower", "compile")


def clauses(results: Results) -> list[str]:
    """Return the clauses of this half for the first sentence of the report."""
    parts = []
    if parities := ParityRecord.select(results):
        within = [record for record in parities if record.divergence is None]
        shown = next((record for record in parities if record.dtype == "float32"), parities[0])
        loss = shown.deviations["loss"]
        parts.append(
            f"with the same weights JAX stays within its bounds of torch in {len(within)} of {len(parities)} dtypes "
            f"(largest loss difference over {shown.steps} steps in {shown.dtype} {numbers.error_size(loss.jax.value)} "
            f"nats; a permuted reference differs from torch by {numbers.error_size(loss.control.value)})"
        )
    if mistakes := _mistakes(results):
        caught = [record for record in mistakes if _caught(record)]
        parts.append(
            f"of {len(mistakes)} planted porting mistakes {len(caught)} are caught within {_CAUGHT_WITHIN} steps"
        )
    if best := fastest(results, "jax"):
        rival = fastest(results, "torch")
        parts.append(
            f"`{best.engine}` trains {_preset(results)} at {_rate(best)}"
            + (f", `{rival.engine}` at {_rate(rival)}" if rival else "")
        )
    return parts


def context(results: Results) -> dict[str, Any]:
    """Return the variables of the template for this half."""
    parities, engines = ParityRecord.select(results), EngineRecord.select(results)
    return {
        "parity": results.configuration["parity"],
        "bench": results.configuration["bench"],
        "times_control": {record.dtype: numbers.count(record.times_control.value) for record in parities},
        "parity_rows": [_parity_row(record) for record in parities],
        "divergences": [(record.dtype, record.divergence) for record in parities if record.divergence],
        "first_losses": [row for record in parities if record.dtype == "float32" for row in _loss_rows(record)],
        "mistakes": _mistakes_section(results),
        "has_mfu": any(record.figures.mfu for record in engines),
        "engine_table": _engine_table(engines, results.configuration["bench"]["reference"]),
        "compile_rows": [_compile_row(record) for record in engines],
        "meshes": _meshes(results),
        "scaling": _scaling(results),
        "convergence": _convergence(results),
    }


def _mistakes(results: Results) -> list[MistakeRecord]:
    return [record for record in MistakeRecord.select(results) if record.mistake]


def _caught(record: MistakeRecord) -> bool:
    return record.step is not None and record.step < _CAUGHT_WITHIN


def _mistakes_section(results: Results) -> dict[str, Any] | None:
    mistakes = _mistakes(results)
    if not mistakes:
        return None
    correct = MistakeRecord.one(results, mistake="")
    return {
        "within": _CAUGHT_WITHIN,
        "number": len(mistakes),
        "last": results.configuration["mutations"]["last"],
        "caught": sum(map(_caught, mistakes)),
        "missed": [record.mistake for record in mistakes if not _caught(record)],
        "correct": "passes" if correct.step is None else f"is caught too ({correct.where})",
        "rows": [
            [
                record.mistake,
                "–" if record.step is None else str(record.step),
                record.where or "–",
                "–" if record.step is None else numbers.significant(record.times.value),
            ]
            for record in mistakes
        ],
    }


def _meshes(results: Results) -> dict[str, Any] | None:
    records = MeshRecord.select(results)
    if not records:
        return None
    one_device, *others = records
    permuted = [
        max(abs(one - other) for one, other in zip(losses, one_device.losses, strict=True))
        for losses in one_device.controls
    ]
    return {
        "steps": len(one_device.losses),
        "permuted": numbers.error_size(max(permuted)),
        "largest": numbers.error_size(max(record.difference.value for record in others)),
        "rows": [
            [
                f"{record.data} × {record.fsdp}",
                numbers.error_size(record.difference.value),
                numbers.quantity(record.state),
                _collectives(record),
            ]
            for record in records
        ],
    }


def _scaling(results: Results) -> dict[str, Any] | None:
    records = ScalingRecord.select(results)
    if not records:
        return None
    sources = {record.source for record in records}
    return {
        **results.configuration["sweep"],
        "on": sorted({f"{one.date[:10]} at {commit_label(one.commit, one.dirty)}" for one in sources}),
        "failed": [(f"{record.data} × {record.fsdp}", record.failed) for record in records if record.failed],
        "rows": [_scaling_row(record, record.figures) for record in records if record.figures],
    }


def _scaling_row(record: ScalingRecord, figures: ScalingFigures) -> list[str]:
    efficiency = figures.efficiency
    low, high = (efficiency.value if end is None else end for end in (efficiency.low, efficiency.high))
    return [
        f"{record.data} × {record.fsdp}",
        _interval(figures.rate),
        numbers.quantity(figures.step),
        numbers.quantity(figures.step_of_one),
        f"{numbers.percent(efficiency.value)} ({numbers.percent(low)}–{numbers.percent(high)})",
        _optional(figures.peak_memory),
        _collectives(record),
    ]


def _collectives(record: MeshRecord | ScalingRecord) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(record.collectives.items())) or "none"


def _optional(figure: Quantity | None) -> str:
    return "–" if figure is None else numbers.quantity(figure)


def _convergence(results: Results) -> dict[str, Any] | None:
    runs = ConvergedRecord.select(results)
    if not runs:
        return None
    found = ConvergenceRecord.one(results)
    return {
        "steps": results.configuration["convergence"]["steps"],
        "preset": results.configuration["convergence"]["preset"],
        "difference": f"{found.difference.value:+.4f}".replace("-", "−"),
        "noise": f"{found.seed_noise.value:.4f}",
        "unigram": f"{found.unigram.value:.3f}",
        "verdict": "reach the same loss" if found.alike else "do not reach the same loss",
        "rows": [[str(record.seed), f"{record.torch.value:.4f}", f"{record.jax.value:.4f}"] for record in runs],
    }


def figures(results: Results) -> Sequence[Figure]:
    """Return the figures that the records allow."""
    parities, engines = ParityRecord.select(results), EngineRecord.select(results)
    found = [
        Figure(
            "losses",
            "Loss by step in float32. The line is torch; the circles are JAX with the same weights and batches.",
            partial(_draw_losses, record),
        )
        for record in parities
        if record.dtype == "float32"
    ]
    found += [
        Figure(
            f"differences-{record.dtype}",
            f"Difference of the loss from torch at each step in {record.dtype}: JAX (filled) and permuted references "
            "(hollow). The dashed line is the bound for JAX, which follows the permuted references. Steps with equal "
            "losses have no marker.",
            partial(_draw_differences, record),
        )
        for record in parities
    ]
    if engines:
        found.append(
            Figure(
                "throughput",
                f"Tokens per second of one whole training step of {_preset(results)}. Whiskers show the 20th to the "
                "80th percentile of the rounds.",
                partial(_draw_throughput, engines),
            )
        )
    return found


def fastest(results: Results, framework: str) -> EngineRecord | None:
    """Return the engine of a framework with the highest median rate; None if none was timed."""
    engines = EngineRecord.select(results, framework=framework)
    return max(engines, key=lambda record: record.figures.rate.value, default=None)


def _rate(record: EngineRecord) -> str:
    return f"{numbers.count(record.figures.rate.value)} tokens/s"


def _preset(results: Results) -> str:
    return f"`{results.configuration['bench']['preset']}`"


def _parity_row(record: ParityRecord) -> list[str]:
    cells = [
        f"{numbers.error_size(found.jax.value)} / {numbers.error_size(found.control.value)} "
        f"({numbers.significant(found.ratio.value)})"
        for found in (record.deviations[quantity] for quantity in QUANTITIES)
    ]
    verdict = "outside" if record.divergence else "within"
    return [record.dtype, str(record.steps), str(record.batch_size), *cells, verdict]


def _loss_rows(record: ParityRecord) -> list[list[str]]:
    """Return some steps with all digits of the losses."""
    rows = []
    steps = len(record.torch)
    for step in sorted({step for step in (0, 1, 2, 4, 9, 19, 29, 39, steps - 1) if step < steps}):
        torch, jax = record.torch[step], record.jax[step]
        control = max(abs(losses[step] - torch) for losses in record.controls)
        differences = map(numbers.error_size, (abs(jax - torch), control))
        rows.append([str(step), f"{torch:.7f}", f"{jax:.7f}", *differences])
    return rows


def _engine_table(engines: Sequence[EngineRecord], reference: str) -> str:
    columns: list[tuple[str, Callable[[EngineRecord], str]]] = []
    if any(record.figures.mfu for record in engines):
        columns.append(("MFU", lambda record: numbers.percent(record.figures.mfu.value) if record.figures.mfu else "–"))
    if any(record.figures.peak_memory for record in engines):
        columns.append(("peak memory", lambda record: _optional(record.figures.peak_memory)))
    header = ["engine", "tokens/s", "step", f"speed over {reference}", *(name for name, _ in columns)]
    rows = [
        [
            record.engine,
            _interval(record.figures.rate),
            numbers.quantity(record.figures.step),
            "1" if record.engine == reference else numbers.quantity(record.figures.speedup),
            *(cell(record) for _, cell in columns),
        ]
        for record in sorted(engines, key=lambda record: -record.figures.rate.value)
    ]
    return markdown_table(header, rows)


def _interval(rate: Quantity) -> str:
    ends = "" if rate.low is None or rate.high is None else f" ({numbers.count(rate.low)}–{numbers.count(rate.high)})"
    return f"{numbers.count(rate.value)}{ends}"


def _compile_row(record: EngineRecord) -> list[str]:
    stages = [_optional(record.figures.compile_stages.get(stage)) for stage in _STAGES]
    return [record.engine, numbers.quantity(record.figures.first_step), *stages, f"{record.figures.loss.value:.6f}"]


def _draw_losses(record: ParityRecord) -> MatplotlibFigure:
    figure, axes = new_figure(7.0, 3.6)
    steps = np.arange(len(record.torch))
    axes.plot(steps, record.torch, color=COLOURS[0], linewidth=1.4, label="torch")
    axes.plot(steps, record.jax, MARKERS[0], color=COLOURS[5], markersize=5, markerfacecolor="none", label="JAX")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend(frameon=False)
    return figure


def _draw_differences(record: ParityRecord) -> MatplotlibFigure:
    figure, axes = new_figure(7.0, 3.6)
    torch, jax = np.array(record.torch), np.array(record.jax)
    steps = np.arange(len(torch))
    for number, losses in enumerate(record.controls):
        label = "permuted references" if number == 0 else None
        _markers(axes, steps, np.abs(np.array(losses) - torch), COLOURS[0], "none", label)
    _markers(axes, steps, np.abs(jax - torch), COLOURS[5], COLOURS[5], "JAX")
    axes.step(steps, record.bounds, where="mid", color=COLOURS[5], linestyle="--", linewidth=1.0, label="bound for JAX")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("|Δ loss| against torch (nats per byte)")
    axes.legend(ncols=3, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def _markers(axes: Axes, steps: NDArray, differences: NDArray, colour: str, fill: str, label: str | None) -> None:
    shown = np.where(differences > 0, differences, np.nan)
    axes.plot(steps, shown, MARKERS[0], color=colour, markerfacecolor=fill, markersize=4, label=label)


def _draw_throughput(records: Sequence[EngineRecord]) -> MatplotlibFigure:
    records = sorted(records, key=lambda record: record.figures.rate.value)
    figure, axes = new_figure(7.0, 0.9 + 0.5 * len(records))
    for index, record in enumerate(records):
        rate = record.figures.rate
        style = 0 if record.framework == "torch" else 1
        whiskers = None
        if rate.low is not None and rate.high is not None:
            whiskers = [[rate.value - rate.low], [rate.high - rate.value]]
        axes.barh(
            index, rate.value, xerr=whiskers, color=COLOURS[style], hatch=HATCHES[style], edgecolor="white", height=0.6,
            error_kw={"capsize": 4, "elinewidth": 1.2},
        )  # fmt: skip
        axes.annotate(
            numbers.count(rate.value), (max(rate.value, rate.high or 0), index), xytext=(8, 0),
            textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
    axes.set_yticks(range(len(records)), [record.engine for record in records])
    axes.set_xlabel("tokens per second")
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.18 * max(record.figures.rate.high or record.figures.rate.value for record in records))
    label_ticks(axes.xaxis)
    return figure
