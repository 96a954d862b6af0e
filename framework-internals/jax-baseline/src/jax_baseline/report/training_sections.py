"""The report sections on parity, meshes and scaling: sentences, tables and figures, computed from the records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure
from numpy.typing import NDArray

from benchkit import Results, numbers
from benchkit.environment import commit_label
from benchkit.report import Figure
from benchkit.report.plotting import COLOURS, MARKERS, hover_points, new_panels
from jax_baseline.parity import REPORTED
from jax_baseline.parity.records import ConvergedRecord, ConvergenceRecord, MeshRecord, MistakeRecord, ParityRecord
from jax_baseline.report.engine_sections import interval, optional
from jax_baseline.timing.records import ScalingFigures, ScalingRecord

# A mistake counts as caught if the comparison finds it in this many steps, which take seconds.
_CAUGHT_WITHIN = 4


def verdict(results: Results) -> str:
    """Return the sentence on parity for the finding; empty if nothing was compared."""
    parities, mistakes = ParityRecord.select(results), _mistakes(results)
    caught = f"{sum(map(_caught, mistakes))} of {len(mistakes)} planted mistakes are caught" if mistakes else ""
    if not parities:
        return caught
    within = [record for record in parities if record.divergence is None]
    same = "computes the same as torch" if len(within) == len(parities) else "deviates from torch"
    preset = results.configuration["parity"]["preset"]
    share = f"`{preset}` is within the bounds of rounding in {len(within)} of {len(parities)} dtypes"
    return f"JAX {same}: {', and '.join(part for part in (share, caught) if part)}"


def headline(results: Results) -> str:
    """Return the clause on parity for the index: shorter than :func:`verdict`."""
    parities = ParityRecord.select(results)
    within = sum(record.divergence is None for record in parities)
    return f"JAX matches torch in {within} of {len(parities)} dtypes" if parities else ""


def context(results: Results) -> dict[str, Any]:
    """Return the variables of the template for this half."""
    parities = ParityRecord.select(results)
    return {
        "parity": results.configuration["parity"],
        "times_control": {record.dtype: numbers.count(record.times_control.value) for record in parities},
        "parity_rows": [_parity_row(record) for record in parities],
        "divergences": [(record.dtype, record.divergence) for record in parities if record.divergence],
        "first_losses": [row for record in parities if record.dtype == "float32" for row in _loss_rows(record)],
        "mistakes": _mistakes_section(results),
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
        interval(figures.rate),
        numbers.quantity(figures.step),
        numbers.quantity(figures.step_of_one),
        f"{numbers.percent(efficiency.value)} ({numbers.percent(low)}–{numbers.percent(high)})",
        optional(figures.peak_memory),
        _collectives(record),
    ]


def _collectives(record: MeshRecord | ScalingRecord) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(record.collectives.items())) or "none"


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
    """Return the figure of the losses, if they were compared."""
    parities = ParityRecord.select(results)
    if not parities:
        return []
    return [
        Figure(
            "losses",
            "Difference of the loss from torch at each step: JAX (filled) and permuted references (hollow), which show "
            "the effect of rounding. The dashed line is the bound for JAX. Steps with equal losses have no marker.",
            partial(_draw_differences, parities),
            alt="Difference of the loss from torch by step, one panel for each dtype",
        )
    ]


def _parity_row(record: ParityRecord) -> list[str]:
    cells = [
        f"{numbers.error_size(found.jax.value)} / {numbers.error_size(found.control.value)} "
        f"({numbers.significant(found.ratio.value)})"
        for found in (record.deviations[quantity] for quantity in REPORTED)
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


def _draw_differences(records: Sequence[ParityRecord]) -> MatplotlibFigure:
    """Draw one panel for each dtype."""
    figure, (row,) = new_panels(1, len(records), width=3.2 * len(records), height=3.4, sharey="col")
    for axes, record in zip(row, records, strict=True):
        torch, jax = np.array(record.torch), np.array(record.jax)
        steps = np.arange(len(torch))
        for number, losses in enumerate(record.controls):
            label = "permuted references" if number == 0 else None
            _markers(axes, steps, np.abs(np.array(losses) - torch), COLOURS[0], "none", label)
        differences = np.abs(jax - torch)
        _markers(axes, steps, differences, COLOURS[5], COLOURS[5], "JAX")
        axes.step(
            steps, record.bounds, where="mid", color=COLOURS[5], linestyle="--", linewidth=1.0, label="JAX's bound"
        )
        shown = [step for step in range(len(steps)) if differences[step] > 0]
        texts = [
            f"{record.dtype}, step {step}: JAX {numbers.error_size(differences[step])}, "
            f"bound {numbers.error_size(record.bounds[step])} nats"
            for step in shown
        ]
        hover_points(axes, shown, [differences[step] for step in shown], texts)
        axes.set_yscale("log")
        axes.set_title(record.dtype, fontsize=10)
        axes.set_xlabel("training step")
    row[0].set_ylabel("|Δ loss| to torch (nats per byte),\nlower is closer")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def _markers(axes: Axes, steps: NDArray, differences: NDArray, colour: str, fill: str, label: str | None) -> None:
    shown = np.where(differences > 0, differences, np.nan)
    axes.plot(steps, shown, MARKERS[0], color=colour, markerfacecolor=fill, markersize=4, label=label, linestyle="none")
