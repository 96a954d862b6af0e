"""Converts the records of version 1 of ``results.json``, whose figures had composed names, to today's records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from benchkit import Record, Results
from jax_baseline.parity import REPORTED

_STEP = {
    "StableHLO operations": "stablehlo_operations",
    "kernels": "kernels",
    "FLOPs": "flops",
    "bytes": "bytes",
    "whole bytes": "whole_bytes",
    "library FLOPs": "library_flops",
    "library bytes": "library_bytes",
    "arguments": "arguments",
    "donated": "donated",
    "temporaries": "temporaries",
    "compile time": "compile_time",
    "kernel time": "kernel_time",
    "kernels timed": "kernels_timed",
    "step time": "step_time",
    "XLA FLOPs": "xla_flops",
    "XLA bytes": "xla_bytes",
}
_COMPILER = {
    "kernels": "kernels",
    "bytes": "bytes",
    "compile time": "compile_time",
    "only": "only",
    "again": "copies",
    "placed by label": "assigned.label",
    "placed by value": "assigned.value",
    "placed by nothing": "assigned.nothing",
    "time": "time",
}
_DIFF = {
    "in both": "common",
    "difference of results": "largest_difference",
    **{f"{name} {old}": f"compilers.{name}.{new}" for name in ("XLA", "Inductor") for old, new in _COMPILER.items()},
}
_ENGINE = {
    "rate": "figures.rate",
    "step": "figures.step",
    "first step": "figures.first_step",
    "loss": "figures.loss",
    "speedup": "figures.speedup",
    **{f"{stage} time": f"figures.compile_stages.{stage}" for stage in ("trace", "lower", "compile")},
    "peak memory": "figures.peak_memory",
    "temporaries": "figures.temporaries",
    "XLA FLOPs": "figures.xla_flops",
    "MFU": "figures.mfu",
}
_SCALING = {
    "rate": "figures.rate",
    "step": "figures.step",
    "step of one": "figures.step_of_one",
    "efficiency": "figures.efficiency",
    "peak memory": "figures.peak_memory",
}
_PARITY = {
    "times control": "times_control",
    **{
        f"{quantity}, {of}": f"deviations.{quantity}.{of}"
        for quantity in REPORTED
        for of in ("jax", "control", "ratio")
    },
}
# Today's names of the figures by the name of the record.
_FIGURES: Mapping[str, Mapping[str, str]] = {
    "parity": _PARITY,
    "convergence": {"difference": "difference", "seed noise": "seed_noise", "unigram": "unigram"},
    "engine": _ENGINE,
    "model": {"FLOPs": "flops"},
    "scaling": _SCALING,
    "hlo step": _STEP,
    "hlo target": _STEP,
    "region diff": _DIFF,
}
_REGION = {"sides": "compiled", "again": "copies", "hosts": "fused_into"}


def migrate(results: Results) -> Results:
    """Return the results with today's records. No figure changes.

    Raises:
        KeyError: If a record has a figure that version 1 did not have.
    """
    return replace(results, records=tuple(map(_migrated, results.records)))


def _migrated(record: Record) -> Record:
    if names := _FIGURES.get(record.name):
        record = replace(record, values={names[old]: figure for old, figure in record.values.items()})
    return _CHANGES[record.name](record) if record.name in _CHANGES else record


def _parity(record: Record) -> Record:
    return replace(record, data={**record.data, "deviations": {quantity: {} for quantity in REPORTED}})


def _engine(record: Record) -> Record:
    """Move the labels that describe the variant into the data."""
    spec = {name: value for name, value in record.labels.items() if name != "engine"}
    labels = {name: record.labels[name] for name in ("engine", "framework")}
    return replace(record, labels=labels, data={"spec": spec, "figures": {"compile_stages": {}}})


def _scaling(record: Record) -> Record:
    names = ("date", "command", "commit", "dirty")
    data = {"source": {name: record.data[name] for name in names}}
    return replace(record, data=data | {name: value for name, value in record.data.items() if name not in names})


def _step(record: Record) -> Record:
    summary = dict(record.data)
    longest = [_with_location(kernel) for kernel in summary.pop("longest")]
    return replace(record, data={"summary": summary, "longest": longest})


def _diff(record: Record) -> Record:
    compilers: dict[str, Any] = {name: {"assigned": {}} for name in ("XLA", "Inductor")}
    regions = [_region(region) for region in record.data["regions"]]
    return replace(record, data={**record.data, "compilers": compilers, "regions": regions})


def _region(region: Mapping[str, Any]) -> dict[str, Any]:
    found = {_REGION.get(name, name): value for name, value in region.items()}
    for name in ("only", "copies"):
        found[name] = {compiler: [_with_location(one) for one in tensors] for compiler, tensors in found[name].items()}
    found["compiled"] = {
        compiler: {
            **compiled,
            "categories": {
                "matmul" if category == "product" else category: count
                for category, count in compiled["categories"].items()
            },
        }
        for compiler, compiled in found["compiled"].items()
    }
    return found


def _with_location(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {"location" if name == "place" else name: value for name, value in plain.items()}


# What else changes in a record.
_CHANGES: Mapping[str, Callable[[Record], Record]] = {
    "parity": _parity,
    "mutation": lambda record: replace(record, name="planted mistake"),
    "engine": _engine,
    "scaling": _scaling,
    "hlo step": _step,
    "hlo target": lambda record: replace(record, data={"summary": record.data}),
    "region diff": _diff,
}
