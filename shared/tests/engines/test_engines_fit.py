"""Which step fits, and how many engines live at once."""

from __future__ import annotations

import itertools
import math
from contextlib import contextmanager
from dataclasses import replace

import pytest

from benchkit.processes import ChildCrashed, budget
from benchkit.results import SMALLER
from engines import measure
from engines.fit import engine_bytes, fit_settings, fitted, held_bytes, jax_memory
from engines.spec import EngineSpec, Preparation, bench_config
from torch_baseline.throughput import eager_step_that_fits

GIB = 1 << 30
GPT2 = bench_config("gpt2-124m", batch_size=8, dtype="bfloat16")
ENGINES = {
    "eager": EngineSpec("torch", compiled=False),
    "compiled": EngineSpec("torch"),
    "jax": EngineSpec("jax", attention="cudnn"),
}


def sizes(available, wanted=GPT2, **options):
    model, training = fitted(ENGINES, *wanted, device="cuda", available=available, **options)
    return training.batch_size, model.n_layer, model.block_size


def test_a_step_that_fits_is_as_wanted():
    assert fitted(ENGINES, *GPT2, device="cuda", available=math.inf) == GPT2


def test_the_batch_is_halved_first_then_the_blocks_then_the_sequence():
    seen = list(dict.fromkeys(sizes(room * GIB / 8) for room in range(400, 0, -1)))
    assert seen[0] == (8, 12, 1024)
    assert seen[-1] == (1, 1, 128)
    for (batch, layers, length), (next_batch, next_layers, next_length) in itertools.pairwise(seen):
        halved = (next_batch < batch, next_layers < layers, next_length < length)
        assert sum(halved) >= 1
        assert not halved[1] or next_batch == 1
        assert not halved[2] or (next_batch, next_layers) == (1, 1)


@pytest.mark.parametrize("available", [8 * GIB, 16 * GIB, 24 * GIB, 40 * GIB])
def test_the_references_and_the_largest_of_the_others_fit_at_once(available):
    for references in ((), ("compiled",)):
        chosen = fitted(ENGINES, *GPT2, device="cuda", available=available, references=references)
        needs = {name: engine_bytes(spec, *chosen, "cuda") for name, spec in ENGINES.items()}
        others = needs.keys() - {"eager", *references}
        taken = needs["eager"] + sum(needs[name] for name in references) + max(needs[o] for o in others)
        assert taken < available  # the process that starts them takes some of it too


def test_what_an_engine_needs_grows_with_all_that_it_keeps():
    def needs(spec, batch=8, dtype="bfloat16"):
        return engine_bytes(spec, *bench_config("gpt2-124m", batch_size=batch, dtype=dtype), "cuda")

    compiled = EngineSpec("torch")
    assert needs(compiled) < needs(replace(compiled, compiled=False)) < needs(replace(compiled, compiled=False), 16)
    assert needs(compiled) < needs(compiled, dtype="float32") < needs(compiled, dtype="float64")
    assert needs(EngineSpec("jax", attention="cudnn")) < needs(
        EngineSpec("jax", attention="xla")
    )  # it keeps the scores
    jax = EngineSpec("jax", attention="cudnn")
    assert needs(jax) < needs(replace(jax, scan=True))  # XLA keeps the gradients of a loop twice
    assert needs(jax) > held_bytes(jax, *GPT2, "cuda")  # its process takes some, too
    weights = 4 * 124e6
    assert needs(compiled, batch=1) > 4 * weights  # with their gradients and both moments


def test_jax_reserves_what_it_is_asked_for_and_at_most_what_it_would_by_itself(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (40 * GIB, 80 * GIB))
    names = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    assert jax_memory(20 * GIB) == dict(zip(names, ("true", "0.2500", ""), strict=True))
    assert jax_memory(79 * GIB) == dict(zip(names, ("true", "0.7500", ""), strict=True))


def test_settings_say_what_they_were_and_what_is_free():
    settings = {"preset": "gpt2-124m", "batch_size": 32, "dtype": "bfloat16", "layers": None}
    assert fit_settings(settings, ENGINES, device="cuda", available=math.inf) == {}
    changes = fit_settings(settings, ENGINES, device="cuda", available=24 * GIB)
    assert changes["batch_size"] < 32
    assert changes[SMALLER] == [
        f"the step takes {changes['batch_size']} × 1024 tokens (blocks: 12) instead of 32 × 1024 tokens (blocks: 12), "
        "since 24 GiB were free"
    ]
    kept = fit_settings(settings, ENGINES, device="cuda", available=24 * GIB, kept=12 * GIB)
    assert kept["batch_size"] < changes["batch_size"]
    assert kept[SMALLER][0].endswith("since 24 GiB were free")
    model, training = bench_config(
        **{**settings, **{name: changes[name] for name in ("batch_size", "layers", "block_size")}}
    )
    assert (model, training) == fitted(ENGINES, *bench_config(**settings), device="cuda", available=24 * GIB)


def test_models_in_one_process_take_fewer_sequences_then_the_small_preset():
    assert eager_step_that_fits("gpt2-124m", 32, models=4, available=math.inf) == ("gpt2-124m", 32)
    preset, batch = eager_step_that_fits("gpt2-124m", 32, models=4, available=16 * GIB)
    assert preset == "gpt2-124m"
    assert batch < 32
    assert eager_step_that_fits("gpt2-124m", 32, models=8, available=16 * GIB)[1] < batch
    assert eager_step_that_fits("gpt2-124m", 32, models=4, available=4 * GIB)[0] == "tiny"


class Device:
    """A device whose engines take a unit each from their first step on, and fail where none is left."""

    def __init__(self, monkeypatch, *, units, expected=1.0, taken=1.0):
        self.units, self.taken, self.alive, self.groups = units, taken, [], []
        self.reserved, self.need_more = {}, ()  # what engines reserved, by name; those for which it is too little
        monkeypatch.setattr(measure, "engine_bytes", lambda *asked: expected)
        monkeypatch.setattr(measure, "free", lambda device: self.left)
        monkeypatch.setattr(measure, "_SETTLING_SECONDS", 0.0)
        monkeypatch.setattr(measure, "_engine_processes", self.processes)

    @property
    def left(self):
        return self.units - self.taken * len(self.alive)

    @contextmanager
    def processes(self, *where):
        started = []

        def start(spec, model, training, *, reserved=None):
            self.reserved |= {spec.attention: reserved} if reserved else {}
            started.append(Engine(self, spec.attention, reserved))
            return started[-1]

        yield start
        for engine in started:
            engine.close()


class Engine:
    """An engine of a :class:`Device`."""

    def __init__(self, device, name, reserved):
        self.device, self.name, self.reserved = device, name, reserved

    def call(self, method, **arguments):
        if method == "prepare":
            if self.device.left < self.device.taken or (self.reserved and self.name in self.device.need_more):
                raise ChildCrashed("TorchEngine.prepare raised torch.OutOfMemoryError: CUDA out of memory.")
            self.device.alive.append(self.name)
        if method == "run":
            self.device.groups.append(tuple(self.device.alive))
        return Preparation(1.0, 5.0, {}) if method == "prepare" else None

    def close(self):
        if self.name in self.device.alive:
            self.device.alive.remove(self.name)


def measured(*names, **options):
    specs = {name: EngineSpec("jax" if name.startswith("jax") else "torch", attention=name) for name in names}
    shapes = bench_config("tiny", batch_size=2, dtype="float32")
    return measure.measure_engines(specs, *shapes, device="cuda", rounds=2, **options)


def test_all_engines_live_at_once_where_they_fit_and_are_paired_in_the_same_rounds(monkeypatch):
    device = Device(monkeypatch, units=10)
    found = measured("eager", "a", "b", "c")
    assert set(found["c"].rounds.timings) == {"eager", "a", "b", "c"}
    assert max(map(len, device.groups)) == 4


def test_no_more_engines_live_at_once_than_fit_and_each_is_measured_beside_the_references(monkeypatch):
    device = Device(monkeypatch, units=4)
    found = measured("eager", "a", "b", "c", "compiled", "d", "e", references=["compiled"])
    assert all(isinstance(engine, measure.MeasuredEngine) for engine in found.values())
    assert max(map(len, device.groups)) == 4
    for name in "abcde":
        assert {"eager", "compiled", name} <= set(found[name].rounds.timings)
    assert device.alive == []


def test_an_engine_that_does_not_fit_beside_others_runs_alone_later(monkeypatch):
    device = Device(monkeypatch, units=3.5, expected=0.5)  # each takes twice what was expected
    found = measured("eager", "a", "b", "c", "d")
    assert all(isinstance(engine, measure.MeasuredEngine) for engine in found.values())
    assert max(map(len, device.groups)) == 3


@pytest.mark.parametrize("names", [("eager", "a", "jax"), ("eager", "jax")])
def test_an_engine_that_reserved_too_little_takes_what_it_needs_alone(monkeypatch, names):
    device = Device(monkeypatch, units=10)
    device.need_more = ("jax",)
    found = measured(*names, "jax-enough")
    assert all(isinstance(engine, measure.MeasuredEngine) for engine in found.values())
    assert set(found["jax"].rounds.timings) == {"eager", "jax"}
    assert set(device.reserved) == {"jax", "jax-enough"}


def test_engines_of_jax_share_half_of_what_their_group_leaves(monkeypatch):
    device = Device(monkeypatch, units=10)  # each engine is expected to need one
    monkeypatch.setattr(measure, "held_bytes", lambda *asked: 0.9)
    measured("eager", "a", "jax", "jax-too")
    assert device.reserved == pytest.approx({"jax": 0.9 + 6 / 4, "jax-too": 0.9 + 6 / 4})


def test_what_the_first_group_took_decides_how_many_the_next_has(monkeypatch):
    tried = []
    device = Device(monkeypatch, units=8, expected=1.5, taken=2.0)
    call = Engine.call

    def noted(self, method, **arguments):
        if method == "prepare":
            tried.append((self.name, self.device.left))
        return call(self, method, **arguments)

    monkeypatch.setattr(Engine, "call", noted)
    found = measured("eager", *"abcdefgh")
    assert all(isinstance(engine, measure.MeasuredEngine) for engine in found.values())
    short = [name for name, left in tried if left < device.taken]
    assert set(short) <= set("abcd")  # only of the first group, which was filled by what was expected


def test_an_engine_that_fits_nowhere_is_a_row_with_what_it_needs(monkeypatch):
    Device(monkeypatch, units=1.5 * GIB, expected=1.0 * GIB, taken=1.0 * GIB)
    found = measured("eager", "a", "b")
    assert isinstance(found["eager"], measure.MeasuredEngine)
    assert found["a"] == found["b"] == "it needs 1 GiB, 0.5 GiB are free"


def test_when_the_time_is_over_no_further_group_begins(monkeypatch):
    Device(monkeypatch, units=2)
    with budget.within(0.0):
        found = measured("eager", "a", "b", "c")
    assert isinstance(found["a"], measure.MeasuredEngine)
    assert found["b"] == found["c"] == "no time was left for it; give the run more with --budget"
