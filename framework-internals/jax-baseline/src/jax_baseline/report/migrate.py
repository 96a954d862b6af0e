"""Converts the records of version 1 of ``results.json``, whose figures had composed names, to today's records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from benchkit import Quantity, Record, Results
from jax_baseline.parity import QUANTITIES

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
        for quantity in QUANTITIES
        for of in ("jax", "control", "ratio")
    },
}
_REGION = {"sides": "compiled", "again": "copies", "hosts": "fused_into"}


def migrate(results: Results) -> Results:
    """Return the results with today's records. No figure changes.

    Raises:
        KeyError: If a record has a figure that version 1 did not have.
    """
    return replace(results, records=tuple(_RECORDS.get(record.name, _unchanged)(record) for record in results.records))


def _unchanged(record: Record) -> Record:
    return record


def _renamed(record: Record, names: Mapping[str, str]) -> dict[str, Quantity]:
    return {names[old]: figure for old, figure in record.values.items()}


def _parity(record: Record) -> Record:
    return replace(
        record,
        values=_renamed(record, _PARITY),
        data={**record.data, "deviations": {quantity: {} for quantity in QUANTITIES}},
    )


def _mistake(record: Record) -> Record:
    return replace(record, name="planted mistake")


def _convergence(record: Record) -> Record:
    names = {"difference": "difference", "seed noise": "seed_noise", "unigram": "unigram"}
    return replace(record, values=_renamed(record, names))


def _engine(record: Record) -> Record:
    """Move the labels that describe the variant into the data."""
    spec = {name: value for name, value in record.labels.items() if name != "engine"}
    labels = {name: record.labels[name] for name in ("engine", "framework")}
    data = {"spec": spec, "figures": {"compile_stages": {}}}
    return replace(record, labels=labels, values=_renamed(record, _ENGINE), data=data)


def _model(record: Record) -> Record:
    return replace(record, values=_renamed(record, {"FLOPs": "flops"}))


def _scaling(record: Record) -> Record:
    names = ("date", "command", "commit", "dirty")
    data = {"source": {name: record.data[name] for name in names}}
    data |= {name: value for name, value in record.data.items() if name not in names}
    return replace(record, values=_renamed(record, _SCALING), data=data)


def _step(record: Record) -> Record:
    summary = dict(record.data)
    longest = [_with_location(kernel) for kernel in summary.pop("longest")]
    return replace(record, values=_renamed(record, _STEP), data={"summary": summary, "longest": longest})


def _target(record: Record) -> Record:
    return replace(record, values=_renamed(record, _STEP), data={"summary": record.data})


def _diff(record: Record) -> Record:
    compilers: dict[str, Any] = {name: {"assigned": {}} for name in ("XLA", "Inductor")}
    data = {**record.data, "compilers": compilers, "regions": [_region(region) for region in record.data["regions"]]}
    return replace(record, values=_renamed(record, _DIFF), data=data)


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


_RECORDS: Mapping[str, Callable[[Record], Record]] = {
    "parity": _parity,
    "mutation": _mistake,
    "convergence": _convergence,
    "engine": _engine,
    "model": _model,
    "scaling": _scaling,
    "hlo step": _step,
    "hlo target": _target,
    "region diff": _diff,
}
