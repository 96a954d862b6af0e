"""What the processes of a check do: count kernels, measure memory, see which graphs run under CUDA graphs."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import islice

import torch

from compile_bench.capture.collector import Collector, CudaGraphSkips, all_key_parts, user_code_filter
from compile_bench.capture.eager_frames import lost_cuda_graphs
from compile_bench.capture.trace import Graph
from compile_bench.check.budget import GraphRun, MemoryRounds
from compile_bench.check.cache_keys import CacheKey, read_cache_keys
from compile_bench.measure.profiling import STEPS, launches_by_graph, record_steps
from compile_bench.measure.records import Memory
from compile_bench.measure.steps import allocated_bytes, captured_bytes, load_case, marked, peak_bytes
from compile_bench.measure.survey import run_until_settled
from compile_bench.targets.case import FIRST_STEPS, Case
from compile_bench.targets.regional import compile_case
from compile_bench.targets.target import Step

ROUNDS = 3


def kernels(case: Case) -> tuple[int, int | None]:
    """Compile a target with Inductor in as many steps as :func:`compile_bench.measure.survey.triage` takes.

    Returns the kernels, and the compiled graphs that run wholly under CUDA graphs (None if the case does not ask for
    them).
    """
    with Collector() as collector:
        _compile_all(case, lambda step: run_until_settled(step, collector))
    runs = cuda_graphs(case) if case.device == "cuda" and case.wants_cuda_graphs else None
    return collector.trace().kernels, None if runs is None else sum(run.whole for run in runs)


def cache_keys(case: Case) -> tuple[dict[str, str], tuple[CacheKey, ...]]:
    """Compile a target with Inductor, over its schedule too.

    Returns versions and machine by name, and the keys that the caches were asked for.
    """
    with all_key_parts(), Collector() as collector:
        _compile_all(case, lambda step: step())
    facts = {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "CPU instructions": torch.backends.cpu.get_cpu_capability(),
    }
    if case.device == "cuda":
        facts["GPU"] = torch.cuda.get_device_name()
        facts["Triton"] = version("triton")
    return facts, read_cache_keys(collector.events)


def _compile_all(case: Case, repeat: Callable[[Step], object]) -> None:
    """Compile a target in its first step, repeat the step, and go through the schedule."""
    target = load_case(case)
    model = compile_case(target.copied(), case)
    step = target.step(model, train=case.train)
    step()
    repeat(step)
    for call in islice(target.calls(), 1, None):
        call.step(model, train=case.train)()


def memory(case: Case) -> MemoryRounds:
    """Peak memory of an eager and a compiled step of a case, in alternation."""
    target = load_case(case)

    def compiled() -> Step:
        return marked(target.step(compile_case(target.copied(), case), train=case.train), case)

    return peaks_in_alternation(case, lambda: target.step(target.copied(), train=case.train), compiled)


def peaks_in_alternation(case: Case, make_eager: Callable[[], Step], make_compiled: Callable[[], Step]) -> MemoryRounds:
    """Measure the peaks of two steps in one process, one after the other, :data:`ROUNDS` times.

    Both models are on the device meanwhile. On a GPU, the peak of each leaves out what the other one holds.
    """
    if case.device == "cuda":
        _warm(make_eager, case)  # cuBLAS allocates its workspace, 32 MiB on Hopper, which no model holds
    (eager, of_eager), (compiled, of_compiled) = (_warm(make, case) for make in (make_eager, make_compiled))
    rounds = []
    for _ in range(ROUNDS):
        peak = peak_bytes(eager, case, allocated_bytes(case) - of_eager)
        captured = captured_bytes(case)
        whole = peak_bytes(compiled, case, allocated_bytes(case) - of_compiled) + captured
        rounds.append(Memory(peak, whole, captured))
    return MemoryRounds(tuple(rounds))


def _warm(make: Callable[[], Step], case: Case) -> tuple[Step, int]:
    """A step after its first runs, and the bytes that its model holds between two steps."""
    before = allocated_bytes(case)
    step = make()
    for _ in range(FIRST_STEPS + 1):
        step()
    return step, allocated_bytes(case) - before


def cuda_graphs(case: Case) -> tuple[GraphRun, ...]:
    """See which compiled graphs are replayed as CUDA graphs, once each call of a case's schedule has been captured."""
    target = load_case(case)
    model = compile_case(target.copied(), case)
    calls = [marked(call.step(model, train=case.train), case) for call in target.calls()]

    def step() -> None:
        for call in calls:
            call()

    with Collector() as collector, CudaGraphSkips() as skips:
        for _ in range(FIRST_STEPS + 1):  # compile, warm up, capture, and replay once
            step()
        events = list(record_steps(step, case.device).events())
    lost = lost_cuda_graphs(skips.reasons, skips.messages, user_code_filter())
    reasons = [
        (f"{reason} ({silent.frame.place})" if silent.frame.line else reason, compile_ids)
        for reason, silent, compile_ids in zip(skips.reasons, lost, skips.compile_ids, strict=True)
    ]
    launches = launches_by_graph(events, steps=STEPS)
    return graph_runs(launches, read_cache_keys(collector.events), collector.trace().graphs, reasons)


def graph_runs(
    launches: Mapping[str, tuple[float, float]],
    keys: Iterable[CacheKey],
    graphs: Iterable[Graph],
    reasons: Sequence[tuple[str, set[str]]],
) -> tuple[GraphRun, ...]:
    """How each graph ran, and why it did not run as a CUDA graph.

    A reason that PyTorch gives when a graph runs names no compilation. It is assigned to the graphs that are not
    replayed, or to all if all are replayed: a graph may run with and without CUDA graphs in turn. ``launches`` has the
    graphs replayed and kernels launched in a step, by cache key.
    """
    functions = {graph.compile_id: graph.function for graph in graphs}
    known = {key.key: key for key in keys if key.cache == "fx_graph"}
    not_replayed = {key for key, (replays, _) in launches.items() if not replays}
    runs = []
    for key, (replays, launched) in launches.items():
        key_of_graph = known.get(key)
        compile_id = key_of_graph.compile_id if key_of_graph else ""
        affected = key in (not_replayed or launches)
        own = [
            reason for reason, compile_ids in reasons if compile_id in compile_ids or ("" in compile_ids and affected)
        ]
        backward = key_of_graph is not None and key_of_graph.backward
        runs.append(GraphRun(compile_id, functions.get(compile_id, ""), backward, replays, launched, tuple(own)))
    return tuple(runs)
