"""Records of version 1 become today's records, and no figure changes."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from benchkit import Quantity, Record, Results
from jax_baseline.diff.records import DiffRecord, StepRecord, TargetRecord
from jax_baseline.parity.records import ConvergedRecord, ConvergenceRecord, MeshRecord, MistakeRecord, ParityRecord
from jax_baseline.report.migrate import migrate
from jax_baseline.timing.engines import EngineSpec
from jax_baseline.timing.records import EngineRecord, ModelRecord, ScalingRecord, Source

SIZE = {"preset": "tiny", "batch_size": 16, "dtype": "float32", "layers": 2, "attention": "xla"}
SUMMARY = {
    "kernels": 3,
    "kinds": {"fusion loop": 3},
    "dots": 1,
    "collectives": {},
    "donated": 1,
    "donated_bytes": 11,
    "arguments": 2,
    "argument_bytes": 12,
    "output_bytes": 13,
    "flops": 14,
    "transcendentals": 15,
    "bytes": 16,
    "whole_bytes": 17,
    "library_flops": 18,
    "library_bytes": 19,
    "regions": [
        {"region": "head", "phase": "other", "kernels": 3, "dots": 1, "flops": 14, "bytes": 16, "seconds": 2e-3}
    ],
}
LONGEST = {
    "name": "fusion.1",
    "kind": "fusion loop",
    "ops": {"add": 2},
    "region": "head",
    "phase": "other",
    "place": "gpt/model.py:7",
    "flops": 21,
    "bytes": 22,
    "seconds": None,
}
STEP_FIGURES = [
    "StableHLO operations", "kernels", "FLOPs", "bytes", "whole bytes", "library FLOPs", "library bytes",
    "arguments", "donated", "temporaries", "compile time", "kernel time", "kernels timed", "step time", "XLA FLOPs",
    "XLA bytes",
]  # fmt: skip
WRITTEN = {"tensor": "float32[4]", "count": 1, "bytes": 16, "kernel": "k", "kind": "fusion loop", "place": "a.py:1"}
COMPILED = {
    "kernels": 4,
    "bytes": 5,
    "seconds": 6e-3,
    "flops": None,
    "categories": {"product": 2, "reduction": 1},
    "libraries": {"extern_kernels.mm": 2},
}
REGION = {
    "name": "head",
    "phase": "forward",
    "sides": {"XLA": COMPILED, "Inductor": COMPILED},
    "only": {"XLA": [WRITTEN], "Inductor": []},
    "again": {"XLA": [], "Inductor": [WRITTEN]},
    "fusions": {"XLA": [{"parts": ["a", "b"], "kernels": 1, "kernel": "k", "ops": {"add": 1}, "source": ""}]},
    "hosts": {"XLA": ["k"], "Inductor": []},
    "quotes": {"XLA": {"kernel": "k", "kind": "loop", "language": "text", "source": "ROOT", "left_out": 8}},
}
COMPILER_FIGURES = ("kernels", "bytes", "compile time", "only", "again", "placed by label", "placed by value",
                    "placed by nothing", "time")  # fmt: skip


def migrated(record):
    results = Results("jax-baseline", environment=SimpleNamespace(), configuration={}, records=(record,))
    (found,) = migrate(results).records
    assert found.labels.items() <= record.labels.items()
    assert list(found.values.values()) == list(record.values.values())
    return found


def numbered(names):
    return {name: Quantity(index + 0.5, "", index, index + 1, 9) for index, name in enumerate(names)}


def test_a_step():
    record = Record("hlo step", {**SIZE, "repeats": 3}, numbered(STEP_FIGURES), {**SUMMARY, "longest": [LONGEST]})
    step = StepRecord.of(migrated(record))
    assert [step.stablehlo_operations, step.kernels, step.xla_bytes] == [
        record[name] for name in ("StableHLO operations", "kernels", "XLA bytes")
    ]
    assert step.summary.regions[0].seconds == 2e-3
    assert (step.longest[0].location, step.longest[0].ops) == ("gpt/model.py:7", {"add": 2})
    # A machine without XLA's counts has no such figures.
    assert (
        StepRecord.of(migrated(Record(record.name, record.labels, numbered(STEP_FIGURES[:13]), record.data))).xla_flops
        is None
    )


def test_the_program_of_a_target():
    names = ("kernels", "bytes", "arguments", "temporaries", "compile time")
    labels = {**SIZE, "layout": "FSDP", "devices": 4}
    target = TargetRecord.of(migrated(Record("hlo target", labels, numbered(names), SUMMARY)))
    assert target.compile_time.value == 4.5
    assert target.summary.kinds == {"fusion loop": 3}


def test_a_comparison():
    names = ["in both", *(f"{name} {what}" for name in ("XLA", "Inductor") for what in COMPILER_FIGURES)]
    record = Record(
        "region diff",
        {**SIZE, "repeats": 3},
        numbered([*names, "difference of results"]),
        {"regions": [REGION], "explained": [["head", "forward"]], "notes": {"XLA": ["a note"], "Inductor": []}},
    )
    diff = DiffRecord.of(migrated(record))
    assert diff.common == record["in both"]
    assert diff.largest_difference == record["difference of results"]
    for name, totals in diff.compilers.items():
        assert totals.copies == record[f"{name} again"]
        assert totals.assigned.nothing == record[f"{name} placed by nothing"]
        assert totals.time == record[f"{name} time"]
    (region,) = diff.regions
    assert region.compiled["XLA"].categories == {"matmul": 2, "reduction": 1}
    assert region.only["XLA"][0].location == region.copies["Inductor"][0].location == "a.py:1"
    assert region.fused_into == {"XLA": ("k",), "Inductor": ()}
    assert region.quotes["XLA"].left_out == 8
    assert diff.explained == (("head", "forward"),)
    assert diff.notes["XLA"] == ("a note",)


def test_an_unknown_figure_is_refused():
    with pytest.raises(KeyError, match="speed"):
        migrated(Record("hlo step", SIZE, numbered(["speed"]), {**SUMMARY, "longest": []}))


def test_parity():
    quantities = ("loss", "gradient norm", "gradients", "weights", "optimizer state")
    names = [*(f"{quantity}, {of}" for quantity in quantities for of in ("jax", "control", "ratio")), "times control"]
    losses = {"torch": [3.0, 2.0], "jax": [3.0, 2.5], "controls": [[3.0, 2.25]], "bounds": [0.5, 1.0]}
    record = Record(
        "parity", {"dtype": "float32", "steps": 2, "batch_size": 4}, numbered(names), {**losses, "divergence": None}
    )
    parity = ParityRecord.of(migrated(record))
    assert parity.deviations["gradient norm"].control == record["gradient norm, control"]
    assert parity.times_control == record["times control"]
    assert (parity.controls, parity.divergence) == (((3.0, 2.25),), None)


def test_a_planted_mistake_a_mesh_and_full_training_runs():
    mistake = Record("mutation", {"mistake": "no bias"}, numbered(["times"]), {"step": 2, "where": "loss"})
    assert MistakeRecord.of(migrated(mistake)) == MistakeRecord("no bias", mistake["times"], 2, "loss")
    data = {"collectives": {"all-reduce": 9}, "losses": [1.5], "controls": [[1.25]]}
    mesh = Record("mesh", {"data": 2, "fsdp": 1}, numbered(["state", "difference"]), data)
    assert MeshRecord.of(migrated(mesh)).collectives == {"all-reduce": 9}
    run = Record("converged", {"seed": 1}, numbered(["torch", "jax"]))
    assert ConvergedRecord.of(migrated(run)).jax == run["jax"]
    runs = Record("convergence", {}, numbered(["difference", "seed noise", "unigram"]), {"alike": True})
    assert ConvergenceRecord.of(migrated(runs)).seed_noise == runs["seed noise"]


def test_an_engine_and_its_model():
    names = [
        "rate",
        "step",
        "first step",
        "loss",
        "speedup",
        "trace time",
        "lower time",
        "compile time",
        "peak memory",
        "temporaries",
        "XLA FLOPs",
        "MFU",
    ]
    spec = EngineSpec("jax", attention="cudnn", donate=False)
    record = Record("engine", {"engine": "cudnn", **asdict(spec)}, numbered(names))
    results = Results("jax-baseline", environment=SimpleNamespace(), configuration={}, records=(record,))
    (engine,) = EngineRecord.select(migrate(results), framework="jax")
    assert (engine.engine, engine.spec) == ("cudnn", spec)
    assert engine.figures.compile_stages == {stage: record[f"{stage} time"] for stage in ("trace", "lower", "compile")}
    assert (engine.figures.first_step, engine.figures.mfu) == (record["first step"], record["MFU"])
    model = Record("model", {}, numbered(["FLOPs"]), {"model": {"n_layer": 2}, "training": {"lr": 1e-3}})
    assert ModelRecord.of(migrated(model)) == ModelRecord(model["FLOPs"], {"n_layer": 2}, {"lr": 1e-3})


def test_several_gpus():
    source = {"date": "2026-11-22T18:34:43Z", "command": "run.py --sweep", "commit": "ac3405b", "dirty": None}
    names = ("rate", "step", "peak memory", "efficiency", "step of one")
    labels = {"data": 2, "fsdp": 1}
    record = Record("scaling", labels, numbered(names), {**source, "collectives": {"all-reduce": 9}})
    mesh = ScalingRecord.of(migrated(record))
    assert (mesh.source, mesh.failed) == (Source(**source), "")
    assert mesh.figures is not None
    assert (mesh.figures.step_of_one, mesh.figures.peak_memory) == (record["step of one"], record["peak memory"])
    failed = ScalingRecord.of(migrated(Record("scaling", labels, {}, {**source, "failed": "why"})))
    assert (failed.figures, failed.failed) == (None, "why")
