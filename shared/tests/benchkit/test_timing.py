"""Timing against workloads of known cost, and the statistics of comparisons."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from benchkit import compare, measure
from benchkit.timing import clocks, comparison
from benchkit.timing.statistics import bootstrap_median_interval, fewest_samples


def burn(seconds: float):
    """A workload of known cost that a busy machine can only prolong."""

    def run() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return run


class FakeClock:
    """A clock that only the workloads move forward, with seeded noise and drift: time without a machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, noise: float, seed: int) -> None:
        self.now = 0.0
        self.noise = noise
        self.random = np.random.default_rng(seed)
        monkeypatch.setattr(clocks.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(comparison.gc, "collect", lambda: 0)  # real time, hundreds of times

    def workload(self, seconds: float):
        def run() -> None:
            drift = 1.0 + 0.3 * np.sin(self.now)  # slow against a round: hits all workloads of a round alike
            self.now += seconds * drift * float(self.random.lognormal(0.0, self.noise))

        return run


def test_a_workload_of_known_cost_takes_that_long():
    found = measure(burn(2e-3), seconds=0.1)
    # A busy machine prolongs some samples, never all: the shortest is the workload and the clock's own cost.
    assert 2e-3 <= min(found.samples) <= 2.2e-3
    assert min(found.samples) <= found.p20 <= found.median <= found.p80
    assert found.method == "wall-clock"
    assert found.calls_per_sample == 1


def test_short_calls_share_a_sample_that_is_long_against_the_clock():
    found = measure(lambda: None, rounds=8)
    assert found.calls_per_sample * found.median >= 0.2e-3
    assert found.median < 5e-6


def test_the_first_call_is_apart_from_the_samples():
    calls = []

    def slow_at_first() -> None:
        burn(0.05 if not calls else 1e-3)()
        calls.append(None)

    found = measure(slow_at_first, rounds=8)
    assert found.first_call >= 0.05
    assert max(found.samples) < 0.05


def test_a_cpus_inputs_rotate_through_more_than_its_cache(monkeypatch):
    """A time must not depend on what ran before: one function alone would find its operands in the cache."""
    import torch

    monkeypatch.setattr(comparison, "last_level_cache", lambda: 1 << 20)
    sets = comparison.rotating_inputs(lambda: (torch.rand(1 << 17),), device="cpu")
    assert len(sets) == 8  # of half a mebibyte
    seen = []
    compare({"": lambda x: (seen.append(x.data_ptr()), time.sleep(2e-3))}, inputs=sets, rounds=8)
    assert len(set(seen[-8:])) == 8  # one call a sample, and each finds the next set


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_stays_in_the_process():
    script = """
import ctypes
from benchkit.timing.freed_memory import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
resident = lambda: int(open("/proc/self/statm").read().split()[1])
assert keep_freed_memory()
before = resident()
block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(64 << 20)))
ctypes.memset(block, 1, 64 << 20)
libc.free(block)
print((resident() - before) * 4096 >> 20)
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if "AssertionError" in answer.stderr:
        pytest.skip("another malloc than glibc's")
    assert int(answer.stdout) >= 60, answer.stderr


def test_inputs_rotate_and_every_variant_sees_each_set():
    seen: dict[str, list[int]] = {"a": [], "b": []}
    compare(
        {name: lambda x, name=name: (seen[name].append(x), burn(1e-3)()) for name in seen},
        inputs=[(0,), (1,), (2,)],
        rounds=8,
    )
    for values in seen.values():
        sampled = values[3:]  # after the first call and two warm-up calls
        assert sampled == [index % 3 for index in range(len(sampled))]


def test_block_is_called_with_every_result():
    results = []
    found = measure(lambda: "result", block=results.append, rounds=8)
    assert set(results) == {"result"}
    assert len(results) >= 8 * found.calls_per_sample


def test_no_variant_always_follows_the_same_other():
    order = []
    compare({name: lambda name=name: (order.append(name), burn(1e-3)()) for name in "abc"}, rounds=60, warmup_calls=0)
    rounds = [tuple(order[index : index + 3]) for index in range(len(order) - 180, len(order), 3)]
    assert {frozenset(turn) for turn in rounds} == {frozenset("abc")}
    assert len(set(rounds)) == 6  # all orders occur


@pytest.mark.parametrize("true_ratio", [1.0, 1.05, 3.0])
def test_the_interval_of_a_ratio_covers_the_truth_about_as_often_as_it_says(monkeypatch, true_ratio):
    covered = 0
    simulations = 200
    for seed in range(simulations):
        clock = FakeClock(monkeypatch, noise=0.05, seed=seed)
        found = compare(
            {"fast": clock.workload(1e-2), "slow": clock.workload(true_ratio * 1e-2)}, rounds=25, warmup_calls=0
        ).speedup("fast", over="slow")
        covered += found.low <= true_ratio <= found.high
    # Binomial(200, 0.95) lies in 182..198 with probability 0.998; the percentile bootstrap of a median of 25 is a
    # little too short, hence the lower end of 0.90.
    assert 0.90 * simulations <= covered <= 0.995 * simulations


def test_a_function_compared_with_itself_on_this_machine():
    work = burn(1e-3)
    ratio = compare({"a": work, "b": work}, rounds=40).speedup("a", over="b", confidence=0.9999)
    assert ratio.low <= 1.0 <= ratio.high
    assert ratio.value == pytest.approx(1.0, abs=0.05)


def test_a_rate_exchanges_the_ends_of_the_interval():
    figure = measure(burn(1e-3), rounds=9).quantity()
    rate = figure.per(2.0, "B/s")
    assert rate.value == pytest.approx(2.0 / figure.value)
    assert rate.low <= rate.value <= rate.high
    assert rate.low == pytest.approx(2.0 / figure.high)


def test_the_bootstrap_is_seeded_and_widens_with_confidence():
    samples = list(np.random.default_rng(1).normal(size=30))
    assert bootstrap_median_interval(samples, seed=3) == bootstrap_median_interval(samples, seed=3)
    low, high = bootstrap_median_interval(samples, confidence=0.5)
    wider_low, wider_high = bootstrap_median_interval(samples, confidence=0.99)
    assert wider_low <= low <= high <= wider_high


def test_few_rounds_give_a_range_and_do_not_call_it_an_interval():
    """The least of 6 samples and the largest are on one side of the median once in 32 times: no 95 % before that."""
    assert fewest_samples(0.95) == 6
    for rounds, name in ((1, "range"), (5, "range"), (6, "bootstrap 95%")):
        speedup = compare({"a": burn(1e-4), "b": burn(1e-4)}, rounds=rounds).speedup("a", over="b")
        assert speedup.interval == name
        assert speedup.decides == (rounds == 6)
    with pytest.raises(ValueError, match="at least one sample"):
        bootstrap_median_interval([])


def test_a_clock_that_does_not_wait_with_block_is_refused():
    with pytest.raises(ValueError, match="block is for the wall clock, got clock='cuda-graph'"):
        measure(lambda: None, device="cuda", clock="cuda-graph", block=print)


def test_bad_arguments_say_what_was_expected():
    with pytest.raises(ValueError, match="at least one function"):
        compare({})
    with pytest.raises(TypeError, match="a tuple of arguments for each call of 'a', got int"):
        compare({"a": abs}, inputs=[1, 2])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="'cuda-graph' needs device='cuda'"):
        measure(lambda: None, clock="cuda-graph")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        *((("seconds", value), "a positive, finite number") for value in (-1, 0, math.nan, math.inf, "1")),
        *((("rounds", value), "a whole number, at least 1") for value in (0, -1, 2.5, math.nan, "3")),
        *((("warmup_calls", value), "a whole number, at least 0") for value in (-1, 2.5, math.nan, None)),
        *((("device", value), "one of cpu, cuda") for value in ("auto", "cuda:0", None)),
        (("clock", "wall"), "one of auto, cuda-graph, cuda-events, wall-clock"),
    ],
)
def test_an_option_that_is_none_of_the_possible_ones_is_named(option, expected):
    name, value = option
    with pytest.raises(ValueError, match=f"^{name}: expected {expected}, got {value!r}"):
        measure(lambda: None, **{name: value})


@pytest.mark.parametrize("confidence", [0, 1, -1, 95, math.nan])
def test_a_confidence_that_is_no_share_is_refused(confidence):
    timing = comparison.Timing((1.0, 2.0), 1, "wall-clock", 1.0)
    with pytest.raises(
        ValueError, match=f"confidence: expected a number between 0 and 1, such as 0.95, got {confidence!r}"
    ):
        comparison.Comparison({"a": timing, "b": timing}).speedup("a", over="b", confidence=confidence)


async def _coroutine() -> None:
    await asyncio.sleep(0)


def _generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("function", [_coroutine, _generator, lambda: map(len, ["a"]), lambda: filter(len, ["a"])])
def test_what_has_not_run_when_it_returns_is_not_timed_as_if_it_had(function):
    with pytest.raises(
        TypeError, match=r"returns a (coroutine|generator|map|filter), which has not run; name in block what runs"
    ):
        measure(function, rounds=3)
    assert measure(function, rounds=3, block=asyncio.run if function is _coroutine else list).median > 0


@pytest.mark.gpu
class TestOnAGpu:
    def test_a_graph_hides_launches_and_agrees_with_events_for_a_long_kernel(self):
        import torch

        x = torch.rand(1 << 28, device="cuda")
        out = torch.empty_like(x)
        graph = measure(lambda: torch.neg(x, out=out), device="cuda", seconds=0.3)
        events = measure(lambda: torch.neg(x, out=out), device="cuda", clock="cuda-events", seconds=0.3)
        assert (graph.method, events.method) == ("cuda-graph", "cuda-events")
        assert graph.median == pytest.approx(events.median, rel=0.1)
        tiny = torch.rand(8, device="cuda")
        assert (
            measure(lambda: tiny + 1, device="cuda").median
            < measure(lambda: tiny + 1, device="cuda", clock="cuda-events").median
        )

    def test_a_function_that_cannot_be_captured_is_timed_by_events_and_says_why(self):
        import torch

        x = torch.rand(1000, device="cuda")
        found = measure(lambda: x.sum().item(), device="cuda", rounds=8)
        assert found.method == "cuda-events"
        assert found.note.startswith("no CUDA graph:")
        with pytest.raises(RuntimeError):
            measure(lambda: x.sum().item(), device="cuda", clock="cuda-graph")
        assert torch.rand(8, device="cuda").isfinite().all()  # nor does a failed capture leave the generator unusable

    def test_a_backward_pass_is_captured_on_a_stream_of_its_own(self):
        import torch

        from benchkit.timing import capturable_stream

        before = torch.cuda.get_rng_state()
        with capturable_stream("cuda"):
            x = torch.rand(1 << 20, device="cuda", requires_grad=True)
            y = x.exp()
            found = measure(lambda: torch.autograd.grad(y, x, y, retain_graph=True), device="cuda", rounds=8)
        assert (found.method, found.note) == ("cuda-graph", "")
        assert not torch.equal(torch.cuda.get_rng_state(), before)  # torch.rand moved it: the state is the user's own

    def test_the_sets_of_inputs_are_larger_than_the_cache(self):
        import torch

        from benchkit.timing import rotating_inputs

        cache = torch.cuda.get_device_properties(0).L2_cache_size
        sets = rotating_inputs(lambda: (torch.rand(1 << 22, device="cuda"),), device="cuda", at_most=100)
        assert sum(x.numel() * x.element_size() for (x,) in sets) >= 4 * cache
        assert len({x.data_ptr() for (x,) in sets}) == len(sets)


@pytest.mark.parametrize("calls", [0, 2, 9])  # at its first call, in its first samples, in a round
def test_a_function_that_fails_is_entered_and_the_others_are_timed(calls):
    class Held:
        """Something large."""

    held = []

    def failing():
        if len(held) < calls:
            held.append(None)
            return
        large = Held()
        held.append(weakref.ref(large))
        raise MemoryError("Unable to allocate 4.00 EiB")

    failed: dict[str, Exception] = {}
    timed = compare({"right": burn(1e-4), "failing": failing, "also right": burn(1e-4)}, rounds=4, failed=failed)
    assert set(timed.timings) == {"right", "also right"}
    assert all(len(timing.samples) == 4 for timing in timed.timings.values())
    assert list(failed) == ["failing"]
    assert isinstance(failed["failing"], MemoryError)
    assert held[-1]() is None  # its memory is free for the others


def test_where_every_function_fails_or_nobody_asks_for_failures_the_error_is_raised():
    def failing():
        raise RuntimeError("an illegal instruction was met")

    with pytest.raises(RuntimeError, match="illegal"):
        compare({"right": burn(1e-4), "failing": failing}, rounds=2)
    with pytest.raises(RuntimeError, match="illegal"):
        compare({"failing": failing}, rounds=2, failed={})
