"""The workers and the comparison of engines in them."""

import sys
import time
from dataclasses import replace

import pytest

from benchkit import UserError
from jax_baseline.bench import measure_engines
from jax_baseline.engines import EngineSpec, bench_config
from jax_baseline.worker import Worker, WorkerError


class Talker:
    """What the tests' worker holds."""

    def __init__(self, greeting):
        if greeting == "nothing":
            raise ValueError("no greeting")
        self.greeting = greeting

    def greet(self, name):
        print("this must not disturb the answers")
        return f"{self.greeting}, {name}"

    def fail(self):
        raise KeyError("lost")

    def refuse(self):
        raise UserError("not today")

    def die(self):
        raise SystemExit(7)

    def hang(self):
        print("waiting for a driver", file=sys.stderr, flush=True)
        time.sleep(600)


@pytest.fixture
def factory(tmp_path, monkeypatch):
    from pathlib import Path

    (tmp_path / "talker_module.py").write_text(Path(__file__).read_text())
    monkeypatch.syspath_prepend(tmp_path)
    return "talker_module:Talker"


def test_calls_answers_and_errors(factory):
    with Worker(factory, {"greeting": "Hello"}) as worker:
        assert worker.call("greet", name="you") == "Hello, you"
        with pytest.raises(WorkerError, match="KeyError: 'lost'"):
            worker.call("fail")
        with pytest.raises(UserError, match="not today"):
            worker.call("refuse")
        assert worker.call("greet", name="again") == "Hello, again"
        with pytest.raises(WorkerError, match="ended with status 7"):
            worker.call("die")


def test_a_worker_that_hangs_is_ended(factory):
    start = time.perf_counter()
    with Worker(factory, {"greeting": "Hello"}, limit_seconds=30) as worker:
        worker._limit = 0.5  # the limit above is for a busy machine to start a process in
        with pytest.raises(WorkerError, match=r"no answer after 0.5 s[^$]*waiting for a driver"):
            worker.call("hang")
    assert time.perf_counter() - start < 40


def test_a_factory_that_fails_raises(factory):
    with pytest.raises(WorkerError, match="ValueError: no greeting"):
        Worker(factory, {"greeting": "nothing"})


def test_engines_agree_are_timed_and_fail_alone():
    """In two groups, so that the reference is in both; one engine asks for a compiler flag that there is not."""
    model, training = bench_config("tiny", batch_size=2, dtype="float32")
    model = replace(model, n_layer=1, n_embd=32, block_size=16)
    engines = {
        "torch eager": EngineSpec("torch", compiled=False),
        "jax": EngineSpec("jax"),
        "broken": EngineSpec("jax", options="--xla_no_such_flag=1"),
    }
    measured = measure_engines(engines, model, training, device="cpu", rounds=3, together=1)
    assert list(measured) == list(engines)
    reference, jax, broken = measured.values()
    assert "xla_no_such_flag" in broken
    assert jax.preparation.loss == pytest.approx(reference.preparation.loss, abs=1e-5)
    assert set(jax.preparation.compile_seconds) == {"trace", "lower", "compile"}
    assert sum(jax.preparation.compile_seconds.values()) < jax.preparation.first_step_seconds
    assert len(jax.timing.samples) == 3
    assert reference.speedup.value == 1


def test_unknown_engines_are_refused():
    with pytest.raises(ValueError, match="framework must be torch or jax, got 'mxnet'"):
        EngineSpec("mxnet")
