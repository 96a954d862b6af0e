"""Runs measurements, each in a fresh process with its own cache folders, and combines their results."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from benchkit import UserError
from benchkit.device import Device
from benchkit.processes import ChildFailure, Job, Runner, deferred_module, result_of, waiting_threads
from compile_bench.measure.records import Bench, Compiled, FirstSteps, ShapeStudy, Triage
from compile_bench.measure.shapes import STRATEGIES, Strategy
from compile_bench.targets.case import Case, missing_file
from native_build import missing_inductor

if TYPE_CHECKING:
    from compile_bench.measure import shape_schedule, steps, survey
else:
    shape_schedule = deferred_module("compile_bench.measure.shape_schedule")
    steps = deferred_module("compile_bench.measure.steps")
    survey = deferred_module("compile_bench.measure.survey")

DEFAULT_LIMIT = 600.0
_STOP_SECONDS = 0.1

# Inductor reads it where it is imported.
_VEC_ISA_OK = "TORCHINDUCTOR_VEC_ISA_OK"
# A job for the CPU sees no GPU. Dynamo asks every device that torch sees for the state of its random numbers, which
# makes a context on a GPU, and fails in a fork if the import of the compiler has touched the driver.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

Options = ParamSpec("Options")
Result = TypeVar("Result")

_TORCH = ("torch",)
_COMPILER = ("torch", "torch._dynamo", "torch._inductor.compile_fx")


class Harness(Runner):
    """Runs functions of a case in fresh processes, with a private temporary folder for their caches.

    Args:
        folder: The temporary folder.
        device: Device that is measured.
        limit: Seconds after which a process and all that it started are killed.

    Attributes:
        on_message: Called with each message of a job (:func:`benchkit.processes.send_message`), by several threads.

    Examples:
        >>> with Harness.open("cpu") as harness:  # doctest: +SKIP
        ...     bench = harness.bench(Case("mlp"))
        >>> bench.trace.graphs  # doctest: +SKIP
    """

    def __init__(self, folder: Path, device: Device, limit: float, *, trust_cpu: bool = False) -> None:
        super().__init__(limit)
        # Inductor otherwise compiles and loads a program for each set of vector instructions that the CPU reports.
        trusts = trust_cpu and _VEC_ISA_OK not in os.environ
        self._environment = ({_VEC_ISA_OK: "1"} if trusts else {}) | (_NO_GPU if device == "cpu" else {})
        self.folder = folder
        self.device = device
        self._toolchain: float | None = None
        self._caches = itertools.count(1)
        self._preparing = threading.Lock()
        self._check: threading.Thread | None = None
        self._compile_threads: int | None = None
        self.on_message: Callable[[object], None] | None = None

    @classmethod
    @contextmanager
    def open(cls, device: Device, *, limit: float = DEFAULT_LIMIT, trust_cpu: bool = False) -> Iterator[Harness]:
        """A harness for one block. Its caches are deleted when the block ends.

        With ``trust_cpu``, the check of the toolchain takes the vector instructions that the CPU reports as usable,
        which leaves out most of it. It is for commands that do not report the time of this check.
        """
        with tempfile.TemporaryDirectory(prefix="compile-bench-", ignore_cleanup_errors=True) as folder:
            harness = cls(Path(folder), device, limit, trust_cpu=trust_cpu)
            try:
                yield harness
            finally:
                harness.stop()
                # Again and again: the check may be about to open a server, which would outlive the folder.
                while (check := harness._check) is not None and check.is_alive():
                    harness.stop()
                    check.join(_STOP_SECONDS)

    def toolchain_seconds(self) -> float:
        """Seconds that Inductor needs, once per cache folder, to examine the C++ compiler and the machine.

        The time depends on the machine and not on a model, so every new cache contains the result of this check.

        Raises:
            UserError: Without a C++ compiler, on a CPU.
        """
        with self._preparing:
            if self._toolchain is None:
                if (reason := missing_inductor(self.device)) is not None:
                    raise UserError(reason)
                call = partial(steps.toolchain, Case("", self.device))
                self._toolchain = self._in_child(call, cache=self.folder / "toolchain")
            return self._toolchain

    def begin_toolchain_check(self) -> None:
        """Make the check of :meth:`toolchain_seconds` in the background; a failure shows where it is needed."""

        def check() -> None:
            with suppress(ChildFailure, UserError):
                self.toolchain_seconds()

        self._check = threading.Thread(target=check, name="toolchain", daemon=True)
        self._check.start()

    def eager(self, case: Case, *, timing_folder: Path | None = None) -> FirstSteps:
        """First steps without compiling; the mode of ``case`` does not matter."""
        return self._in_child(partial(steps.eager, case, timing_folder=timing_folder), preload=_TORCH)

    def bench(
        self,
        case: Case,
        *,
        eager: FirstSteps | None = None,
        steady_seconds: float = 10.0,
        warm: bool = True,
        artifacts: bool = False,
        timing_folder: Path | None = None,
        cache: Path | None = None,
        tuned: bool = False,
        on_part: Callable[[str, FirstSteps | Compiled], None] = lambda name, part: None,
    ) -> Bench:
        """Measure everything about a case, in two to four processes.

        Args:
            case: The model, the kind of step and the mode.
            eager: First eager steps, if they were measured before.
            steady_seconds: How long to sample steady steps.
            warm: Whether to measure the first steps with warm caches too.
            artifacts: Whether to measure the first steps with empty folders and the cold process's cache artifacts too.
            timing_folder: See :func:`compile_bench.measure.steps.compiled`.
            cache: Folder of the compiler's caches; a new one by default.
            tuned: Whether ``cache`` contains the autotuning choices of the same case in another mode.
            on_part: Called with the name and the result of each process when it has ended.

        Raises:
            ChildFailure: If a process hung or crashed.
            UserError: If the target is at fault.
        """
        if (reason := missing_inductor(self.device)) is not None:
            raise UserError(reason)
        eager = eager or self.eager(case)  # first, since it finds within seconds whether the target is at fault
        on_part("eager", eager)
        self.toolchain_seconds()
        cache = cache or self.new_cache()
        artifact = cache.with_suffix(".artifact") if artifacts else None

        def compiled(cache: Path, seconds: float, **artifact: Path | None) -> Compiled:
            call = partial(steps.compiled, case, steady_seconds=seconds, timing_folder=timing_folder, **artifact)
            return self._in_child(call, cache=cache, preload=_TORCH)

        cold = compiled(cache, 0.0 if warm else steady_seconds, artifact_out=artifact)
        on_part("empty caches", cold)
        last = cold
        if warm:
            last = compiled(cache, steady_seconds)
            on_part("warm caches", last)
        loaded = None
        if artifact is not None and artifact.exists():
            loaded = compiled(self.new_cache(), 0.0, artifact_in=artifact)
            on_part("cache artifacts", loaded)
        assert last.steady is not None
        assert last.accuracy is not None
        return Bench.of_case(
            case,
            cold.trace,
            eager=eager,
            cold=cold.first,
            warm=last.first if warm else None,
            steady=last.steady,
            accuracy=last.accuracy,
            memory=last.memory,
            artifact=None if loaded is None else loaded.first,
            eager_profile=last.eager_profile,
            compiled_profile=last.compiled_profile,
            no_cudagraphs=cold.no_cudagraphs,
            artifact_bytes=cold.artifact_bytes,
            tuned=tuned,
        )

    def triage(self, case: Case) -> Triage:
        """Count breaks and recompilations of a case, without a code generator; seconds rather than minutes.

        Raises:
            ChildFailure: If the process hung or crashed.
            UserError: If the target is at fault.
        """
        return self.trace(survey.triage, case)

    def shapes(
        self,
        case: Case,
        *,
        schedule: str = "",
        seconds: float = 3.0,
        strategies: Sequence[Strategy] = tuple(STRATEGIES),
    ) -> ShapeStudy:
        """Measure strategies on a target's schedule of shapes.

        Args:
            case: Its mode is used for all strategies; ``dynamic`` and ``scope`` are not.
            schedule: One of :data:`compile_bench.measure.shapes.MADE_SCHEDULES`, or empty for the target's own.
            seconds: How long to sample later passes, for each strategy.
            strategies: The strategies to measure.

        Raises:
            ChildFailure: If a process hung or crashed.
            UserError: If the target is at fault, or its shapes do not change.
        """
        self.toolchain_seconds()
        measured = partial(shape_schedule.shapes, case, schedule=schedule, seconds=seconds)
        answers = [
            self._in_child(partial(measured, strategy=strategy), preload=_TORCH)
            for strategy in sorted(strategies, key=lambda strategy: strategy != "eager")  # eager finds calls that fail
        ]
        strategies_measured = {name: passes for answer in answers for name, passes in answer.strategies.items()}
        return replace(answers[0], strategies=strategies_measured)

    def ask(
        self,
        function: Callable[Concatenate[Case, Options], Result],
        case: Case,
        *arguments: Options.args,
        **options: Options.kwargs,
    ) -> Result:
        """Call a function of a module in a fresh process that has imported the compiler, with a new cache folder.

        Raises:
            ChildFailure: If the process hung or crashed.
            UserError: If the target is at fault.
        """
        return self._in_child(partial(function, case, *arguments, **options))

    def trace(
        self,
        function: Callable[Concatenate[Case, Options], Result],
        case: Case,
        *arguments: Options.args,
        **options: Options.kwargs,
    ) -> Result:
        """Like :meth:`ask`, with one CPU thread: for functions that time nothing and run side by side.

        With more threads than cores, two processes wait for one another.
        """
        return self._in_child(partial(function, case, *arguments, **options), one_thread=True)

    def ask_all(self, calls: Sequence[Callable[[], Result]]) -> list[Result | ChildFailure | UserError]:
        """Make several calls that time nothing: two at once on a CPU, one by one on a GPU because of its memory.

        The result of a call that failed is its failure.
        """

        def attempt(call: Callable[[], Result]) -> Result | ChildFailure | UserError:
            try:
                return call()
            except (ChildFailure, UserError) as error:
                return error

        with waiting_threads(self.beside) as pool:
            attempts = [pool.submit(attempt, call) for call in calls]
            return [result_of(each) for each in attempts]

    @property
    def beside(self) -> int:
        """Number of functions that run at once if they time nothing."""
        return 2 if self.device == "cpu" else 1

    @contextmanager
    def compile_threads(self, count: int | None) -> Iterator[None]:
        """Inside, Inductor compiles with ``count`` worker processes. With None, it uses one for every core."""
        self._compile_threads = count
        try:
            yield
        finally:
            self._compile_threads = None

    def new_cache(self) -> Path:
        """A folder for the compiler's caches that contains only the result of the toolchain check."""
        cache = self.folder / f"cache-{next(self._caches)}"
        seed = self.folder / "toolchain"
        if seed.exists():
            shutil.copytree(seed, cache)
        return cache

    def _in_child(
        self,
        call: partial[Result],
        *,
        cache: Path | None = None,
        preload: tuple[str, ...] = _COMPILER,
        one_thread: bool = False,
    ) -> Result:
        """Make a call, whose first argument is its case, in a fresh process.

        With ``preload=_TORCH``, figures include the import of the compiler.
        """
        case, function = call.args[0], call.func.__name__
        if reason := missing_file(case.target):
            raise UserError(reason)
        cache = cache or self.new_cache()
        cache.mkdir(exist_ok=True)
        threads = self._compile_threads
        limited = {} if threads is None else {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        job = Job(
            partial(_in_one_thread, call) if one_thread else call,
            f"{case.target or function} ({function}, {case.mode})",
            # Whether the compiler's import touches the GPU's driver, which a fork would not survive, depends on its
            # version.
            preload=_TORCH if self.device == "cuda" else preload,
            environment=self._environment | limited,
            child_environment={"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")},
        )
        return self.run(job, on_message=self.on_message)


def _in_one_thread(call: Callable[[], Result]) -> Result:
    import torch

    torch.set_num_threads(1)
    return call()
