"""The sweep: every model in inference and training over all modes of ``torch.compile``, a cell at a time, resumable.

A cell is a model, a kind of step and a mode. Several cells compile side by side; while one samples its steps, the
others are stopped, and no two of them autotune on the GPU at once (:mod:`benchkit.processes.exclusive_timing`). The
records of a cell are written at once, so a sweep that is killed continues with what is missing. A cell that fails or
hangs leaves a record that says so and is not tried again.
"""

from __future__ import annotations

import queue
import re
import shutil
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchkit import UserError
from benchkit.environment import capture
from benchkit.processes import ChildCancelled, ChildFailure, ExclusiveTiming
from benchkit.results import Quantity, Record, Results
from benchkit.run import Run
from compile_bench.measure.harness import Harness
from compile_bench.measure.measurements import FirstSteps
from compile_bench.measure.serialize import bench_records, case_labels, eager_record, first_steps_of
from compile_bench.sweep.cells import Key, Unit, key_of, missing, units
from compile_bench.targets.case import Case

# How a process that ran out of a GPU's memory ends.
MEMORY = re.compile(r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")

# A cell, its records or what went wrong, and the seconds that it took.
Answer = tuple[Case, list[Record] | Exception, float]


def sweep(run: Run, repository: Path, seconds: float | None) -> None:
    """Measure the cells that are missing, and keep each at once.

    Args:
        run: whose configuration and records say what is missing.
        repository: files below it are named relative to it.
        seconds: after which whatever runs is ended; None for no limit.
    """
    configuration = run.configuration["sweep"]
    with Harness.open(run.device, limit=configuration["limit_seconds"]) as harness:
        if seconds is not None:
            harness.deadline = time.monotonic() + seconds
        _Sweep(run, harness, repository).go_on()


class _Sweep:
    """One call of the sweep over one harness."""

    def __init__(self, run: Run, harness: Harness, repository: Path) -> None:
        self.run = run
        self.harness = harness
        self.repository = repository
        self.configuration = run.configuration["sweep"]
        self.call = len(run.recorder.results.select("sweep call")) + 1
        self._answers: queue.Queue[Answer] = queue.Queue()
        self._eager = _EagerSteps(harness, run.recorder.results)
        self._timing_folder = harness.folder / "exclusive-timing"

    def go_on(self) -> None:
        """Measure what is missing, in several processes; once more alone what found no memory beside the others."""
        wanted = missing(self.run.recorder.results)
        if not wanted:
            return
        self._begin()
        try:
            self.harness.toolchain_seconds()
        except ChildCancelled:
            return
        crowded = self._measure(units(self.configuration, wanted), self.configuration["side_by_side"])
        self._measure([(case,) for case in crowded], 1)

    def _begin(self) -> None:
        """Say of which commit and day the cells of this call are: those of several calls stand in one document."""
        found = capture(self.run.device, root=self.repository)
        self.run.record("sweep call", {"call": self.call}, data=found.source)

    def _measure(self, work: Sequence[Unit], side_by_side: int) -> list[Case]:
        """Keep every cell as it comes; those that found no memory beside others are left, and returned."""
        crowded: list[Case] = []
        for case, found, seconds in self._answered(work, side_by_side):
            if isinstance(found, ChildCancelled):
                continue
            if side_by_side > 1 and isinstance(found, Exception) and MEMORY.search(str(found)):
                crowded.append(case)
            elif isinstance(found, (ChildFailure, UserError)):
                self._keep([self._cell(case, seconds, str(found))])
            elif isinstance(found, Exception):
                raise found
            else:
                self._keep([*found, self._cell(case, seconds, "")])
        return crowded

    def _cell(self, case: Case, seconds: float, failed: str) -> Record:
        return Record(
            "cell", case_labels(case), {"seconds": Quantity(seconds, "s")}, {"failed": failed, "call": self.call}
        )

    def _keep(self, records: Sequence[Record]) -> None:
        """All but the first eager steps where they are there already."""
        known = {key_of(record.labels) for record in self.run.recorder.results.select("first steps", mode="eager")}
        self.run.add_all(
            record for record in records if record.labels["mode"] != "eager" or key_of(record.labels) not in known
        )

    def _answered(self, work: Sequence[Unit], side_by_side: int) -> Iterator[Answer]:
        """One answer for every cell, in the order they come."""
        waiting = deque(work)
        timing = ExclusiveTiming(self._timing_folder, self.harness.groups)
        self.harness.stopped_seconds = timing.stopped_seconds
        threads = self.harness.compile_threads(self.configuration["compile_threads"])
        with threads, timing, ThreadPoolExecutor(side_by_side) as pool:
            for _ in range(min(side_by_side, len(work))):
                pool.submit(self._work_off, waiting, side_by_side)
            try:
                for _ in range(sum(map(len, work))):
                    with self.run.working(f"{len(waiting)} cells or pairs of cells wait"):
                        answer = self._answers.get()
                    yield answer
            except BaseException:
                waiting.clear()
                self.harness.stop()  # the threads of the pool wait for these processes
                raise

    def _work_off(self, waiting: deque[Unit], side_by_side: int) -> None:
        """In a thread of the pool: units until there are no more."""
        while waiting:
            try:
                unit = waiting.popleft()
            except IndexError:  # another thread was first
                return
            # Somebody waits for an answer for each cell, so nothing that can fail stands outside of `_measured`.
            cache, before = None, None
            for case in unit:
                start = time.monotonic()
                before, cache = self._measured(case, cache, before, side_by_side)
                self._answers.put((case, before, time.monotonic() - start))
            if cache is not None:
                shutil.rmtree(cache, ignore_errors=True)  # a hundred of them could fill the disk

    def _measured(
        self, case: Case, cache: Path | None, before: list[Record] | Exception | None, side_by_side: int
    ) -> tuple[list[Record] | Exception, Path | None]:
        """The records of a cell, or what went wrong, and its cache; ``before`` is that of the first one of a pair."""
        if isinstance(before, (ChildFailure, UserError)):
            why = f"not begun, since the mode that autotunes the same kernels failed: {before}"
            return type(before)(why), cache
        try:
            cache = cache or self.harness.new_cache()
            eager = self._eager.of(case, self._timing_folder)
            bench = self.harness.bench(
                case,
                eager=eager,
                steady_seconds=self.configuration["steady_seconds"],
                warm=False,
                timing_folder=self._timing_folder,
                cache=cache,
                tuned=before is not None,
            )
            records = bench_records(bench, self.repository, side_by_side=side_by_side)
            return [eager_record(case, eager), *records], cache
        except Exception as error:  # whatever it is, another thread waits for the answer and raises our own mistakes
            return error, cache


class _EagerSteps:
    """First eager steps by model and kind: the same for all modes, so they are measured once over all calls."""

    def __init__(self, harness: Harness, results: Results) -> None:
        self._harness = harness
        self._found: dict[Key, FirstSteps | ChildFailure | UserError] = {
            key_of(record.labels)[:2]: first_steps_of(record) for record in results.select("first steps", mode="eager")
        }
        self._locks: dict[Key, threading.Lock] = defaultdict(threading.Lock)

    def of(self, case: Case, timing_folder: Path) -> FirstSteps:
        """Those of a case; a failure is raised once more for its other modes, unless there was no memory then."""
        key = (case.target, case.kind)
        with self._locks[key]:
            if key not in self._found:
                try:
                    self._found[key] = self._harness.eager(case, timing_folder=timing_folder)
                except (ChildFailure, UserError) as error:
                    if isinstance(error, ChildCancelled) or MEMORY.search(str(error)):
                        raise
                    self._found[key] = error
            found = self._found[key]
        if isinstance(found, FirstSteps):
            return found
        raise found
