"""Timing one function, or several against one another, on a CPU or a GPU.

Three clocks, chosen by what the functions can bear:

``cuda-graph``
    Calls are captured once into a CUDA graph and replayed: what is timed is the kernels, not the launches. CUDA events
    stand at both ends of a replay.
``cuda-events``
    The same events around plain calls: launches that the GPU waits for are in the figure.
``wall-clock``
    ``time.perf_counter`` around the calls, with whatever ``block`` waits for inside.

One sample is the time of several calls over their number, so that a sample is long against the clock's resolution.
Several functions are measured round by round, the order drawn anew for every round: slow drift of the machine hits all
alike, and none always follows the same other one (a mere rotation would keep the neighbours, and with them what they
leave in the caches). A ratio is formed inside each round before its median is taken.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from benchkit.results import Quantity
from benchkit.statistics import bootstrap_median_interval, fewest_samples, quantile

if TYPE_CHECKING:
    from benchkit.device import Device
from benchkit.errors import first_line

Clock = Literal["auto", "cuda-graph", "cuda-events", "wall-clock"]
Inputs = Sequence[tuple[Any, ...]]

# A sample this long is at least a thousand times the resolution of its clock (perf_counter: tens of ns; CUDA events:
# 0.5 µs) and of the few microseconds between an event and the first kernel of a replayed graph.
_MIN_SAMPLE_SECONDS = {"cuda-graph": 2e-3, "cuda-events": 2e-3, "wall-clock": 1e-3}
_MAX_CALLS_PER_SAMPLE = 100_000
_MAX_CALLS_PER_GRAPH = 1_000


@dataclass(frozen=True)
class Timing:
    """Samples of one function's time per call.

    Attributes:
        samples: seconds per call, one figure a round, in the order they were taken.
        calls_per_sample: how many calls one sample averages.
        method: the clock that was used.
        first_call: seconds of the first call ever made (compilation, allocation, caches), apart from the samples.
        note: why ``method`` is not the one that ``auto`` tries first; empty otherwise.
    """

    samples: tuple[float, ...]
    calls_per_sample: int
    method: str
    first_call: float
    note: str = ""

    @property
    def median(self) -> float:
        """Median seconds per call."""
        return quantile(self.samples, 0.5)

    @property
    def p20(self) -> float:
        """20th percentile, seconds per call."""
        return quantile(self.samples, 0.2)

    @property
    def p80(self) -> float:
        """80th percentile, seconds per call."""
        return quantile(self.samples, 0.8)

    def quantity(self) -> Quantity:
        """The median with p20 and p80, for a record."""
        return Quantity(self.median, "s", self.p20, self.p80, len(self.samples), "p20-p80")


@dataclass(frozen=True)
class Comparison:
    """Timings of several functions whose samples were taken round by round, so that ratios can be paired."""

    timings: Mapping[str, Timing]

    def __getitem__(self, name: str) -> Timing:
        return self.timings[name]

    def speedup(self, name: str, *, over: str, confidence: float = 0.95) -> Quantity:
        """How many times faster ``name`` is than ``over``: the median of the rounds' ratios, with a bootstrap interval.

        Args:
            name: the function that is asked about.
            over: the one it is held against.
            confidence: of the interval.

        Returns:
            time(over) / time(name), without unit; an interval that covers 1 means that no difference was seen. From too
            few rounds for that confidence (fewer than 6 for 95 %) it is the range of the ratios, and called so.
        """
        ratios = [reference / own for own, reference in zip(self[name].samples, self[over].samples, strict=True)]
        middle = quantile(ratios, 0.5)
        if len(ratios) < fewest_samples(confidence):
            return Quantity(middle, "×", min(ratios), max(ratios), len(ratios), "range")
        low, high = bootstrap_median_interval(ratios, confidence=confidence)
        return Quantity(middle, "×", low, high, len(ratios), f"bootstrap {confidence:.0%}")


def measure(function: Callable[..., object], **options: Any) -> Timing:
    """Time one function; the options are those of :func:`compare`."""
    return compare({"": function}, **options)[""]


def compare(
    functions: Mapping[str, Callable[..., object]],
    *,
    device: Device = "cpu",
    inputs: Inputs | Mapping[str, Inputs] = ((),),
    clock: Clock = "auto",
    block: Callable[[Any], object] | None = None,
    warmup_calls: int = 2,
    seconds: float = 1.0,
    rounds: int | None = None,
) -> Comparison:
    """Time several functions round by round, interleaved.

    Args:
        functions: what to call, by name.
        device: where the functions do their work.
        inputs: sets of positional arguments that successive calls rotate through, the same for every function or by
            name; make them with :func:`rotating_inputs` to keep a GPU's L2 cache cold.
        clock: ``auto`` is a CUDA graph on a GPU, or CUDA events for a function that cannot be captured (the timing's
            ``note`` says why), and the wall clock on a CPU.
        block: called with each result to wait for it (``jax.block_until_ready``; a lambda around
            ``torch.cuda.synchronize``); the clock is the wall's then.
        warmup_calls: calls after the first one that are not sampled.
        seconds: how long to sample, over all functions; at least 8 and at most 500 rounds are made.
        rounds: the number of rounds, instead of ``seconds``.

    Returns:
        One timing a name, samples aligned by round.

    Raises:
        ValueError: for no functions, a GPU clock on a CPU or with ``block``, or fewer than one round.
    """
    if not functions:
        raise ValueError("compare() needs at least one function")
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if device == "cpu" and clock not in ("auto", "wall-clock"):
        raise ValueError(f"clock {clock!r} needs device='cuda'; on a CPU use 'wall-clock'")
    if block is not None:  # a GPU's clocks wait by themselves, and for torch's stream alone
        if clock not in ("auto", "wall-clock"):
            raise ValueError(f"block is for the wall clock, got clock={clock!r}; leave one of them out")
        clock = "wall-clock"
    samplers = {
        name: _make_sampler(
            function,
            inputs[name] if isinstance(inputs, Mapping) else inputs,
            device=device,
            clock=clock,
            block=block,
            warmup_calls=warmup_calls,
        )
        for name, function in functions.items()
    }
    with _garbage_collector_paused():
        round_seconds = sum(sampler.sample() * sampler.calls for sampler in samplers.values())
        if rounds is None:
            rounds = min(max(math.ceil(seconds / max(round_seconds, 1e-9)), 8), 500)
        samples: dict[str, list[float]] = {name: [] for name in functions}
        order = list(functions)
        shuffle = random.Random(0).shuffle
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                samples[name].append(samplers[name].sample())
    return Comparison(
        {
            name: Timing(tuple(samples[name]), sampler.calls, sampler.method, sampler.first_call, sampler.note)
            for name, sampler in samplers.items()
        }
    )


@contextmanager
def capturable_stream(device: Device) -> Iterator[None]:
    """Work on a stream that :func:`compare` can capture, so that a backward pass can be timed alone.

    Autograd runs a backward pass on the stream of its forward pass, and the default stream cannot be captured. Make the
    forward graph and call :func:`compare` inside this context.

    Args:
        device: on a CPU there is nothing to do.
    """
    if device == "cpu":
        yield
        return
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def rotating_inputs(
    make: Callable[[], tuple[Any, ...]], *, device: Device, at_most: int = 16, cold_factor: float = 4.0
) -> list[tuple[Any, ...]]:
    """Make enough sets of inputs that a rotation through them finds nothing in the GPU's L2 cache.

    Args:
        make: makes one set; its tensors' bytes are counted.
        device: on a CPU one set is enough: its timings are meant to show a working set that the caller chooses.
        at_most: the largest number of sets.
        cold_factor: how many times the L2 the sets together are to hold.

    Returns:
        Between 1 and ``at_most`` sets; at least 2 on a GPU.
    """
    sets = [make()]
    if device == "cpu":
        return sets
    import torch

    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    one = sum(leaf.numel() * leaf.element_size() for leaf in sets[0] if isinstance(leaf, torch.Tensor))
    count = min(max(math.ceil(cold_factor * cache / max(one, 1)), 2), at_most)
    return sets + [make() for _ in range(count - 1)]


@dataclass
class _Sampler:
    """A warmed-up function and how to take one sample of it."""

    run: Callable[[], float]  # seconds of `calls` calls
    calls: int
    method: str
    first_call: float
    note: str

    def sample(self) -> float:
        return self.run() / self.calls


def _make_sampler(
    function: Callable[..., object],
    inputs: Inputs,
    *,
    device: Device,
    clock: Clock,
    block: Callable[[Any], object] | None,
    warmup_calls: int,
) -> _Sampler:
    wait = _waiter(device, block)
    first_call = _seconds(lambda: wait(function(*inputs[0])))
    for index in range(warmup_calls):
        wait(function(*inputs[index % len(inputs)]))

    if device == "cpu" or clock == "wall-clock":
        run, calls = _long_enough("wall-clock", len(inputs), lambda calls: _wall_clock(function, inputs, calls, wait))
        return _Sampler(run, calls, "wall-clock", first_call, "")

    note = ""
    if clock in ("auto", "cuda-graph"):
        try:
            run, calls = _long_enough("cuda-graph", len(inputs), lambda calls: _cuda_graph(function, inputs, calls))
            return _Sampler(run, calls, "cuda-graph", first_call, "")
        except RuntimeError as error:
            if clock == "cuda-graph":
                raise
            note = f"no CUDA graph: {first_line(error)}"
    run, calls = _long_enough("cuda-events", len(inputs), lambda calls: _cuda_events(function, inputs, calls))
    return _Sampler(run, calls, "cuda-events", first_call, note)


def _waiter(device: Device, block: Callable[[Any], object] | None) -> Callable[[Any], object]:
    if block is not None:
        return block
    if device == "cpu":
        return lambda result: result
    import torch

    return lambda result: torch.cuda.synchronize()


def _long_enough(method: str, sets: int, make: Callable[[int], Callable[[], float]]) -> tuple[Callable[[], float], int]:
    """The shortest runner whose run reaches the least length of a sample, in whole passes over the input sets.

    A guess from one call is not enough: the first calls after a pause are several times slower than those of a sample.
    """
    most = max((_MAX_CALLS_PER_GRAPH if method == "cuda-graph" else _MAX_CALLS_PER_SAMPLE) // sets, 1)
    passes = 1
    while True:
        run = make(passes * sets)
        shortest = min(run() for _ in range(2))
        if shortest >= _MIN_SAMPLE_SECONDS[method] or passes == most:
            return run, passes * sets
        wanted = math.ceil(1.2 * passes * _MIN_SAMPLE_SECONDS[method] / max(shortest, 1e-9))
        passes = min(max(wanted, passes + 1), passes * 16, most)


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _wall_clock(
    function: Callable[..., object], inputs: Inputs, calls: int, wait: Callable[[Any], object]
) -> Callable[[], float]:
    rotation = [inputs[index % len(inputs)] for index in range(calls)]

    def run() -> float:
        start = time.perf_counter()
        for arguments in rotation:
            wait(function(*arguments))
        return time.perf_counter() - start

    return run


def _cuda_graph(function: Callable[..., object], inputs: Inputs, calls: int) -> Callable[[], float]:
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    here = torch.cuda.current_stream()
    stream = None if here == torch.cuda.default_stream() else here
    # A capture that fails leaves the generator's state believing that it is still being captured, and every later
    # random number raises: the capture gets a state of its own, thrown away with it.
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(state.clone_state())
    try:
        # thread_local: the backward pass launches from autograd's own thread.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            # Results stay alive until the capture ends: each call then writes memory of its own, as in real use,
            # instead of a block that the allocator hands out again while it is still in the cache.
            results = [function(*inputs[index % len(inputs)]) for index in range(calls)]
    finally:
        generator.graphsafe_set_state(state)
        torch.cuda.synchronize()
    del results
    graph.replay()
    return _between_events(graph.replay)


def _cuda_events(function: Callable[..., object], inputs: Inputs, calls: int) -> Callable[[], float]:
    rotation = list(itertools.islice(itertools.cycle(inputs), calls))

    def run() -> None:
        for arguments in rotation:
            function(*arguments)

    return _between_events(run)


def _between_events(action: Callable[[], object]) -> Callable[[], float]:
    import torch

    def run() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    return run


@contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    """A collection in the middle of one variant's sample would be charged to that variant alone."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
