"""Runs measurements, each in a fresh process with cache folders of its own, and puts their results together."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

from benchkit import UserError
from benchkit.device import Device
from compile_bench.measure.measurements import Bench, Compiled, FirstSteps, Request, Triage
from compile_bench.measure.nursery import Nursery, Order, StoodStill, never_stopped, nursery
from compile_bench.targets.case import Case
from native_build import missing_inductor

DEFAULT_LIMIT = 600.0

Result = TypeVar("Result")

# Jobs whose figures hold the import of the compiler; the others are forked from an interpreter that has done it. On a
# GPU all start from torch alone: whether the compiler's import touches the driver depends on its version.
_IMPORTS_TIMED = frozenset(("eager", "compiled", "shapes", "self-comparison"))
_TORCH = ("torch",)
_COMPILER = ("torch", "torch._dynamo", "torch._inductor.compile_fx")


class WorkerFailure(Exception):
    """A measuring process that hung, crashed or was killed: the message says which, in one line."""


class OutOfTime(WorkerFailure):
    """Not the process's fault: the time for all measurements was over, or measuring was stopped."""


class Harness:
    """A private temporary folder for caches, and the processes that use it.

    Args:
        device: what is measured.
        limit: seconds after which a process and all that it started are ended.

    Attributes:
        deadline: of ``time.monotonic()``, at which whatever runs is ended and nothing is begun any more; None for none.
        stood_still: how long a process was stopped for others, which is no part of its ``limit``.

    Examples:
        >>> with Harness.open("cpu") as harness:  # doctest: +SKIP
        ...     bench = harness.bench(Case("mlp"))
        >>> bench.trace.graphs  # doctest: +SKIP
    """

    def __init__(self, folder: Path, device: Device, limit: float) -> None:
        self.folder = folder
        self.device = device
        self.limit = limit
        self.deadline: float | None = None
        self.stood_still: StoodStill = never_stopped
        self._toolchain: float | None = None
        self._caches = itertools.count(1)
        self._preparing = threading.Lock()
        self._busy: list[Nursery] = []
        self._stopped = False
        self._compile_threads: int | None = None

    @classmethod
    @contextmanager
    def open(cls, device: Device, *, limit: float = DEFAULT_LIMIT) -> Iterator[Harness]:
        """A harness whose caches are gone when the block ends."""
        with tempfile.TemporaryDirectory(prefix="compile-bench-", ignore_cleanup_errors=True) as folder:
            harness = cls(Path(folder), device, limit)
            try:
                yield harness
            finally:
                harness.stop()

    def toolchain_seconds(self) -> float:
        """Seconds that Inductor needs, once per cache folder, to find out about compiler and machine.

        The cache that this leaves behind is what every "cold" cache starts from: the price belongs to the machine, not
        to a model.

        Raises:
            UserError: without a C++ compiler, on a CPU.
        """
        with self._preparing:
            if self._toolchain is None:
                if (reason := missing_inductor(self.device)) is not None:
                    raise UserError(reason)
                seed = self.folder / "toolchain"
                self._toolchain = cast(float, self._run(Request("toolchain", Case("", self.device)), seed))
            return self._toolchain

    def eager(self, case: Case, *, turn: Path | None = None) -> FirstSteps:
        """First steps without compiling; the mode of ``case`` does not matter.

        Args:
            case: of what.
            turn: see :func:`compile_bench.measure.steps.compiled`.
        """
        return cast(FirstSteps, self.ask("eager", case, turn=turn))

    def bench(
        self,
        case: Case,
        *,
        eager: FirstSteps | None = None,
        steady_seconds: float = 10.0,
        warm: bool = True,
        mega: bool = False,
        turn: Path | None = None,
        cache: Path | None = None,
        tuned: bool = False,
    ) -> Bench:
        """Measure everything about a case, in two to four processes.

        Args:
            case: what.
            eager: first eager steps, if they were measured before.
            steady_seconds: how long to sample steady steps.
            warm: also measure the first steps with warm caches.
            mega: also measure the first steps with empty folders and the cold process's cache artifacts.
            turn: see :func:`compile_bench.measure.steps.compiled`.
            cache: folder of the compiler's caches; a new one by default.
            tuned: whether ``cache`` holds what autotuning chose for the same case in another mode.

        Raises:
            WorkerFailure: if a process hung or crashed.
            UserError: if the target is at fault.
        """
        if (reason := missing_inductor(self.device)) is not None:
            raise UserError(reason)
        eager = eager or self.eager(case)  # before the compiler is prepared: a target at fault says so in seconds
        self.toolchain_seconds()
        sampling = {"steady_seconds": steady_seconds, "turn": turn}
        cache = cache or self.new_cache()
        artifact = cache.with_suffix(".artifact") if mega else None
        first = {**sampling, "artifact_out": artifact, **({"steady_seconds": 0.0} if warm else {})}
        cold = cast(Compiled, self.ask("compiled", case, cache, **first))
        last = cast(Compiled, self.ask("compiled", case, cache, **sampling)) if warm else cold
        loaded = None
        if artifact is not None and artifact.exists():
            loaded = cast(Compiled, self.ask("compiled", case, steady_seconds=0.0, artifact_in=artifact, turn=turn))
        assert last.steady is not None
        assert last.accuracy is not None
        return Bench(
            case,
            eager,
            cold.first,
            last.first if warm else None,
            last.steady,
            last.accuracy,
            last.memory,
            None if loaded is None else loaded.first,
            last.eager_profile,
            last.compiled_profile,
            cold.no_cudagraphs,
            cold.artifact_bytes,
            tuned,
        )

    def triage(self, case: Case) -> Triage:
        """Count breaks and recompilations of a case, without a code generator; seconds rather than minutes.

        Raises:
            WorkerFailure: if the process hung or crashed.
            UserError: if the target is at fault.
        """
        return cast(Triage, self.ask("triage", case))

    def stop(self) -> None:
        """End every process that still runs and begin no other: who waits for one gets a :class:`WorkerFailure`."""
        self._stopped = True
        for each in list(self._busy):
            each.stop()

    @property
    def busy(self) -> bool:
        """Whether a measuring process runs."""
        return any(each.busy for each in list(self._busy))

    def groups(self) -> list[int]:
        """Process groups of the measuring processes that run now."""
        return [each.group for each in list(self._busy) if each.busy]

    @contextmanager
    def compile_threads(self, count: int | None) -> Iterator[None]:
        """Inside, Inductor's pools of compiling workers have so many; None: one for every core."""
        self._compile_threads = count
        try:
            yield
        finally:
            self._compile_threads = None

    def ask(self, job: str, case: Case, cache: Path | None = None, **arguments: object) -> object:
        """Have a job done in a fresh process.

        Args:
            job: one of :data:`compile_bench.measure.worker.JOBS`.
            case: of what.
            cache: folder of the compiler's caches, made by :meth:`new_cache`; by default one of its own.
            arguments: of the job; anything that can be pickled.

        Returns:
            What the job returned.

        Raises:
            WorkerFailure: if the process hung or crashed.
            UserError: if the target is at fault.
        """
        return self._run(Request(job, case, arguments), cache or self.new_cache())

    def ask_all(self, questions: Sequence[Callable[[], Result]]) -> list[Result | WorkerFailure | UserError]:
        """Several questions at once, of jobs that time nothing: two at a time on a CPU, one on a GPU with its memory.

        Returns:
            The answers in order, failures among them.
        """

        def answer(question: Callable[[], Result]) -> Result | WorkerFailure | UserError:
            try:
                return question()
            except (WorkerFailure, UserError) as error:
                return error

        with ThreadPoolExecutor(self.beside) as pool:
            try:
                return list(pool.map(answer, questions))
            except BaseException:
                self.stop()  # the threads of the pool wait for these processes
                raise

    @property
    def beside(self) -> int:
        """How many jobs that time nothing run at once."""
        return 2 if self.device == "cpu" else 1

    def new_cache(self) -> Path:
        """A folder for the compiler's caches, empty but for what the toolchain's check left."""
        cache = self.folder / f"cache-{next(self._caches)}"
        seed = self.folder / "toolchain"
        if seed.exists():
            shutil.copytree(seed, cache)
        return cache

    def _run(self, request: Request, cache: Path) -> object:
        """Answer a request in a fresh process."""
        if self._stopped:
            raise OutOfTime(f"{request.case.target} ({request.job}) was not begun: measuring was stopped")
        what = f"{request.case.target or request.job} ({request.job}, {request.case.mode})"
        deadline = math.inf if self.deadline is None else self.deadline
        left = deadline - time.monotonic()
        limit = min(self.limit, left)
        if limit <= 0:
            raise OutOfTime(f"{what} was not begun: the time for all measurements was over")
        cache.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder, self._nursery(request.job) as found:
            request_path, result_path, log_path = (Path(folder) / name for name in ("request", "result", "log"))
            request_path.write_bytes(pickle.dumps(request))
            directory = str(Path.cwd())
            path = [directory, *filter(None, sys.path)]
            environment = self._environment(cache)
            order = Order(str(request_path), str(result_path), str(log_path), environment, directory, path)
            status = found.run(order, limit, lambda *of: min(self.stood_still(*of), left - limit))
            log = log_path.read_text(errors="replace")
            if self._stopped:
                raise OutOfTime(f"{what} was ended: measuring was stopped")
            if status is None and time.monotonic() >= deadline:
                raise OutOfTime(f"{what} was ended: the time for all measurements was over")
            if status is None:
                raise WorkerFailure(f"{what} was ended after its time limit of {limit:g} s")
            if status != 0 or not result_path.exists():
                raise WorkerFailure(f"{what} ended with status {status}: {_last_line(log)}")
            result = pickle.loads(result_path.read_bytes())  # noqa: S301 # its child's, in the private folder
        if isinstance(result, UserError):
            raise result
        return result

    @contextmanager
    def _nursery(self, job: str) -> Iterator[Nursery]:
        modules = _TORCH if self.device == "cuda" or job in _IMPORTS_TIMED else _COMPILER
        with nursery(modules, self._environment(self.folder)) as found:
            self._busy.append(found)
            try:
                if self._stopped:  # while it started: stop() has not seen it
                    raise OutOfTime("measuring was stopped")
                yield found
            finally:
                self._busy.remove(found)

    def _environment(self, cache: Path) -> dict[str, str]:
        """This process's, with caches below ``cache`` and with this process's import path."""
        threads = self._compile_threads
        return {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **({} if threads is None else {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}),
        }


def _last_line(log: str) -> str:
    """The line of the exception, behind which CUDA's go on with advice; else the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it wrote nothing"]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return (raised or lines)[-1][:300]
