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
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchkit.results import Quantity
from benchkit.timing.clocks import Clock, Inputs, make_sampler
from benchkit.timing.statistics import bootstrap_median_interval, fewest_samples, quantile

if TYPE_CHECKING:
    from benchkit.device import Device


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
        name: make_sampler(
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
