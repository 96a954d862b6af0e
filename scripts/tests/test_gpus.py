"""The step on several GPUs: what the sweep measures and repeats, what the report says of it, two real processes."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchkit import Comparison, Quantity, Timing
from benchkit.environment import capture
from benchkit.processes import budget
from benchkit.report import render
from benchkit.results import Recorder, load
from benchkit.run import Run
from engines.kernel_times import GpuTime
from engines.measure import MeasuredEngine
from engines.spec import EngineSpec, Preparation
from torch_baseline.config import GPTConfig
from whole_step import gpus, measure
from whole_step.report import report
from whole_step.variants import on_several

HOUSE = Path(__file__).resolve().parents[2] / "framework-internals"
SIZE = "tiny, 2 × 32 tokens"
TINY = asdict(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=32))


@pytest.fixture
def run(tmp_path):
    asked = {
        "sizes": {SIZE: {"model": TINY, "batch_size": 2}}, "rounds": 2, "steps": 1,
        "losses": {"size": SIZE, "batch_size": 4, "steps": 3},
    }  # fmt: skip
    configuration = {**measure.configure("cpu", True), "dtype": "float64", "gpus": asked}
    recorder = Recorder.going_on(
        tmp_path, lens=measure.NAME, environment=capture("cpu", root=HOUSE), configuration=configuration
    )
    recorder.begin()
    return Run("cpu", recorder.results.configuration, recorder)


class Worker:
    """An engine that has the loss of its seed, and is busy for most of a step."""

    def call(self, method, *, seeds=(), **_):
        losses = [5.0 + seed / 10 for seed in seeds]
        return {"gpu_time": GpuTime(0.8, 0.15, 0.05), "loss_after": 5.0, "losses_from": losses}.get(method)


SPEED = {"compiled": 1.0, "own": 1.1, "jax": 0.9, "compiled, sharded": 0.95, "own, sharded": 1.02}


@pytest.fixture
def faked(monkeypatch):
    """Engines that take two GPUs 1.9 times as fast as one, but one that fails; yields the asked names, call by call."""
    asked: list[set[str]] = []

    def measured(engines, *_, inspect, **__):
        asked.append(set(engines))
        found = {}
        for name, spec in engines.items():
            if name not in SPEED:
                found[name] = "it ran out of luck."
                continue
            if spec.framework == "torch":
                inspect(name, Worker())
            step = spec.devices / (SPEED[name] * (1 if spec.devices == 1 else 1.9))
            timing = Timing((step, step), 1, "wall-clock", step)
            speedup = Quantity(SPEED[name], "×", SPEED[name] - 0.01, SPEED[name] + 0.01)
            found[name] = MeasuredEngine(Preparation(1.0, 5.0, {}), timing, speedup, 2**30, {}, Comparison({}))
        return found

    def ask_engines(engines, model, training, ask, **_):
        return {name: ask(name, Worker()) for name in engines}

    monkeypatch.setattr(gpus, "measure_engines", measured)
    monkeypatch.setattr(gpus, "ask_engines", ask_engines)
    monkeypatch.setattr(gpus, "present", lambda device: 2)
    return asked


def test_the_sweep_measures_each_variant_once_and_those_of_the_targets_first(run, faked):
    gpus.sweep(run)
    targets, jax = {"compiled", "own"}, {"compiled", "jax"}
    others = {*jax, "compiled, sharded", "own, sharded", "jax, sharded"}
    assert faked == [targets, targets, jax, others]
    assert targets | others == set(on_several("cpu", 2))
    gpus.sweep(run)
    assert len(faked) == 4
    assert load(run.recorder.path).select("gpus", gpus=2, variant="own")


def test_with_little_time_left_the_sweep_begins_nothing_long(run, faked):
    with budget.within(45):
        gpus.sweep(run)
    assert [names & {"own", "jax"} for names in faked] == [{"own"}, {"own"}]
    assert run.recorder.results.select("loss on gpus", gpus=2)


def test_a_variant_that_is_missing_is_measured_beside_the_plain_one(run, faked):
    gpus.measure(run, SIZE, 2)
    results = run.recorder.results
    kept = tuple(record for record in results.records if record.labels["variant"] != "own, sharded")
    run.recorder.results = replace(results, records=kept)
    gpus.measure(run, SIZE, 2)
    assert faked[1] == {"compiled", "own, sharded"}
    assert len(run.recorder.results.select("gpus", gpus=2, variant="compiled")) == 1


def test_the_report_has_efficiency_hidden_communication_failures_and_targets(run, faked):
    gpus.sweep(run)
    text = render(run.recorder.results, report).partition("## On several GPUs")[2].partition("\n## ")[0]
    row = next(line for line in text.splitlines() if "kernels + DDP" in line and line.startswith(f"| {SIZE}"))
    assert "| 95.0 % | 15.0 % | 5.0 % | 1 GiB |" in row.replace("1.00 GiB", "1 GiB")
    assert "failed: it ran out of luck |" in text
    targets = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if "GPUs" in line}
    assert "| yes |" in targets["efficiency on 2 GPUs"]
    assert "1.10×" in targets["this repository's kernels over torch.compile + DDP, at every number of GPUs"]
    text = text.replace("0 nats", "0e+00 nats")
    assert "lie within 0e+00 nats of one another: within the spread of 4 seeds of the initial weights on 2, " in text


def test_a_target_that_is_missed_says_where_the_time_goes(run, faked, monkeypatch):
    monkeypatch.setitem(SPEED, "own", 1.01)
    gpus.sweep(run)
    text = render(run.recorder.results, report)
    assert "communication alone takes 15.0 % of the step, and the GPU is idle for 5.0 %" in text


def test_the_sizes_fit_into_the_memory_of_a_gpu():
    asked = measure.configure("cuda", False)
    assert gpus.fit(asked, "cuda", 80 << 30) == asked["gpus"]
    small = gpus.fit(asked, "cuda", 16 << 30)
    batches = [(before["batch_size"], after["batch_size"]) for before, after in zip(
        asked["gpus"]["sizes"].values(), small["sizes"].values(), strict=True
    )]  # fmt: skip
    assert all(after <= before for before, after in batches)
    name, size = next(iter(small["sizes"].items()))
    assert small["losses"]["size"] == name
    assert f"made {size['batch_size']} × {size['model']['block_size']}" in name
    assert small["losses"]["batch_size"] % 8 == 0


def test_one_gpu_has_no_section(run):
    gpus.sweep(run)
    assert not run.recorder.results.records
    assert "several GPUs" not in render(run.recorder.results, report)


@pytest.mark.slow  # test_ranks.py has a step of two processes, test_baseline_parallel.py a training
def test_two_processes_of_a_cpu_are_measured_as_two_gpus_are(run, monkeypatch):
    eager = {
        "compiled": ("DDP", EngineSpec("torch", compiled=False, data=2)),
        "compiled, sharded": ("FSDP2", EngineSpec("torch", compiled=False, fsdp=2)),
    }
    monkeypatch.setattr(gpus, "on_several", lambda device, count: eager)
    gpus.measure(run, SIZE, 2)
    replicated, sharded = run.recorder.results.select("gpus")
    assert (replicated.data.get("failed"), sharded.data.get("failed")) == (None, None)
    assert sharded["loss"].value == pytest.approx(replicated["loss"].value, rel=1e-12)
    assert replicated["speedup"].value == 1


@pytest.mark.slow
def test_the_losses_do_not_depend_on_the_number_of_processes(run, monkeypatch):
    def eager(device, count):
        return {"compiled": ("DDP", EngineSpec("torch", compiled=False, data=count))}

    monkeypatch.setattr(gpus, "on_several", eager)
    for count in (2, 1):
        gpus.measure_losses(run, count, of_seeds=count)
    found = {1: {}, 2: {}}
    for record in run.recorder.results.select("loss on gpus"):
        found[record.labels["gpus"]][record.labels["seed"]] = record["loss"].value
    assert found[1] == pytest.approx(found[2], rel=1e-12)
    assert set(found[1]) == {"", *gpus._SEEDS}
    assert len(set(found[1].values())) == 1 + len(gpus._SEEDS)
