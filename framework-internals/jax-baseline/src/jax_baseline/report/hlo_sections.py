"""The report sections on the compiled program: sentences, tables and figures, computed from the records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure as MatplotlibFigure

from benchkit import Quantity, Results, numbers
from benchkit.report import Figure
from benchkit.report.plotting import COLOURS, HATCHES, label_ticks, new_figure
from jax_baseline.diff.records import CompilerTotals, DiffRecord, LongKernel, StepRecord, TargetRecord
from jax_baseline.diff.region_diff import CompiledRegion, Region
from jax_baseline.hlo import RegionCount
from jax_baseline.hlo.kernels import join_ops
from jax_baseline.report.explanation import explain

_COMPILERS = ("XLA", "Inductor")
_PHASES = {"forward": "forward", "backward": "backward", "other": "update"}
_NO_REGION = "(no scope)"


@dataclass(frozen=True)
class _Panel:
    """A figure with one bar for each region and compiler."""

    name: str
    caption: str
    axis: str
    unit: float
    figure: Callable[[CompiledRegion], float | None]


_PANELS = (
    _Panel(
        "bytes",
        "Bytes that kernels read and write",
        "memory traffic of the kernels (MiB)",
        2**20,
        lambda compiled: compiled.bytes,
    ),
    _Panel("seconds", "Time that kernels take", "time of the kernels (ms)", 1e-3, lambda compiled: compiled.seconds),
)


def clauses(results: Results) -> list[str]:
    """Return the clauses of this half for the first sentence of the report."""
    record = next(iter(DiffRecord.select(results)), None)
    if record is None:
        return []
    xla, inductor = (record.compilers[name] for name in _COMPILERS)
    return [
        f"for the same gradients of `{record.preset}` XLA runs {numbers.count(xla.kernels.value)} kernels that move "
        f"{numbers.quantity(xla.bytes)}, Inductor {numbers.count(inductor.kernels.value)} that move "
        f"{numbers.quantity(inductor.bytes)}"
    ]


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
            "Time of one training step by part of the model: the profiler's times of XLA's kernels, with the blocks "
            "merged.",
            partial(_draw_step, record),
        )
        for record in StepRecord.select(results)
        if record.kernels_timed.value  # 0 if the profiler has no access to the GPU's activity
    ]
    for record in DiffRecord.select(results):
        found += [
            Figure(
                _figure_name(panel, record),
                f"{panel.caption} in both compilers, by part of the model: the same loss and gradients of the same "
                "weights and tokens.",
                partial(_draw_regions, record, panel),
            )
            for panel in _PANELS
            if _is_drawn(panel, record)
        ]
    return found


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


def _figure_name(panel: _Panel, record: DiffRecord) -> str:
    return f"regions_{panel.name}_{record.attention}"


def _is_drawn(panel: _Panel, record: DiffRecord) -> bool:
    """Whether any region has this figure. Times are missing if they were not measured."""
    return any(panel.figure(compiled) for region in record.regions for compiled in region.compiled.values())


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
        "figures": [_figure_name(panel, record) for panel in _PANELS if _is_drawn(panel, record)],
        "rows": [_diff_row(region) for region in record.regions],
        "explained": [explain(regions[key]) for key in record.explained],
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
    figure, axes = new_figure(7.0, 0.9 + 0.42 * len(names))
    left = np.zeros(len(names))
    for index, (phase, label) in enumerate(_PHASES.items()):
        times = np.array(
            [
                sum(g.seconds or 0 for g in groups if (g.region or _NO_REGION) == name and g.phase == phase)
                for name in names
            ]
        )
        axes.barh(
            range(len(names)), times * 1e3, left=left * 1e3, label=label, height=0.62,
            color=COLOURS[index], hatch=HATCHES[index], edgecolor="white",
        )  # fmt: skip
        left += times
    for index, total in enumerate(left):
        axes.annotate(
            f"{numbers.with_unit(total, 's')}, {numbers.percent(total / left.sum(), 0)}",
            (total * 1e3, index), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * left.max() * 1e3)
    axes.set_xlabel("time of the kernels in one step (ms)")
    axes.grid(visible=False, axis="y")
    label_ticks(axes.xaxis)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_regions(record: DiffRecord, panel: _Panel) -> MatplotlibFigure:
    """Draw one bar for each region and compiler."""
    regions = [region for region in record.regions if any(one.bytes for one in region.compiled.values())]
    figure, axes = new_figure(7.0, 1.0 + 0.5 * len(regions))
    for index, compiler in enumerate(_COMPILERS):
        values = np.array([(panel.figure(region.compiled[compiler]) or 0) / panel.unit for region in regions])
        positions = np.arange(len(regions)) + (index - 0.5) * 0.38
        axes.barh(
            positions,
            values,
            height=0.36,
            label=compiler,
            color=COLOURS[index],
            hatch=HATCHES[index],
            edgecolor="white",
        )
        for position, value, region in zip(positions, values, regions, strict=True):
            inside = not value and region.fused_into[compiler]
            axes.annotate(
                "inside another part's kernel" if inside else numbers.significant(value),
                (value, position), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
            )  # fmt: skip
    axes.set_yticks(
        range(len(regions)), [f"{region.name or '(not assigned)'}, {_PHASES[region.phase]}" for region in regions]
    )
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(panel.axis)
    axes.grid(visible=False, axis="y")
    label_ticks(axes.xaxis)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure
