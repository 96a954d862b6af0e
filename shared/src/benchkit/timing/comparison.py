"""Time one function, or several against one another, on a CPU or a GPU.

There are three clocks:

``cuda-graph``
    Captures the calls once into a CUDA graph and replays it between two CUDA events. The figure contains the kernels
    and not their launches.
``cuda-events``
    Records the same events around plain calls. The figure contains launches that the GPU waits for.
``wall-clock``
    Reads ``time.perf_counter`` around the calls and whatever ``block`` waits for.

One sample is the time of several calls divided by their number, so that it is much longer than the clock's resolution.
Several functions are measured round by round, in a new random order each round. Slow drift of the machine then affects
all of them alike, and no function always runs after the same other one (with a rotation, each would find the caches as
the same neighbour leaves them). A ratio is computed within each round; the result is the median of these ratios.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from benchkit.device import Device
from benchkit.errors import without_frames
from benchkit.processes import budget
from benchkit.results import RANGE, Quantity
from benchkit.timing.clocks import Clock, Inputs, Sampler, make_sampler
from benchkit.timing.statistics import bootstrap_median_interval, fewest_samples, quantile

# With a budget a comparison may end after so many rounds: a median of three is not one of the extremes.
FEWEST_ROUNDS = 3

# Size of rotating inputs together, as a multiple of the cache.
_COLD = 4.0


@dataclass(frozen=True)
class Timing:
    """Samples of one function's time per call.

    Attributes:
        samples: Seconds per call, one per round, in the order of the rounds.
        calls_per_sample: Number of calls that one sample averages.
        method: The clock in use.
        first_call: Seconds of the first call (compilation, allocation, caches), which is not among the samples.
        note: Why ``method`` is not the clock that ``auto`` tries first; empty otherwise.
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
        """The median, p20 and p80 as a :class:`benchkit.Quantity`."""
        return Quantity(self.median, "s", self.p20, self.p80, len(self.samples), "p20-p80")


@dataclass(frozen=True)
class Comparison:
    """Timings of several functions whose samples were taken round by round, so that ratios can be paired.

    Attributes:
        timings: One timing per function, by name.
    """

    timings: Mapping[str, Timing]

    def __getitem__(self, name: str) -> Timing:
        return self.timings[name]

    def speedup(self, name: str, *, over: str, confidence: float = 0.95) -> Quantity:
        """How many times faster ``name`` is than ``over``: the median of the rounds' ratios, with a bootstrap interval.

        Args:
            name: The function in question.
            over: The reference.
            confidence: Confidence of the interval.

        Returns:
            time(over) / time(name), without unit. An interval that contains 1 shows no difference. With too few rounds
            for the confidence (fewer than 6 for 95 %), the interval is the range of the ratios and named ``range``:
            no verdict may rest on it (:attr:`Quantity.decides`).

        Raises:
            ValueError: If the confidence is not between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence: expected a number between 0 and 1, such as 0.95, got {confidence!r}")
        ratios = [reference / own for own, reference in zip(self[name].samples, self[over].samples, strict=True)]
        middle = quantile(ratios, 0.5)
        if len(ratios) < fewest_samples(confidence):
            return Quantity(middle, "×", min(ratios), max(ratios), len(ratios), RANGE)
        low, high = bootstrap_median_interval(ratios, confidence=confidence)
        return Quantity(middle, "×", low, high, len(ratios), f"bootstrap {confidence:.0%}")


def measure(function: Callable[..., object], **options: Any) -> Timing:
    """Time one function, with the options of :func:`compare`."""
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
    failed: dict[str, Exception] | None = None,
) -> Comparison:
    """Time several functions round by round, interleaved.

    Args:
        functions: The functions, by name.
        device: Where the functions do their work.
        inputs: Sets of positional arguments that successive calls rotate through: one sequence for all functions, or
            one per name. :func:`rotating_inputs` makes sets that keep the caches cold.
        clock: ``auto`` is the wall clock on a CPU. On a GPU it is a CUDA graph, or CUDA events for a function that
            cannot be captured; the timing's ``note`` then says why.
        block: Called with each result to wait for it, such as ``jax.block_until_ready``. It requires the wall clock.
        warmup_calls: Number of calls after the first one that are not sampled.
        seconds: How long to sample, over all functions, a positive number; at least 8 and at most 500 rounds.
        rounds: Number of rounds, at least 1, instead of ``seconds``.
        failed: Where it is given, a function that fails is entered here with its error and the others are timed, as
            long as there is one. So is one that the budget leaves no time to prepare: name the most important first.

    With a budget (:mod:`benchkit.processes.budget`) there are fewer rounds, but at least 3, where they would take over
    half of the time that is left.

    Returns:
        One timing per name, with samples aligned by round.

    Raises:
        OutOfTime: If the budget is spent before the first round.
        ValueError: If there are no functions or no inputs, if a number or a word is none of the possible ones, or if a
            GPU clock is combined with a CPU or with ``block``.
        TypeError: If a function returns what has not run yet, such as a coroutine, and there is no ``block``.
    """
    if not functions:
        raise ValueError("compare() needs at least one function")
    _check_numbers(warmup_calls, seconds, rounds)
    clock = _checked_clock(clock, device, waits=block is not None)
    samplers: dict[str, Sampler] = {}
    for name, function in functions.items():
        arguments = inputs.get(name, ()) if isinstance(inputs, Mapping) else inputs
        if not arguments:
            raise ValueError(f"inputs: expected at least one set of arguments for {name!r}, got none; () is one")
        if other := [type(each).__name__ for each in arguments if not isinstance(each, tuple | list)]:
            raise TypeError(
                f"inputs: expected a tuple of arguments for each call of {name!r}, got {other[0]}; (x,) has one"
            )
        try:
            budget.require(name or "a measurement")
        except budget.OutOfTime as error:
            if failed is None or not samplers:
                raise
            failed[name] = error  # those that are prepared are timed
            continue
        with _failing_alone(name, failed):
            samplers[name] = make_sampler(
                function, arguments, device=device, clock=clock, block=block, warmup_calls=warmup_calls
            )
    with budget.within(budget.left() / 2):
        samples = _sample_rounds(samplers, seconds, rounds, failed)
    if not samples and failed:
        raise next(iter(failed.values()))
    timed = {name: sampler for name, sampler in samplers.items() if name in samples}
    return Comparison(
        {
            name: Timing(tuple(samples[name]), sampler.calls, sampler.method, sampler.first_call, sampler.note)
            for name, sampler in timed.items()
        }
    )


@contextmanager
def _failing_alone(name: str, failed: dict[str, Exception] | None) -> Iterator[None]:
    """Enter the error of a function where one is asked to, instead of raising it."""
    try:
        yield
    except Exception as error:
        if failed is None or isinstance(error, budget.OutOfTime):
            raise
        failed[name] = without_frames(error)


def _sample_rounds(
    samplers: Mapping[str, Sampler], seconds: float, rounds: int | None, failed: dict[str, Exception] | None
) -> dict[str, list[float]]:
    """Sample round by round: ``rounds``, or as many as fit into ``seconds``, until the budget is spent.

    Returns:
        The samples of each function that was sampled in every round.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    order = list(samplers)
    shuffle = random.Random(0).shuffle
    with _garbage_collector_paused():
        for name in order:
            with _failing_alone(name, failed):
                samplers[name].sample()  # it finds the caches as the warm-up of another function left them
        if rounds is None:
            round_seconds = sum(sampler.sample_seconds for sampler in samplers.values())
            rounds = min(max(math.ceil(seconds / max(round_seconds, 1e-9)), 8), 500)
        for taken in range(rounds):
            if taken >= FEWEST_ROUNDS and budget.left() <= 0:
                break
            shuffle(order)
            for name in [name for name in order if name not in (failed or ())]:
                with _failing_alone(name, failed):
                    samples[name].append(samplers[name].sample())
    return {name: taken for name, taken in samples.items() if name not in (failed or ())}


def _check_numbers(warmup_calls: Any, seconds: Any, rounds: Any) -> None:
    if not hasattr(seconds, "__float__") or not 0 < seconds < math.inf:
        raise ValueError(
            f"seconds: expected a positive, finite number, got {seconds!r}; for a number of rounds, name rounds"
        )
    for name, count, least in (("warmup_calls", warmup_calls, 0), ("rounds", 1 if rounds is None else rounds, 1)):
        if not hasattr(count, "__index__") or count < least:
            raise ValueError(f"{name}: expected a whole number, at least {least}, got {count!r}")


def _checked_clock(clock: Clock, device: Device, *, waits: bool) -> Clock:
    """The clock to use, which is the wall clock if a ``block`` function waits for results."""
    for name, word, words in (("device", device, get_args(Device)), ("clock", clock, get_args(Clock))):
        if word not in words:
            raise ValueError(f"{name}: expected one of {', '.join(words)}, got {word!r}")
    if clock not in ("auto", "wall-clock"):
        if device == "cpu":
            raise ValueError(f"clock {clock!r} needs device='cuda'; on a CPU use 'wall-clock'")
        if waits:  # a GPU's clocks wait by themselves, and only for torch's stream
            raise ValueError(f"block is for the wall clock, got clock={clock!r}; leave one of them out")
    return "wall-clock" if waits else clock


@contextmanager
def capturable_stream(device: Device) -> Iterator[None]:
    """Switch to a CUDA stream that :func:`compare` can capture, so that a backward pass can be timed alone.

    Autograd runs a backward pass on the stream of its forward pass, and the default stream cannot be captured. Run the
    forward pass and call :func:`compare` inside this context.

    Args:
        device: On a CPU the context does nothing.
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


def rotating_inputs(make: Callable[[], tuple[Any, ...]], *, device: Device, at_most: int = 16) -> list[tuple[Any, ...]]:
    """Make enough sets of inputs that a rotation through them finds nothing in the last cache before the memory.

    Otherwise a time depends on what ran before: a function that is compared with others finds its operands evicted, and
    one that is timed alone finds them in the cache.

    Args:
        make: Makes one set; the bytes of its tensors are counted.
        device: Whose cache to exceed: a GPU's L2, or a CPU's last level.
        at_most: Largest number of sets, at least 1; on a GPU at least 2.

    Returns:
        Between 1 and ``at_most`` sets; at least 2 on a GPU.
    """
    import torch

    sets = [make()]
    if device == "cuda":
        cache, fewest = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size, 2
    else:
        cache, fewest = last_level_cache(), 1
    one = sum(leaf.numel() * leaf.element_size() for leaf in sets[0] if isinstance(leaf, torch.Tensor))
    count = min(max(math.ceil(_COLD * cache / max(one, 1)), fewest), at_most)
    return sets + [make() for _ in range(count - 1)]


def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the CPU's last-level cache, as Linux states it; 32 MiB where it does not."""
    sizes: dict[int, int] = {}
    with suppress(OSError, ValueError):
        for cache in folder.glob("index*"):
            size = (cache / "size").read_text().strip().removesuffix("K")  # Linux states kibibytes
            sizes[int((cache / "level").read_text())] = int(size) << 10
    return sizes[max(sizes)] if sizes else 32 << 20


@contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    """Pause garbage collection: a collection during one function's sample would count against that function alone."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
