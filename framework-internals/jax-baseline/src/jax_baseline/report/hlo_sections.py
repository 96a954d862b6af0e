"""The report sections on the compiled program: sentences, tables and figures, computed from the records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure

from benchkit import Quantity, Results, numbers
from benchkit.report import Figure
from benchkit.report.plotting import COLOURS, HATCHES, hover, label_ticks, new_figure, new_panels
from jax_baseline.diff.records import CompilerTotals, DiffRecord, LongKernel, StepRecord, TargetRecord
from jax_baseline.diff.region_diff import CompiledRegion, Region
from jax_baseline.hlo import RegionCount
from jax_baseline.hlo.kernels import join_ops
from jax_baseline.report.explanation import explain, summary

_COMPILERS = ("XLA", "Inductor")
_PHASES = {"forward": "forward", "backward": "backward", "other": "update"}
_NO_REGION = "(no scope)"


@dataclass(frozen=True)
class _Panel:
    """A panel with one bar for each region and compiler."""

    axis: str
    unit: float
    name: str
    figure: Callable[[CompiledRegion], float | None]


_PANELS = (
    _Panel("time of the kernels (ms), lower is better", 1e-3, "s", lambda compiled: compiled.seconds),
    _Panel("bytes that they read and write (MiB),\nlower is better", 2**20, "B", lambda compiled: compiled.bytes),
)


def slowest_part(record: DiffRecord) -> str:
    """Name the part of the model in which XLA's kernels take longest beside Inductor's; empty without times."""
    times: dict[str, list[float]] = {}
    for region in record.regions:
        seconds = (region.compiled[name].seconds or 0.0 for name in _COMPILERS)
        times[region.name] = [sum(pair) for pair in zip(times.get(region.name, (0.0, 0.0)), seconds, strict=True)]
    name = max(times, key=lambda name: times[name][0] - times[name][1], default="")
    if not name or times[name][0] <= times[name][1]:
        return ""
    xla, inductor = (numbers.with_unit(seconds, "s") for seconds in times[name])
    regions = [region for region in record.regions if region.name == name]
    text = f"`{name}` differs most in time: its kernels take {xla} in XLA and {inductor} in Inductor"
    calls = [
        call for region in regions for call in region.compiled["Inductor"].libraries if call.startswith("torch.ops")
    ]
    if calls:
        text += f", which calls `{calls[0].removeprefix('torch.ops.').removesuffix('.default')}`"
    written = max((one for region in regions for one in region.only["XLA"]), key=lambda one: one.bytes, default=None)
    if written:
        text += f". Only XLA writes {written.count} × `{written.tensor}` to memory there"
    return f"{text}."


def context(results: Results) -> dict[str, Any]:
    """Return the variables of the template."""
    step = next(iter(StepRecord.select(results)), None)
    targets = TargetRecord.select(results)
    return {
        "step": _step(step) if step else None,
        "diffs": [_diff(record, step) for record in DiffRecord.select(results)],
        "target": _target(targets) if targets else None,
        "on_gpu": results.environment.gpu is not None,
    }


def figures(results: Results) -> Sequence[Figure]:
    """Return the figures that the records allow."""
    found = [
        Figure(
            "step_parts",
            "The profiler's times of XLA's kernels in one training step, with the blocks merged.",
            partial(_draw_step, record),
            alt="Time of one training step by part of the model",
        )
        for record in StepRecord.select(results)
        if record.kernels_timed.value  # 0 if the profiler has no access to the GPU's activity
    ]
    return found + [
        Figure(
            f"regions_{record.attention}",
            f"The same loss and gradients in both compilers ({scope(record)}; JAX: `{record.attention}` attention). "
            "A part without a bar is inside another part's kernel, or was not timed.",
            partial(_draw_regions, record),
            alt=f"Time and bytes of both compilers by part of the model, JAX with {record.attention} attention",
        )
        for record in DiffRecord.select(results)
        if _panels(record)
    ]


def scope(record: DiffRecord) -> str:
    """Say what both compilers compiled."""
    blocks = f"{record.layers} block{'s' if record.layers > 1 else ''}"
    return f"`{record.preset}`, {blocks}, {record.batch_size} sequences, {record.dtype}"


def _step(record: StepRecord) -> dict[str, Any]:
    timed = {name: figure for name, figure in vars(record).items() if isinstance(figure, Quantity)}
    return {
        **{name: getattr(record, name) for name in record.record_labels},
        "summary": record.summary,
        "value": {name: numbers.quantity(figure) for name, figure in timed.items()},
        "libraries": bool(record.library_flops.value),
        "flops_ratio": _relative_difference(record.flops, record.library_flops, record.xla_flops),
        "bytes_ratio": _relative_difference(record.whole_bytes, record.library_bytes, record.xla_bytes),
        "kind_rows": [[kind, numbers.count(count)] for kind, count in record.summary.kinds.items()],
        "region_rows": [_region_row(group) for group in record.summary.regions],
        "longest_rows": [_kernel_row(kernel) for kernel in record.longest],
    }


def _relative_difference(ours: Quantity, libraries: Quantity, xla: Quantity | None) -> str | None:
    """Format (ours − libraries) / xla − 1; None if XLA has no count."""
    if xla is None:
        return None
    difference = (ours.value - libraries.value) / xla.value - 1
    sign = "−" if difference < 0 else "+"
    return "equal" if difference == 0 else f"relative difference {sign}{numbers.error_size(abs(difference))}"


def _region_row(group: RegionCount) -> list[str]:
    return [
        group.region or _NO_REGION,
        _PHASES[group.phase],
        numbers.count(group.kernels),
        numbers.count(group.dots),
        numbers.with_unit(group.flops, "FLOP"),
        numbers.with_unit(group.bytes, "B"),
        "–" if group.seconds is None else numbers.with_unit(group.seconds, "s"),
        "–" if not group.seconds else numbers.with_unit(group.bytes / group.seconds, "B/s"),
    ]


def _kernel_row(kernel: LongKernel) -> list[str]:
    ops = join_ops(kernel.ops)
    return [
        f"`{kernel.name}`",
        f"{kernel.kind}: {ops}" if ops not in kernel.kind else kernel.kind,
        f"{kernel.region or _NO_REGION}, {_PHASES[kernel.phase]}",
        f"`{kernel.location}`" if kernel.location else "–",
        "–" if kernel.seconds is None else numbers.with_unit(kernel.seconds, "s"),
        "–" if not kernel.seconds else numbers.with_unit(kernel.flops / kernel.seconds, "FLOP/s"),
        "–" if not kernel.seconds else numbers.with_unit(kernel.bytes / kernel.seconds, "B/s"),
    ]


def _panels(record: DiffRecord) -> list[_Panel]:
    """Return the panels that any region has a figure for. Times are missing if they were not measured."""
    return [
        panel
        for panel in _PANELS
        if any(panel.figure(compiled) for region in record.regions for compiled in region.compiled.values())
    ]


def _longer_than_step(record: DiffRecord, step: StepRecord | None) -> str:
    """Return the time of the whole step if XLA took longer for the loss and gradients alone; else an empty string."""
    time = record.compilers["XLA"].time
    if step is None or time is None or step.step_time is None:
        return ""
    same = all(
        getattr(step, name) == getattr(record, name)
        for name in ("preset", "layers", "batch_size", "dtype", "attention")
    )
    return numbers.quantity(step.step_time) if same and time.value > step.step_time.value else ""


def _diff(record: DiffRecord, step: StepRecord | None) -> dict[str, Any]:
    regions = {(region.name, region.phase): region for region in record.regions}
    difference = record.largest_difference
    return {
        **{name: getattr(record, name) for name in record.record_labels},
        "common": numbers.quantity(record.common),
        "compilers": {name: _compiler(totals) for name, totals in record.compilers.items()},
        "difference": None if difference is None else numbers.error_size(difference.value),
        "shorter_step": _longer_than_step(record, step),
        "has_values": bool(record.common.value),
        "scope": scope(record),
        "figure": f"regions_{record.attention}" if _panels(record) else "",
        "slowest": slowest_part(record),
        "rows": [_diff_row(region) for region in record.regions],
        "explained": [
            {"summary": summary(regions[key]), "details": explain(regions[key], with_summary=False)}
            for key in record.explained
        ],
        "notes": [f"{compiler}: {note}" for compiler, notes in record.notes.items() for note in notes],
    }


def _compiler(totals: CompilerTotals) -> dict[str, Any]:
    """Return the totals as text."""
    return {
        **{name: numbers.quantity(figure) for name, figure in vars(totals).items() if isinstance(figure, Quantity)},
        "assigned": {name: numbers.quantity(figure) for name, figure in vars(totals.assigned).items()},
    }


def _diff_row(region: Region) -> list[str]:
    cells = [region.name or "(not assigned)", _PHASES[region.phase]]
    for compiler in _COMPILERS:
        compiled = region.compiled[compiler]
        cells += [
            numbers.count(compiled.kernels),
            numbers.with_unit(compiled.bytes, "B"),
            "–" if compiled.seconds is None else numbers.with_unit(compiled.seconds, "s"),
        ]
    return cells


def _target(records: Sequence[TargetRecord]) -> dict[str, Any]:
    first = records[0]
    return {
        **{name: getattr(first, name) for name in first.record_labels},
        "rows": [
            [
                record.layout,
                str(record.devices),
                numbers.count(record.kernels.value),
                ", ".join(
                    f"{name.removesuffix('-start')} {count} ×" for name, count in record.summary.collectives.items()
                )
                or "none",
                numbers.quantity(record.arguments),
                numbers.quantity(record.temporaries),
                numbers.quantity(record.compile_time),
            ]
            for record in records
        ],
        "kind_rows": [[kind, numbers.count(count)] for kind, count in first.summary.kinds.items()],
        "region_rows": [_region_row(group)[:6] for group in first.summary.regions],
    }


def _draw_step(record: StepRecord) -> MatplotlibFigure:
    groups = [group for group in record.summary.regions if group.seconds]
    names = list(dict.fromkeys(group.region or _NO_REGION for group in groups))
    figure, axes = new_figure(7.0, 0.9 + 0.36 * len(names))
    left = np.zeros(len(names))
    for index, (phase, label) in enumerate(_PHASES.items()):
        times = np.array(
            [
                sum(g.seconds or 0 for g in groups if (g.region or _NO_REGION) == name and g.phase == phase)
                for name in names
            ]
        )
        bars = axes.barh(
            range(len(names)), times * 1e3, left=left * 1e3, label=label, height=0.62,
            color=COLOURS[index], hatch=HATCHES[index], edgecolor="white",
        )  # fmt: skip
        for bar, name, seconds in zip(bars, names, times, strict=True):
            hover(bar, f"{name}, {label}: {numbers.with_unit(seconds, 's')}")
        left += times
    for index, total in enumerate(left):
        axes.annotate(
            f"{numbers.with_unit(total, 's')}, {numbers.percent(total / left.sum(), 0)}",
            (total * 1e3, index), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * left.max() * 1e3)
    axes.set_xlabel("time of the kernels in one step (ms), lower is better")
    axes.grid(visible=False, axis="y")
    label_ticks(axes.xaxis)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_regions(record: DiffRecord) -> MatplotlibFigure:
    """Draw a panel for time and one for bytes, with one bar for each region and compiler."""
    regions = [region for region in record.regions if any(one.bytes for one in region.compiled.values())]
    panels = _panels(record)
    figure, (row,) = new_panels(
        1, len(panels), width=2.2 + 3.6 * len(panels), height=1.0 + 0.36 * len(regions), sharey="all", sharex=False
    )
    for axes, panel in zip(row, panels, strict=True):
        for index, compiler in enumerate(_COMPILERS):
            _draw_bars(axes, panel, regions, index, compiler)
        axes.margins(x=0.15)
        axes.set_xlabel(panel.axis)
        axes.grid(visible=False, axis="y")
        axes.locator_params(axis="x", nbins=5)
        label_ticks(axes.xaxis)
    row[0].set_yticks(
        range(len(regions)), [f"{region.name or '(not assigned)'}, {_PHASES[region.phase]}" for region in regions]
    )
    row[0].invert_yaxis()
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_bars(axes: Axes, panel: _Panel, regions: Sequence[Region], index: int, compiler: str) -> None:
    positions = np.arange(len(regions)) + (index - 0.5) * 0.38
    figures = [panel.figure(region.compiled[compiler]) or 0.0 for region in regions]
    bars = axes.barh(
        positions, np.array(figures) / panel.unit, height=0.36, label=compiler, color=COLOURS[index],
        hatch=HATCHES[index], edgecolor="white",
    )  # fmt: skip
    for bar, position, figure, region in zip(bars, positions, figures, regions, strict=True):
        hover(bar, f"{compiler}, {region.name}, {_PHASES[region.phase]}: {numbers.with_unit(figure, panel.name)}")
        text = numbers.significant(figure / panel.unit) if figure else "–"
        axes.annotate(
            text, (figure / panel.unit, position), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7.5
        )
