"""What graph breaks cost: Python time between two graphs, the tensors in between, and additional compilation."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchkit import Quantity
from compile_bench.capture.collector import backend_of, compile_id, user_code_filter
from compile_bench.capture.frames import RESUMED, plain_function
from compile_bench.capture.trace import Break, CompileTrace
from compile_bench.capture.wording import RECOMPILE_LIMIT
from compile_bench.measure.survey.types import BreakCost, Place, place_of

_STEPS = 40
_MOST_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class _Interval:
    """The time from the end of one graph to the start of the next, within a step."""

    before: str  # compile id of the graph before
    after: str  # compile id of the graph after
    seconds: tuple[float, ...]  # one value for every step
    functions: frozenset[tuple[str, str]]  # the user's functions (file and name) that ran in between


class _Run(NamedTuple):
    """One run of a graph."""

    identity: str  # compile id of the graph
    start: float  # begin, of time.perf_counter()
    end: float  # end, likewise


class GraphTimer:
    """A backend that records when each graph runs.

    The time between two graphs does not depend on the backend that compiles.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        self.__name__ = backend.__name__  # Dynamo's messages show this name
        self.outputs: dict[str, int] = {}
        self._on = False
        self._runs: list[tuple[str, float, float]] = []

    def __call__(self, module: Any, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph."""
        return self._timed(self._backend, module, inputs)

    def for_region(self, wanted: str | Callable[..., Any]) -> Callable[..., Any]:
        """The backend for a region whose code asks for ``wanted``: that one, timed; this one in place of Inductor."""
        if wanted == "inductor":
            return self

        def timed_backend(module: Any, inputs: list[Any], **options: Any) -> Callable[..., Any]:
            return self._timed(own, module, inputs, **options)

        own = backend_of(wanted)
        timed_backend.__name__ = getattr(own, "__name__", str(own))
        return timed_backend

    def _timed(self, backend: Callable[..., Any], module: Any, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        identity, run = compile_id(), backend(module, inputs, **options)

        def timed(*args: Any) -> Any:
            if not self._on:
                return run(*args)
            start = time.perf_counter()
            result = run(*args)
            self._runs.append((identity, start, time.perf_counter()))
            self.outputs.setdefault(identity, _bytes(result))
            return result

        return timed

    def intervals(self, step: Callable[[], Any]) -> list[_Interval]:
        """Measure steps in which nothing is compiled any more. Returns the intervals of a step in order."""
        functions = self._functions(step)
        self._on = True
        steps: list[list[_Run]] = []
        begin = time.perf_counter()
        while len(steps) < _STEPS and (len(steps) < 3 or time.perf_counter() - begin < _MOST_SECONDS):
            self._runs.clear()
            step()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            steps.append([_Run(*run) for run in self._runs])
        self._on = False
        order = [run.identity for run in steps[-1]]
        alike = [runs for runs in steps if [run.identity for run in runs] == order]
        return [
            _Interval(
                before,
                after,
                tuple(runs[index].start - runs[index - 1].end for runs in alike),
                functions.get(index, frozenset()),
            )
            for index, (before, after) in enumerate(pairwise(order), 1)
        ]

    def _functions(self, step: Callable[[], Any]) -> dict[int, frozenset[tuple[str, str]]]:
        """For every graph of a step, by its index: the user's functions that ran since the graph before it."""
        user_code = user_code_filter()
        active: list[tuple[str, str]] = []
        seen: dict[int, set[tuple[str, str]]] = {}

        def event(frame: FrameType, kind: str, _: Any) -> None:
            if kind not in ("call", "return") or not user_code.is_user(frame.f_code.co_filename):
                return
            entry = (frame.f_code.co_filename, frame.f_code.co_name)
            if kind == "call":
                active.append(entry)
            seen.setdefault(len(self._runs), set()).update(active)
            if kind == "return" and active:
                active.pop()

        self._runs.clear()
        self._on = True
        before = sys.getprofile()
        sys.setprofile(event)
        try:
            step()
        finally:
            sys.setprofile(before)
            self._on = False
        return {index: frozenset(functions) for index, functions in seen.items()}


def costs_of(
    timer: GraphTimer, step: Callable[[], Any], trace: CompileTrace, *, settled: bool
) -> Mapping[Place, BreakCost]:
    """Measure what the breaks of a traced step cost.

    Time is lost in the forward pass alone: backward graphs run inside the autograd engine.
    """
    breaks = {place_of(met): met for met in trace.breaks}
    limits = [met for met in trace.breaks if met.category == RECOMPILE_LIMIT]
    intervals = timer.intervals(step) if settled and breaks else []
    caused = {place: _intervals_of(met, intervals) for place, met in breaks.items()}
    sharing = Counter(interval for own in caused.values() for interval in own)
    return {
        place: BreakCost(
            time_lost=_sum(caused[place]),
            breaks_between=max((sharing[interval] for interval in caused[place]), default=1),
            output_bytes=sum(timer.outputs.get(interval.before, 0) for interval in caused[place]),
            compile_seconds=_compile_seconds(met, trace),
            not_measured="" if caused[place] else why_not_measured(met, settled=settled, limits=limits),
        )
        for place, met in breaks.items()
    }


def why_not_measured(met: Break, *, settled: bool, limits: Sequence[Break]) -> str:
    """Why the time that a break loses could not be measured, as a clause.

    ``limits`` are functions that reached the recompile limit before a step was reached in which nothing is compiled.
    """
    if not settled:
        return "something is still compiled in every step"
    around = {plain_function(frame.function) for frame in met.stack} | {plain_function(met.function)}
    for limit in limits:
        skipped = limit.stack[-1] if limit.library else limit
        if plain_function(skipped.function) in around:
            return (
                f"{plain_function(skipped.function)} is recompiled up to the recompile limit and then runs eagerly "
                f"(because of what changes at {Path(skipped.file).name}:{skipped.line}), so that no graph runs around "
                "the break"
            )
    return "no graph runs both before and behind it in a step without compilation"


def _intervals_of(met: Break, intervals: Sequence[_Interval]) -> list[_Interval]:
    """The intervals that a break causes."""
    if met.whole_frame:
        return [interval for interval in intervals if (met.file, met.function) in interval.functions]
    own = [interval for interval in intervals if interval.before in met.compile_ids]
    if own:
        return own
    # Nothing was computed between this break and the one before. Compilations are numbered in the order they happen.
    numbers = [_number(identity) for identity in met.compile_ids]

    def around(interval: _Interval) -> bool:
        before, after = _number(interval.before), _number(interval.after)
        return any(before < number < after for number in numbers)

    return [interval for interval in intervals if around(interval)][:1]


def _number(compile_id: str) -> int:
    """The number of the compiled frame, from its compile id such as ``3/0``."""
    return int(compile_id.split("/")[0])


def _sum(intervals: Sequence[_Interval]) -> Quantity | None:
    """The sum of one break's intervals, step by step."""
    steps = [sum(seconds) for seconds in zip(*(interval.seconds for interval in intervals), strict=True)]
    return _quantity(steps) if steps else None


def _quantity(seconds: Sequence[float]) -> Quantity:
    cuts = statistics.quantiles(seconds, n=5) if len(seconds) > 1 else [seconds[0]] * 4
    return Quantity(statistics.median(seconds), "s", cuts[0], cuts[3], len(seconds), "p20-p80")


def _compile_seconds(met: Break, trace: CompileTrace) -> float:
    """Time to compile the resume functions behind a break, in its function and in the user's functions around it."""
    names = {f"{RESUMED}{frame.function}_at_{frame.line}" for frame in met.stack}
    return sum(graph.compile_seconds or 0.0 for graph in trace.graphs if graph.function in names)


def _bytes(result: Any) -> int:
    """Bytes of the tensors that a graph returns."""
    tensors = [part for part in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(part, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
