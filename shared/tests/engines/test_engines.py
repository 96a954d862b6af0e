"""The comparison of engines in child processes."""

import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import pytest

from benchkit import UserError
from benchkit.processes import ChildCrashed, budget
from engines import measure
from engines.kernel_times import KernelTime
from engines.measure import measure_engines
from engines.ranks import make_engine
from engines.spec import EngineSpec, Preparation, bench_config

SHAPES = bench_config("tiny", batch_size=2, dtype="float32")


def specs(*names):
    """Engines whose fakes behave as their name says."""
    return {name: EngineSpec("torch", attention=name) for name in names}


def only_fit(monkeypatch, number, references=("reference",)):
    """Leave memory for so many engines beside the references, each of which takes a byte."""
    monkeypatch.setattr(measure, "engine_bytes", lambda spec, *where: 0.01 if spec.attention in references else 1.0)
    monkeypatch.setattr(measure, "free", lambda device: number + 0.5)


@pytest.fixture
def log(monkeypatch):
    """The calls of all engines, which are fakes; ``log.kind`` is their class."""

    class Log(list):
        kind = FakeEngine

    calls = Log()
    monkeypatch.setattr(
        measure, "_engine_processes", lambda *_: nullcontext(lambda *asked, **_: calls.kind(calls, asked[0]))
    )
    return calls


class FakeEngine:
    """An engine whose calls are noted, with the first loss that its options say."""

    def __init__(self, log, spec):
        self.log, self.name = log, spec.attention
        self.loss = float(spec.options or 5.0)
        if self.name == "no start":
            raise ChildCrashed("make_engine raised ImportError: no such library")
        if self.name == "not here":
            raise UserError("no C++ compiler (install one)")
        log.append(("start", self.name))

    def call(self, method, **arguments):
        self.log.append((method, self.name))
        runs = self.log.count(("run", self.name))
        if (self.name == "too large" and runs > 0) or (self.name == "growing" and runs > 3):
            raise ChildCrashed("RESOURCE_EXHAUSTED: out of memory")
        if method == "kernel_times":
            if self.name == "no profile":
                raise ChildCrashed("JaxEngine.kernel_times ended with status -6: Fatal Python error: Aborted")
            return [KernelTime("fusion", 2.0, 1e-3)]
        if method == "peak_memory" and self.name == "no peak":
            raise ChildCrashed("JaxEngine.peak_memory raised RuntimeError: CUDA error: device lost")
        return Preparation(1.0, self.loss, {}) if method == "prepare" else None

    def close(self):
        self.log.append(("close", self.name))


def test_engines_are_paired_with_the_reference_in_groups_and_fail_alone(monkeypatch, log):
    names = ("reference", "right", "growing", "no start", "too large", "wrong", "not here", "also right")
    engines = {name: EngineSpec("jax", attention=name, options="5.1" if name == "wrong" else "") for name in names}
    only_fit(monkeypatch, 3)
    found = measure_engines(engines, *SHAPES, device="cpu", rounds=8)
    assert list(found) == list(names)
    measured = {name for name, engine in found.items() if not isinstance(engine, str)}
    assert measured == {"reference", "right", "also right"}
    assert found["no start"] == "make_engine raised ImportError: no such library"
    assert found["too large"].startswith("there was not enough memory; ")
    assert "out of memory" in found["growing"]  # in a round that is timed
    assert found["not here"] == "no C++ compiler (install one)"
    assert "first loss 5.100000 differs from 5.000000, that of reference; at most 1e-04" in found["wrong"]
    assert {("close", "too large"), ("close", "growing")} <= set(log)  # they hold no memory while others run
    # The second group starts when the first is measured, and the reference runs in both.
    second = log.index(("start", "also right"))
    assert ("run", "right") not in log[second:]
    assert ("run", "reference") in log[second:]
    assert found["reference"].speedup.value == 1
    assert len(found["also right"].timing.samples) == 8


def test_a_failure_after_the_timed_rounds_keeps_them(log):
    def inspect(name, remote):
        if name in ("reference", "no inspection"):
            raise ChildCrashed("JaxEngine.next_loss ended with status -11: no message")

    names = ("reference", "no peak", "no inspection", "right")
    found = measure_engines(specs(*names), *SHAPES, device="cpu", rounds=6, inspect=inspect)
    assert {name: len(engine.timing.samples) for name, engine in found.items()} == dict.fromkeys(names, 6)
    assert {name: list(engine.missing) for name, engine in found.items()} == {
        "reference": ["inspection"],
        "no peak": ["peak memory"],
        "no inspection": ["inspection"],
        "right": [],
    }
    lost = "JaxEngine.peak_memory raised RuntimeError: CUDA error: device lost"
    assert found["no peak"].missing["peak memory"] == lost
    alone = specs("no peak")
    (_, trial), *_ = measure.sweep(alone, *SHAPES, device="cpu", rounds=2, steps=1, together=1, kernels=False)
    assert len(trial.timing.samples) == 2
    assert trial.missing == {"peak memory": lost}


def test_a_reference_that_dies_after_its_first_group_loses_only_the_later_speedups(monkeypatch, log):
    class Dying(FakeEngine):
        def call(self, method, **arguments):
            if self.name == "reference" and ("start", "second") in log:
                raise ChildCrashed("TorchEngine.run ended with status -9: no message")
            return super().call(method, **arguments)

    log.kind = Dying
    only_fit(monkeypatch, 1)
    figures = measure_engines(specs("reference", "first", "second", "third"), *SHAPES, device="cpu", rounds=2)
    assert len(figures["reference"].timing.samples) == len(figures["first"].timing.samples) == 2
    for name in ("second", "third"):
        assert len(figures[name].timing.samples) == 2
        assert figures[name].speedup is None
        why = "the reference, reference, failed: TorchEngine.run ended with status -9: no message"
        assert figures[name].missing["speedup"].startswith(why)


def test_every_group_has_all_references_and_is_paired_with_them_alone(monkeypatch, log):
    names = ("eager", "right", "compiled", "graph", "also right")
    only_fit(monkeypatch, 1, ("eager", "compiled", "graph"))
    figures = measure_engines(specs(*names), *SHAPES, device="cpu", rounds=2, references=("compiled", "graph"))
    assert list(figures) == list(names)
    references = {"eager", "compiled", "graph"}
    assert set(figures["right"].rounds.timings) == {*references, "right"}
    assert set(figures["also right"].rounds.timings) == {*references, "also right"}
    assert [name for what, name in log if what == "start"].count("compiled") == 1
    for name in ("right", "also right"):
        assert figures[name].rounds.speedup(name, over="graph").value > 0


def test_a_reference_that_was_inspected_is_timed_in_a_new_process_beside_the_next_group(monkeypatch, log):
    """A profiler stays attached: on an H100, eager PyTorch took 56 ms a step after it instead of 41."""

    class Inspected(FakeEngine):
        inspected = False

        def call(self, method, **arguments):
            if self.inspected and method == "run":
                self.log.append(("run inspected", self.name))
            return super().call(method, **arguments)

        def inspect(self):
            self.log.append(("inspect", self.name))
            self.inspected = True

    log.kind = Inspected
    only_fit(monkeypatch, 1, ("eager", "compiled"))
    names = ("eager", "compiled", "right", "also right", "third")
    inspecting = {"references": ("compiled",), "inspect": lambda _, remote: remote.inspect()}
    figures = measure_engines(specs(*names), *SHAPES, device="cpu", rounds=2, **inspecting)
    assert [name for what, name in log if what == "inspect"] == list(names)
    for reference in ("eager", "compiled"):
        assert log.count(("start", reference)) == 2  # no third: nothing inspects it again
        assert ("run inspected", reference) not in log
        assert len(figures["third"].rounds.timings[reference].samples) == 2
    assert log.count(("close", "eager")) == 1


@pytest.mark.parametrize("failing", ["no start", "too large", "growing"])
def test_a_reference_that_fails_is_a_row_and_the_others_are_timed(failing, monkeypatch, log):
    """At its start, in its first steps or in the timed rounds; as the first engine or as a further one."""
    only_fit(monkeypatch, 1, (failing, "compiled"))
    shared = {"device": "cpu", "rounds": 4}
    figures = measure_engines(specs(failing, "compiled", "right"), *SHAPES, **shared, references=["compiled"])
    assert isinstance(figures[failing], str)
    for name in ("compiled", "right"):
        assert figures[name].speedup is None
        assert figures[failing] in figures[name].missing["speedup"]
        assert len(figures[name].timing.samples) == 4
    assert set(figures["right"].rounds.timings) == {"compiled", "right"}
    figures = measure_engines(specs("eager", failing, "right"), *SHAPES, **shared, references=[failing])
    assert isinstance(figures[failing], str)
    assert set(figures["right"].rounds.timings) == {"eager", "right"}
    assert figures["right"].speedup is not None


def test_a_reference_that_is_no_engine_is_refused():
    with pytest.raises(ValueError, match="among the engines eager, right; got 'graph'"):
        measure_engines(specs("eager", "right"), *SHAPES, device="cpu", rounds=1, references=["graph"])


def test_an_engine_of_jax_asks_for_its_factory():
    with pytest.raises(UserError, match=r"expected the factory jax_baseline\.timing\.jax_engine\.make_engine"):
        make_engine(EngineSpec("jax"), *SHAPES, "cpu")


@pytest.mark.parametrize("module", ["engines.measure", "engines.ranks"])
def test_an_import_loads_no_framework(module):
    code = f"import sys, {module}; print(*sorted({{'jax', 'jaxlib', 'jax_baseline', 'torch'}} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_a_sweep_keeps_the_times_of_an_engine_whose_profiler_dies(log):
    engines = specs("right", "no profile", "too large", "growing")
    found = dict(measure.sweep(engines, *SHAPES, device="cpu", rounds=2, steps=4, together=2, kernels=True))
    assert [kernel.name for kernel in found["right"].kernels] == ["fusion"]
    assert found["no profile"].kernels == ()
    why = "JaxEngine.kernel_times ended with status -6: Fatal Python error: Aborted"
    assert found["no profile"].missing == {"kernels": why}
    assert len(found["no profile"].timing.samples) == 2
    assert "out of memory" in found["too large"]
    assert "out of memory" in found["growing"]


def test_a_run_in_which_nothing_is_measured_is_an_error(log):
    with pytest.raises(UserError, match="not enough memory"):
        measure_engines(specs("too large"), *SHAPES, device="cpu", rounds=1)


def test_unknown_engines_are_refused():
    with pytest.raises(ValueError, match="framework must be torch or jax, got 'mxnet'"):
        EngineSpec("mxnet")


def test_when_the_time_is_over_what_is_prepared_is_measured_and_the_rest_named(log):
    with budget.within(0.0):
        found = measure_engines(specs("reference", "second", "third"), *SHAPES, device="cpu", rounds=8)
    assert found["second"].speedup.value > 0
    assert found["third"] == "no time was left for it; give the run more with --budget"


def test_what_is_prepared_on_a_slow_machine_is_measured_however_long_a_step_takes(monkeypatch, log):
    class Slow(FakeEngine):
        def call(self, method, **arguments):
            if method == "run":
                time.sleep(0.02)
            return super().call(method, **arguments)

    log.kind = Slow
    monkeypatch.setattr(measure.budget, "TIMING", 0.01)
    with budget.within(0.0):
        found = measure_engines(specs("reference", "second"), *SHAPES, device="cpu", rounds=50)
    assert 6 <= len(found["second"].timing.samples) < 50  # enough for a verdict


def test_engines_of_torch_are_prepared_at_once_and_those_of_jax_one_by_one(log):
    together = threading.Barrier(3, timeout=200)

    class Slow(FakeEngine):
        def call(self, method, **arguments):
            if method == "prepare" and self.name.startswith("torch"):
                together.wait()  # all three are in their first step
            answer = super().call(method, **arguments)
            if method == "prepare" and self.name.startswith("jax"):
                assert self.log[-1] == (method, self.name)  # nothing else ran meanwhile
            return answer

    log.kind = Slow
    engines = {name: EngineSpec(name[:-1].strip(), attention=name) for name in ("torch1", "torch2", "jax 1", "jax 2")}
    engines["torch3"] = EngineSpec("torch", attention="torch3", options="5.1")
    found = measure_engines(engines, *SHAPES, device="cpu", rounds=2, at_once=True)
    assert [name for name, engine in found.items() if isinstance(engine, str)] == ["torch3"]
    assert "differs from 5.000000, that of torch1" in found["torch3"]
    first = {name: log.index(("prepare", name)) for name in engines}
    assert max(first["torch1"], first["torch2"], first["torch3"]) < first["jax 1"] < log.index(("run", "jax 1"))
    assert log.index(("run", "jax 1")) < first["jax 2"]
