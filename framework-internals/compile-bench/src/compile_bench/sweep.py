"""The sweep: every model in inference and training over all modes of ``torch.compile``, a cell at a time, resumable.

A cell is a model, a kind of step and a mode. Several cells compile side by side. Each measures its steps while the
others are stopped, and no two of them autotune on the GPU at once (:mod:`benchkit.processes.exclusive_timing`). A
cell's record is written as soon as it is measured, so a sweep that is killed continues with what is missing. A cell
that fails or hangs has a record that says so, and is not tried again.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchkit import UserError
from benchkit.environment import capture
from benchkit.errors import lacks_memory
from benchkit.processes import ChildCancelled, ChildFailure, ExclusiveTiming, budget, waiting_threads
from benchkit.results import Results
from benchkit.run import Run
from compile_bench.measure.harness import Harness
from compile_bench.measure.records import Bench, EagerStart, FailedCell, FirstSteps, SweepCall
from compile_bench.targets.case import Case

# The order of modes within a group of models. Autotuning takes longest, so it begins first. In the last group it begins
# last: no other work follows there, and a time limit should cut off autotuning rather than anything else.
_PAIR = ("max-autotune-no-cudagraphs", "max-autotune")
_MODES_IN_ORDER = (_PAIR, ("default",), ("reduce-overhead",))
_MODES_OF_LAST_GROUP = (("default",), ("reduce-overhead",), _PAIR)

# Cells that are measured one after the other. The second of a pair finds in its cache what autotuning chose in the
# first.
Unit = tuple[Case, ...]


def cells(configuration: Mapping[str, Any]) -> list[Case]:
    """All cells of a configuration, in the order of the report."""
    return [
        Case(target, configuration["device"], kind == "training", mode)
        for group in configuration["groups"]
        for target in group
        for kind in configuration["kinds"]
        for mode in configuration["modes"]
    ]


def missing(results: Results) -> list[Case]:
    """The cells of a run's sweep that were neither measured nor failed."""
    measured = {(*case.model, case.mode) for case in Bench.select(results) if case.scope == "whole"}
    done = measured | {(*cell.model, cell.mode) for cell in FailedCell.select(results)}
    return [case for case in cells(results.configuration["sweep"]) if (case.target, case.kind, case.mode) not in done]


def units(configuration: Mapping[str, Any], cases: Sequence[Case]) -> list[Unit]:
    """The cells in the order in which they begin: one group after the other, autotuning first in all but the last.

    Cells of one model are separated by cells of others: together they could fill a GPU's memory.
    """
    wanted: dict[tuple[str, str, str], Case] = {(case.target, case.kind, case.mode): case for case in cases}
    ordered: list[Unit] = []
    for group in configuration["groups"]:
        for modes in _MODES_OF_LAST_GROUP if group is configuration["groups"][-1] else _MODES_IN_ORDER:
            for kind in configuration["kinds"]:
                for target in group:
                    unit = tuple(wanted[target, kind, mode] for mode in modes if (target, kind, mode) in wanted)
                    ordered += [unit] if unit else []
    return ordered


# A cell, its measurements or its error, and the seconds that it took.
Answer = tuple[Case, Bench | Exception, float]


def sweep(run: Run, repository: Path) -> None:
    """Measure the cells that are missing, and record each as soon as it is measured; the deadline ends what runs."""
    configuration = run.configuration["sweep"]
    with Harness.open(run.device, limit=configuration["limit_seconds"]) as harness:
        harness.deadline = time.monotonic() + budget.left()
        _Sweep(run, harness, repository).measure_missing()


class _Sweep:
    """One call of the sweep."""

    def __init__(self, run: Run, harness: Harness, repository: Path) -> None:
        self.run = run
        self.harness = harness
        self.repository = repository
        self.configuration = run.configuration["sweep"]
        self.call = len(SweepCall.select(run.recorder.results)) + 1
        self._answers: queue.Queue[Answer] = queue.Queue()
        self._eager = _EagerSteps(harness, run.recorder.results)
        self._timing_folder = harness.folder / "exclusive-timing"

    def measure_missing(self) -> None:
        """Measure missing cells in several processes, then one by one those that ran out of memory beside others."""
        wanted = missing(self.run.recorder.results)
        if not wanted:
            return
        # Cells of several calls are in one document: each call is recorded with its commit and date.
        source = capture(self.run.device, root=self.repository)
        self.run.add(SweepCall(self.call, source.date, source.command, source.commit, source.dirty).record())
        try:
            self.harness.toolchain_seconds()
        except ChildCancelled:
            return
        without_memory = self._measure(units(self.configuration, wanted), self.configuration["processes"])
        self._measure([(case,) for case in without_memory], 1)

    def _measure(self, work: Sequence[Unit], processes: int) -> list[Case]:
        """Record every cell as soon as it is measured, and return those that ran out of memory beside others."""
        without_memory: list[Case] = []
        for case, answer, seconds in self._answered(work, processes):
            if isinstance(answer, ChildCancelled):
                continue
            if processes > 1 and isinstance(answer, Exception) and lacks_memory(answer):
                without_memory.append(case)
            elif isinstance(answer, (ChildFailure, UserError)):
                failed = FailedCell(case.target, case.kind, case.mode, str(answer), seconds, self.call)
                self.run.add(failed.record())
            elif isinstance(answer, Exception):
                raise answer
            else:
                self._keep(answer, processes, seconds)
        return without_memory

    def _keep(self, bench: Bench, processes: int, seconds: float) -> None:
        """Record a cell, and its first eager steps if no other mode's cell has."""
        swept = {"processes": processes, "sweep_call": self.call, "sweep_seconds": seconds}
        self.run.add_all(bench.records(self.repository, self.run.recorder.results, **swept))

    def _answered(self, work: Sequence[Unit], processes: int) -> Iterator[Answer]:
        """One answer for every cell, in the order in which they end."""
        waiting = deque(work)
        timing = ExclusiveTiming(self._timing_folder, self.harness.groups)
        self.harness.stopped_seconds = timing.stopped_seconds
        threads = self.harness.compile_threads(self.configuration["compile_threads"])
        with threads, timing, waiting_threads(processes) as pool:
            for _ in range(min(processes, len(work))):
                pool.submit(self._work_off, waiting)
            try:
                for _ in range(sum(map(len, work))):
                    with self.run.working(f"{len(waiting)} cells or pairs of cells wait"):
                        answer = self._answers.get()
                    yield answer
            except BaseException:
                waiting.clear()
                self.harness.stop()  # the threads of the pool begin no other process
                raise

    def _work_off(self, waiting: deque[Unit]) -> None:
        """In a thread of the pool: measure units until none is left."""
        while waiting:
            try:
                unit = waiting.popleft()
            except IndexError:  # another thread was first
                return
            # `_answered` waits for an answer for each cell, so everything that can fail is inside `_measured`.
            cache, before = None, None
            for case in unit:
                start = time.monotonic()
                before, cache = self._measured(case, cache, before)
                self._answers.put((case, before, time.monotonic() - start))
            if cache is not None:
                shutil.rmtree(cache, ignore_errors=True)  # a hundred of them could fill the disk

    def _measured(
        self, case: Case, cache: Path | None, before: Bench | Exception | None
    ) -> tuple[Bench | Exception, Path | None]:
        """The measurements of a cell, or its error, and its cache. ``before`` is the answer of the first of a pair."""
        if isinstance(before, (ChildFailure, UserError)):
            why = f"not begun, since the mode that autotunes the same kernels failed: {before}"
            return type(before)(why), cache
        try:
            cache = cache or self.harness.new_cache()
            bench = self.harness.bench(
                case,
                eager=self._eager.of(case, self._timing_folder),
                steady_seconds=self.configuration["steady_seconds"],
                warm=False,
                timing_folder=self._timing_folder,
                cache=cache,
                tuned=before is not None,
            )
            return bench, cache
        except Exception as error:  # of any kind: another thread waits for the answer, and raises an unexpected error
            return error, cache


class _EagerSteps:
    """First eager steps by model and kind. All modes share them, so they are measured once over all calls."""

    def __init__(self, harness: Harness, results: Results) -> None:
        self._harness = harness
        self._found: dict[tuple[str, str], FirstSteps | ChildFailure | UserError] = {
            first.model: first.start for first in EagerStart.select(results)
        }
        self._locks: dict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)

    def of(self, case: Case, timing_folder: Path) -> FirstSteps:
        """The steps of a case. A failure is raised again for its other modes, unless it ran out of memory."""
        key = (case.target, case.kind)
        with self._locks[key]:
            if key not in self._found:
                try:
                    self._found[key] = self._harness.eager(case, timing_folder=timing_folder)
                except (ChildFailure, UserError) as error:
                    if isinstance(error, ChildCancelled) or lacks_memory(error):
                        raise
                    self._found[key] = error
            first = self._found[key]
        if isinstance(first, FirstSteps):
            return first
        raise first
