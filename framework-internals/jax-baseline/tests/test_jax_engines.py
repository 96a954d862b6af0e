"""The comparison of engines in child processes."""

import threading
from dataclasses import asdict, replace

import pytest
import torch
from typer.testing import CliRunner

from benchkit import Quantity, Timing, UserError
from benchkit.run import Run
from engines import measure
from engines.measure import MeasuredEngine, measure_engines
from engines.spec import EngineSpec, Preparation, bench_config
from engines.torch_engine import TorchEngine
from jax_baseline import lens
from jax_baseline.cli import app
from jax_baseline.parity.gpt.meshes import MeshRun
from jax_baseline.timing.jax_engine import make_engine
from jax_baseline.timing.records import EngineRecord

PREPARED, TIMED = Preparation(1.0, 5.0, {}), Timing((0.5,), 1, "wall-clock", 0.5)


def recorded(monkeypatch, engines, missing=()):
    """The records of engines that all measured the same, and what is absent."""
    found = MeasuredEngine(PREPARED, TIMED, Quantity(1.0, "×"), None, missing=dict(missing))
    monkeypatch.setattr(measure, "measure_engines", lambda engines, *rest, **settings: dict.fromkeys(engines, found))
    kept = []
    monkeypatch.setattr(Run, "add", lambda self, record: kept.append(record))
    run = Run("cpu", lens.configure("cpu", quick=False), Notes())
    run.configuration["bench"]["engines"] = {name: asdict(spec) for name, spec in engines.items()}
    lens.timing.record_engines(run)
    return [EngineRecord.of(record).figures for record in kept], run.recorder.told


def test_a_missing_figure_is_named_in_the_report(monkeypatch):
    missing = {"peak memory": "RuntimeError: device lost."}
    figures, told = recorded(monkeypatch, {"one": EngineSpec("jax")}, missing)
    assert len(figures) == 1
    assert told["The peak memory of `one`"] == "asking for it failed: RuntimeError: device lost"


@pytest.fixture
def a_peak(monkeypatch):
    """A device whose datasheet says 1 TFLOP/s."""
    monkeypatch.setattr("torch_baseline.throughput.peak_flops", lambda device, dtype, devices=1: devices * 1e12)


def test_the_mfu_of_several_devices_uses_the_peak_of_all_of_them(a_peak, monkeypatch):
    """Two devices do twice the tokens of one in the same time: each is used as well."""
    (one, two), _ = recorded(monkeypatch, {str(data): EngineSpec("jax", data=data) for data in (1, 2)})
    assert two.rate.value == 2 * one.rate.value
    assert two.mfu.value == pytest.approx(one.mfu.value)


def test_the_mfu_of_a_sweep_uses_the_peak_of_all_devices(a_peak, monkeypatch):
    trial = measure.MeasuredEngine(PREPARED, TIMED, None, None)
    monkeypatch.setattr(measure, "sweep", lambda engines, *rest, **settings: ((name, trial) for name in engines))
    options = ["--sweep", "--device", "cpu", "--engines", "cudnn,cudnn-data-2"]
    lines = CliRunner().invoke(app, ["bench", *options]).output.splitlines()
    shares = [line.split("MFU ")[1].split()[0] for line in lines]
    assert len(shares) == 2
    assert shares[0] == shares[1]


class Notes:
    """A recorder that keeps what it is told."""

    def __init__(self):
        self.told = {}

    def absent(self, what, why):
        self.told[what] = why


def test_the_parts_are_measured_in_order_whatever_becomes_of_one(monkeypatch, capsys):
    def fails(run):
        raise RuntimeError("Traceback\n  somewhere\nXlaRuntimeError: INTERNAL: no stream.\n")

    notes, done = Notes(), []
    parts = [("The first", fails), ("The second", done.append), ("The third", done.append)]
    monkeypatch.setattr(lens, "parts", lambda run: parts)
    run = Run("cpu", {}, notes)
    lens.collect(run)
    assert done == [run, run]
    assert list(notes.told) == ["The first"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_part_has_a_name_of_its_own(device, monkeypatch):
    for begins in ("_run_mistakes", "_run_meshes"):  # in the background, where there is a GPU for the rest
        monkeypatch.setattr(lens.parity, begins, lambda configuration: [])
    run = Run(device, lens.configure(device, quick=False), Notes())
    names = [name for name, _ in lens.parts(run)]
    assert len(set(names)) == len(names) >= 8


def test_a_quick_run_has_every_kind_of_part():
    kinds = []
    for quick in (False, True):
        run = Run("cpu", lens.configure("cpu", quick), Notes())
        names = [name for name, _ in lens.parts(run)]
        kinds.append({name.split(",")[0] if "attention" in name else name.split(" in ")[0] for name in names})
    assert kinds[0] - kinds[1] == {"The GPU's program"}  # which takes XLA's compiler for a GPU that is not there


def test_a_quick_run_says_what_it_leaves_out_of_the_compiled_step():
    notes = Notes()
    run = Run("cpu", lens.configure("cpu", quick=True), notes)
    dict(lens.parts(run))["XLA beside Inductor"](run)
    assert list(notes.told) == ["XLA beside Inductor, and the program of a GPU"]


@pytest.mark.parametrize(("device", "told"), [("cuda", ["The first 14 of the 40 planted mistakes"]), ("cpu", [])])
def test_mistakes_that_are_not_planted_are_named(device, told):
    notes = Notes()
    run = Run(device, lens.configure(device, quick=False), notes)
    lens.parity._record_mistakes(run, list, lambda: None)
    assert list(notes.told) == told


def test_on_a_cpu_the_meshes_run_beside_the_mistakes_and_begin_with_them(monkeypatch):
    begun = threading.Event()
    mesh = MeshRun([1.0], {}, state_bytes=1)
    monkeypatch.setattr(lens.parity, "_run_meshes", lambda configuration: begun.set() or ({(1, 1): mesh}, [[1.0]]))
    monkeypatch.setattr(lens.parity, "_run_mistakes", lambda configuration: [] if begun.wait(200) else ["alone"])
    kept = []
    run = Run("cpu", lens.configure("cpu", quick=True), Notes())
    monkeypatch.setattr(Run, "add", lambda self, record: kept.append(record.name))
    parts = dict(lens.parity.sections(run))
    assert not begun.is_set()
    parts["Planted mistakes"](run)
    parts["Meshes of devices"](run)
    assert kept == ["mesh"]


def test_the_list_of_engines_says_what_is_special_about_each():
    lines = CliRunner().invoke(app, ["bench", "--engines", "list"]).output.splitlines()
    said = dict(line.split(maxsplit=1) for line in lines)
    assert said["torch-eager"] == "torch, compiled=False"
    assert said["jit"] == "jax, donate=False"
    assert said["cudnn-scan"] == "jax, attention=cudnn, scan=True"
    assert said["jit-4-steps"] == "jax, steps_per_dispatch=4"


@pytest.mark.slow
def test_engines_agree_are_timed_and_fail_alone():
    """One engine asks for a compiler flag that there is not."""
    model, training = bench_config("tiny", batch_size=2, dtype="float64")
    model = replace(model, n_layer=1, n_embd=32, block_size=16)
    engines = {
        "torch eager": EngineSpec("torch", compiled=False),
        "jax": EngineSpec("jax"),
        "broken": EngineSpec("jax", options="--xla_no_such_flag=1"),
    }
    measured = measure_engines(engines, model, training, device="cpu", rounds=3, factory=make_engine)
    assert list(measured) == list(engines)
    reference, jax, broken = measured.values()
    assert "xla_no_such_flag" in broken
    assert jax.preparation.loss == pytest.approx(reference.preparation.loss, rel=1e-12)
    assert set(jax.preparation.compile_seconds) == {"trace", "lower", "compile"}
    assert sum(jax.preparation.compile_seconds.values()) < jax.preparation.first_step_seconds
    assert len(jax.timing.samples) == 3
    assert reference.speedup.value == 1


def test_weights_of_low_precision_beside_masters_change_no_loss():
    model, training = bench_config("tiny", batch_size=2, dtype="bfloat16", layers=1)
    losses = []
    for low in (False, True):
        spec = EngineSpec("torch", compiled=False, optimizer="custom_ops:AdamW", low_precision_weights=low)
        engine = TorchEngine(spec, model, training, "cpu")
        losses.append([engine.next_loss() for _ in range(4)])
    assert losses[0] == losses[1]  # autocast rounds the same float32 weights at each step, and their gradients
    assert engine._gpt.blocks[0].mlp.up.weight.dtype == torch.bfloat16
    with pytest.raises(UserError, match="a plain step of the GPT"):
        engine.restart(1)
