"""Clocks: how one sample of a function's time is taken."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from benchkit.errors import first_line

if TYPE_CHECKING:
    from benchkit.device import Device

Clock = Literal["auto", "cuda-graph", "cuda-events", "wall-clock"]
Inputs = Sequence[tuple[Any, ...]]

# A sample this long is at least a thousand times the resolution of its clock (perf_counter: tens of ns; CUDA events:
# 0.5 µs) and of the few microseconds between an event and the first kernel of a replayed graph.
_MIN_SAMPLE_SECONDS = {"cuda-graph": 2e-3, "cuda-events": 2e-3, "wall-clock": 1e-3}
_CERTAINLY_LONG = 50  # times the shortest sample
_MAX_CALLS_PER_SAMPLE = 100_000
_MAX_CALLS_PER_GRAPH = 1_000


@dataclass
class Sampler:
    """Takes samples of a function that is warmed up.

    Attributes:
        run: Makes ``calls`` calls and returns their seconds.
        calls: Calls that one sample averages.
        method: The clock in use.
        sample_seconds: Seconds that one sample takes, about.
        first_call: Seconds of the function's first call.
        note: Why ``method`` is not the clock that ``auto`` tries first; empty otherwise.
    """

    run: Callable[[], float]
    calls: int
    sample_seconds: float
    method: str
    first_call: float
    note: str = ""

    def sample(self) -> float:
        """Seconds per call, over one run."""
        return self.run() / self.calls


def make_sampler(
    function: Callable[..., object],
    inputs: Inputs,
    *,
    device: Device,
    clock: Clock,
    block: Callable[[Any], object] | None,
    warmup_calls: int,
) -> Sampler:
    """Warm a function up and choose its clock; the arguments are those of :func:`benchkit.timing.compare`.

    Raises:
        RuntimeError: If ``clock`` is ``cuda-graph`` and the function cannot be captured.
        TypeError: If the function returns what has not run yet, and there is no ``block`` that runs it.
    """
    wait = _waiter(device, block)
    first_call = _first_call(function, inputs[0], wait, may_be_lazy=block is not None)
    for index in range(warmup_calls):
        wait(function(*inputs[index % len(inputs)]))

    if device == "cpu" or clock == "wall-clock":
        rotation = itertools.cycle(inputs)  # over all samples: a sample need not be a whole pass
        sampling = _long_enough("wall-clock", 1, lambda calls: _wall_clock(function, rotation, calls, wait))
        return Sampler(*sampling, "wall-clock", first_call)

    note = ""
    if clock in ("auto", "cuda-graph"):
        try:
            sampling = _long_enough("cuda-graph", len(inputs), lambda calls: _cuda_graph(function, inputs, calls))
            return Sampler(*sampling, "cuda-graph", first_call)
        except RuntimeError as error:
            if clock == "cuda-graph":
                raise
            note = f"no CUDA graph: {first_line(error)}"
    sampling = _long_enough("cuda-events", len(inputs), lambda calls: _cuda_events(function, inputs, calls))
    return Sampler(*sampling, "cuda-events", first_call, note)


def _waiter(device: Device, block: Callable[[Any], object] | None) -> Callable[[Any], object]:
    if block is not None:
        return block
    if device == "cpu":
        return lambda result: result
    import torch

    return lambda result: torch.cuda.synchronize()


def _long_enough(
    method: str, sets: int, make: Callable[[int], Callable[[], float]]
) -> tuple[Callable[[], float], int, float]:
    """Choose the number of calls so that a sample is long enough for its clock, in multiples of ``sets``.

    One run is no basis for an estimate: the first calls after a pause are several times slower than those of a sample.
    It is one where it takes so long that this does not matter.

    Returns:
        A function that makes the calls and returns their seconds, the number of calls, and the seconds of a run.
    """
    most = max((_MAX_CALLS_PER_GRAPH if method == "cuda-graph" else _MAX_CALLS_PER_SAMPLE) // sets, 1)
    passes = 1
    while True:
        run = make(passes * sets)
        shortest = run()
        if shortest < _CERTAINLY_LONG * _MIN_SAMPLE_SECONDS[method]:
            shortest = min(shortest, run())
        if shortest >= _MIN_SAMPLE_SECONDS[method] or passes == most:
            return run, passes * sets, shortest
        wanted = math.ceil(1.2 * passes * _MIN_SAMPLE_SECONDS[method] / max(shortest, 1e-9))
        passes = min(max(wanted, passes + 1), passes * 16, most)


def _first_call(
    function: Callable[..., object], arguments: Sequence[Any], wait: Callable[[Any], object], *, may_be_lazy: bool
) -> float:
    start = time.perf_counter()
    result = function(*arguments)
    wait(result)
    seconds = time.perf_counter() - start
    if not may_be_lazy and (kind := unrun(result)):
        raise TypeError(
            f"expected a function that does its work when it is called, got one that returns {kind}, which has not "
            "run; name in block what runs it, such as list or asyncio.run"
        )
    return seconds


# Kinds of results whose code has not run when the function returns, a kind before those that include it.
_UNRUN: dict[type, str] = {
    Coroutine: "a coroutine",
    Generator: "a generator",
    AsyncGenerator: "an asynchronous generator",
    Awaitable: "an awaitable",
    map: "a map",
    filter: "a filter",
}


def unrun(result: object) -> str:
    """``a coroutine`` for a result whose code has not run, and so for each such kind; empty for any other."""
    if isinstance(result, Coroutine):
        result.close()  # or Python warns that it was never awaited
    return next((text for kind, text in _UNRUN.items() if issubclass(type(result), kind)), "")


def _wall_clock(
    function: Callable[..., object], rotation: Iterator[tuple[Any, ...]], calls: int, wait: Callable[[Any], object]
) -> Callable[[], float]:
    def run() -> float:
        sets = list(itertools.islice(rotation, calls))
        start = time.perf_counter()
        for arguments in sets:
            wait(function(*arguments))
        return time.perf_counter() - start

    return run


def _cuda_graph(function: Callable[..., object], inputs: Inputs, calls: int) -> Callable[[], float]:
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    here = torch.cuda.current_stream()
    stream = None if here == torch.cuda.default_stream() else here
    # After a capture that fails, the generator's state still counts as being captured, and every later random number
    # raises. So the capture works on a copy of the state.
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(state.clone_state())
    try:
        # thread_local, because autograd launches a backward pass from another thread.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            # Results stay alive until the capture ends, so that each call writes to other memory, as in real use.
            # Otherwise the allocator would reuse a block that is still in the cache.
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
