"""What the results say of the compiled program: sentences, tables and figures, computed from the records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure as MatplotlibFigure

from benchkit import Record, Results, numbers
from benchkit.plotting import COLOURS, HATCHES, label_ticks, new_figure
from benchkit.report import Figure
from jax_baseline.diff.explanation import explain

_COMPILERS = ("XLA", "Inductor")
_PHASES = {"forward": "forward", "backward": "backward", "other": "update"}
_NO_REGION = "(no scope)"
_SIZE = ("preset", "layers", "batch_size", "dtype", "attention")
# What is drawn of a comparison: the field, its unit, the caption, the axis.
_PANELS = (
    ("bytes", 2**20, "Bytes that kernels read and write", "memory traffic of the kernels (MiB)"),
    ("seconds", 1e-3, "Time that kernels take", "time of the kernels (ms)"),
)


def clauses(results: Results) -> list[str]:
    """What this half has to say in the sentence that opens the report."""
    return [
        f"for the same gradients of `{record.labels['preset']}` XLA runs {numbers.count(record['XLA kernels'].value)} "
        f"kernels that move {numbers.quantity(record['XLA bytes'])}, Inductor "
        f"{numbers.count(record['Inductor kernels'].value)} that move {numbers.quantity(record['Inductor bytes'])}"
        for record in results.select("region diff")[:1]
    ]


def context(results: Results) -> dict[str, Any]:
    """The template's variables."""
    step = next(iter(results.select("hlo step")), None)
    targets = results.select("hlo target")
    return {
        "step": _step(step) if step else None,
        "diffs": [_diff(record, step) for record in results.select("region diff")],
        "target": _target(targets) if targets else None,
        "on_gpu": results.environment.gpu is not None,
    }


def figures(results: Results) -> Sequence[Figure]:
    """The figures that the records allow."""
    found = [
        Figure(
            "step_parts",
            "Where the time of one training step goes, by part of the model: the profiler's time of XLA's kernels, "
            "blocks taken together.",
            partial(_draw_step, record),
        )
        for record in results.select("hlo step")
        if record["kernels timed"].value  # none where the profiler may not read the GPU's activity
    ]
    for record in results.select("region diff"):
        found += [
            Figure(
                _figure_name(key, record),
                f"{what} in both compilers, part by part: the same loss and gradients of the same weights and tokens.",
                partial(_draw_regions, record, key, unit, title),
            )
            for key, unit, what, title in _PANELS
            if _is_drawn(key, record)
        ]
    return found


def _step(record: Record) -> dict[str, Any]:
    summary = record.data
    return {
        **summary,
        **record.labels,
        "value": {name: numbers.quantity(quantity) for name, quantity in record.values.items()},
        "libraries": bool(record["library FLOPs"].value),
        "flops_ratio": _ratio(record, "FLOPs", "library FLOPs", "XLA FLOPs"),
        "bytes_ratio": _ratio(record, "whole bytes", "library bytes", "XLA bytes"),
        "kind_rows": [[kind, numbers.count(count)] for kind, count in summary["kinds"].items()],
        "region_rows": [_region_row(group) for group in summary["regions"]],
        "longest_rows": [_kernel_row(kernel) for kernel in summary["longest"]],
    }


def _ratio(record: Record, ours: str, libraries: str, theirs: str) -> str | None:
    """By how much of XLA's count the count without libraries is larger or smaller, as text; None where XLA has none."""
    if theirs not in record.values:
        return None
    difference = (record[ours].value - record[libraries].value) / record[theirs].value - 1
    sign = "−" if difference < 0 else "+"
    return "equal" if difference == 0 else f"relative difference {sign}{numbers.error_size(abs(difference))}"


def _region_row(group: Mapping[str, Any]) -> list[str]:
    time = group["seconds"]
    return [
        group["region"] or _NO_REGION,
        _PHASES[group["phase"]],
        numbers.count(group["kernels"]),
        numbers.count(group["dots"]),
        numbers.with_unit(group["flops"], "FLOP"),
        numbers.with_unit(group["bytes"], "B"),
        "–" if time is None else numbers.with_unit(time, "s"),
        "–" if not time else numbers.with_unit(group["bytes"] / time, "B/s"),
    ]


def _kernel_row(kernel: Mapping[str, Any]) -> list[str]:
    ops = " ".join(op if count == 1 else f"{op}×{count}" for op, count in kernel["ops"].items())
    time = kernel["seconds"]
    return [
        f"`{kernel['name']}`",
        f"{kernel['kind']}: {ops}" if ops not in kernel["kind"] else kernel["kind"],
        f"{kernel['region'] or _NO_REGION}, {_PHASES[kernel['phase']]}",
        f"`{kernel['place']}`" if kernel["place"] else "–",
        "–" if time is None else numbers.with_unit(time, "s"),
        "–" if not time else numbers.with_unit(kernel["flops"] / time, "FLOP/s"),
        "–" if not time else numbers.with_unit(kernel["bytes"] / time, "B/s"),
    ]


def _figure_name(key: str, record: Record) -> str:
    return f"regions_{key}_{record.labels['attention']}"


def _is_drawn(key: str, record: Record) -> bool:
    """Whether there is anything to draw: times are there only where they were measured."""
    return any(side[key] for region in record.data["regions"] for side in region["sides"].values())


def _shorter_step(record: Record, step: Record | None) -> str:
    """The time of the whole step, where XLA took longer for its loss and gradients alone; else empty."""
    if step is None or "XLA time" not in record.values or "step time" not in step.values:
        return ""
    same = all(step.labels[name] == record.labels[name] for name in _SIZE)
    return numbers.quantity(step["step time"]) if same and record["XLA time"].value > step["step time"].value else ""


def _diff(record: Record, step: Record | None) -> dict[str, Any]:
    regions = {(region["name"], region["phase"]): region for region in record.data["regions"]}
    return {
        **record.labels,
        "value": {name: numbers.quantity(quantity) for name, quantity in record.values.items()},
        "difference": numbers.error_size(record["difference of results"].value)
        if "difference of results" in record.values
        else None,
        "shorter_step": _shorter_step(record, step),
        "has_values": bool(record["in both"].value),
        "figures": [_figure_name(key, record) for key, *_ in _PANELS if _is_drawn(key, record)],
        "rows": [_diff_row(region) for region in regions.values()],
        "explained": [explain(regions[name, phase], quotes=True) for name, phase in record.data["explained"]],
        "notes": [f"{compiler}: {note}" for compiler, notes in record.data["notes"].items() for note in notes],
    }


def _diff_row(region: Mapping[str, Any]) -> list[str]:
    cells = [region["name"] or "(not placed)", _PHASES[region["phase"]]]
    for compiler in _COMPILERS:
        side = region["sides"][compiler]
        cells += [
            numbers.count(side["kernels"]),
            numbers.with_unit(side["bytes"], "B"),
            "–" if side["seconds"] is None else numbers.with_unit(side["seconds"], "s"),
        ]
    return cells


def _target(records: Sequence[Record]) -> dict[str, Any]:
    return {
        **records[0].labels,
        "rows": [
            [
                str(record.labels["layout"]),
                str(record.labels["devices"]),
                numbers.count(record["kernels"].value),
                ", ".join(
                    f"{name.removesuffix('-start')} {count} ×" for name, count in record.data["collectives"].items()
                )
                or "none",
                numbers.quantity(record["arguments"]),
                numbers.quantity(record["temporaries"]),
                numbers.quantity(record["compile time"]),
            ]
            for record in records
        ],
        "kind_rows": [[kind, numbers.count(count)] for kind, count in records[0].data["kinds"].items()],
        "region_rows": [_region_row(group)[:6] for group in records[0].data["regions"]],
    }


def _draw_step(record: Record) -> MatplotlibFigure:
    groups = [group for group in record.data["regions"] if group["seconds"]]
    names = list(dict.fromkeys(group["region"] or _NO_REGION for group in groups))
    figure, axes = new_figure(7.0, 0.9 + 0.42 * len(names))
    left = np.zeros(len(names))
    for index, (phase, label) in enumerate(_PHASES.items()):
        times = np.array(
            [
                sum(g["seconds"] for g in groups if (g["region"] or _NO_REGION) == name and g["phase"] == phase)
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


def _draw_regions(record: Record, key: str, unit: float, title: str) -> MatplotlibFigure:
    """A pair of bars for every part: one compiler's and the other's."""
    regions = [region for region in record.data["regions"] if _size(region)]
    figure, axes = new_figure(7.0, 1.0 + 0.5 * len(regions))
    for index, compiler in enumerate(_COMPILERS):
        values = np.array([(region["sides"][compiler][key] or 0) / unit for region in regions])
        places = np.arange(len(regions)) + (index - 0.5) * 0.38
        axes.barh(
            places, values, height=0.36, label=compiler, color=COLOURS[index], hatch=HATCHES[index], edgecolor="white"
        )
        for place, value, region in zip(places, values, regions, strict=True):
            inside = not value and region["hosts"][compiler]
            axes.annotate(
                "inside another part's kernel" if inside else numbers.significant(value),
                (value, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
            )  # fmt: skip
    axes.set_yticks(
        range(len(regions)), [f"{region['name'] or '(not placed)'}, {_PHASES[region['phase']]}" for region in regions]
    )
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(title)
    axes.grid(visible=False, axis="y")
    label_ticks(axes.xaxis)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _size(region: Mapping[str, Any]) -> int:
    return sum(side["bytes"] for side in region["sides"].values())
