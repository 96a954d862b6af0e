"""What measuring processes do: first steps, steady state, memory, accuracy."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchkit import UserError, compare
from benchkit.environment import cpu_pressure
from benchkit.processes import Stopwatch, budget, exclusive, one_at_a_time, pauses
from benchkit.timing import Clock
from compile_bench.capture.collector import (
    Collector,
    CudaGraphSkips,
    autotuning_within,
    import_compiler,
    prepare_toolchain,
    user_code_filter,
)
from compile_bench.measure.accuracy import compare_with_eager
from compile_bench.measure.profiling import peak_rise, read_profile, record_steps
from compile_bench.measure.records import Compiled, FirstSteps, Memory, Steady, StepProfile, Untuned
from compile_bench.targets.case import FIRST_STEPS, Case
from compile_bench.targets.loading import load_target
from compile_bench.targets.overlay import forget_user_modules
from compile_bench.targets.regional import compile_case
from compile_bench.targets.target import Step, Target, describe_error, in_mode

# The allocator's pool of everything except captured graphs, each of which has its own pool.
_COMMON_POOL = (0, 0)

# Name of the lock of processes that use the GPU while others compile.
_GPU = "gpu"


def load_case(case: Case) -> Target:
    """The target of a case on its device, in training or evaluation mode unless its mode is fixed."""
    torch.manual_seed(0)
    target = load_target(case.target, case.device)
    in_mode(target.model, train=case.train)
    return target


def load_again(case: Case) -> Target:
    """The target of a case, after the user's files were executed once more.

    Raises:
        UserError: If that is impossible, such as for a file that defines operators or fills a registry.
    """
    forget_user_modules(user_code_filter())
    try:
        return load_case(case)
    except UserError as error:
        raise UserError(f"trying changes loads the target twice in a process, and the second time {error}") from error


def toolchain(case: Case) -> float:
    """Seconds that Inductor takes in a process to examine compiler and machine."""
    import_compiler()
    return prepare_toolchain(case.device)


def eager(case: Case, *, timing_folder: Path | None = None) -> FirstSteps:
    """First steps without compiling."""
    target = load_case(case)
    step = target.step(target.copied(), train=case.train)
    try:
        return FirstSteps(_first_steps(step, case, timing_folder))
    except (Exception, SystemExit) as error:  # whatever the user's model raises
        raise eager_failure(target, case, error) from error


def eager_failure(target: Target, case: Case, error: BaseException) -> UserError:
    """The error of a target that raises without ``torch.compile`` too; it says whether inference works."""
    hint = ""
    if case.train and not target.is_step:
        with suppress(Exception, SystemExit):  # whatever the user's model raises
            target.step(target.copied(), train=False)()
            hint = "; inference works: try --infer"
    return UserError(f"{case.target} raises by itself, uncompiled, in {case.kind}: {describe_error(error)}{hint}")


def compiled(
    case: Case,
    *,
    steady_seconds: float,
    artifact_in: Path | None = None,
    artifact_out: Path | None = None,
    timing_folder: Path | None = None,
) -> Compiled:
    """First compiled steps and, unless ``steady_seconds`` is 0, everything about later ones.

    Artifacts are loaded from ``artifact_in`` before the first step, and written to ``artifact_out`` after the first
    steps. ``timing_folder`` is that of the :class:`benchkit.processes.ExclusiveTiming` of processes that compile side
    by side.
    """
    target = load_case(case)
    bytes_before = allocated_bytes(case)
    model = target.copied()
    with Stopwatch(timing_folder) as importing:
        import_compiler()
    with Stopwatch(timing_folder) as preparing:
        prepare_toolchain(case.device)
    artifact_seconds = _load_artifacts(artifact_in)
    module = compile_case(model, case)
    step = marked(target.step(module, train=case.train), case)
    with Collector() as collector, CudaGraphSkips() as skips, _autotuning_alone(timing_folder):
        seconds = _first_steps(step, case, timing_folder)
    trace = collector.trace(pauses=pauses(timing_folder))
    first = FirstSteps(
        seconds, importing.seconds, preparing.seconds, artifact_seconds, dict(trace.phases), dict(trace.cache_events)
    )
    artifact_bytes = _save_artifacts(artifact_out)
    measured = Compiled(first, trace, no_cudagraphs=_skipped(case, skips), artifact_bytes=artifact_bytes)
    if steady_seconds <= 0:
        return measured
    compiled_peak, captured = peak_bytes(step, case, bytes_before), captured_bytes(case)
    bytes_before = allocated_bytes(case)
    eager_step = target.step(target.copied(), train=case.train)
    for _ in range(FIRST_STEPS):
        eager_step()
    memory = Memory(peak_bytes(eager_step, case, bytes_before), compiled_peak + captured, captured)
    steady, profiles = _sample_and_profile(target, (eager_step, step), case, steady_seconds, timing_folder)
    del eager_step  # the float64 copies need the memory of its weights and gradients
    _release_memory(case)
    with one_at_a_time(timing_folder, _GPU):
        if case.device == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        accuracy = compare_with_eager(target, module, model, train=case.train)
        _release_memory(case)
    measured = replace(measured, steady=steady, accuracy=accuracy, memory=memory)
    return replace(measured, eager_profile=profiles[0], compiled_profile=profiles[1])


def _sample_and_profile(
    target: Target, steps: tuple[Step, Step], case: Case, seconds: float, timing_folder: Path | None
) -> tuple[Steady, list[StepProfile]]:
    """Sample and profile the eager and the compiled step, both warmed up, while the other processes are stopped."""
    with _autotuning_alone(timing_folder):
        untuned = _untuned(target, case)
    with exclusive(timing_folder):
        steady = sample(*steps, case, seconds, untuned=untuned)
        recorded = [record_steps(step, case.device) for step in steps]
    return steady, [read_profile(profiled, case.device) for profiled in recorded]


def _autotuning_alone(timing_folder: Path | None) -> AbstractContextManager[object]:
    """Inside, no two processes time candidates of autotuning on the GPU at once."""
    return autotuning_within(partial(one_at_a_time, timing_folder, _GPU))


def _untuned(target: Target, case: Case) -> Step | None:
    """The step of a mode that autotunes, compiled without autotuning and warmed up.

    A step differs between two processes by more than autotuning changes it, so both steps have to be in one process.
    None for a mode that does not autotune, for nested regions, which mark the class of the blocks and so cannot be
    compiled twice, and where a third model does not fit in the memory.
    """
    plain = case.untuned
    if plain is None or case.scope == "nested":
        return None
    try:
        step = marked(target.step(compile_case(target.copied(), plain), train=case.train), plain)
        for _ in range(FIRST_STEPS):
            step()
    except torch.OutOfMemoryError:
        return None
    return step


def _load_artifacts(file: Path | None) -> float:
    if file is None:
        return 0.0
    start = time.perf_counter()
    torch.compiler.load_cache_artifacts(file.read_bytes())
    return time.perf_counter() - start


def _save_artifacts(file: Path | None) -> int:
    saved = None if file is None else torch.compiler.save_cache_artifacts()
    return 0 if saved is None or file is None else file.write_bytes(saved[0])


def _skipped(case: Case, skips: CudaGraphSkips) -> tuple[str, ...]:
    """Why CUDA graphs were left out, in PyTorch's words; empty in a mode that does not ask for them."""
    if not case.wants_cuda_graphs:
        return ()
    return ("a CPU has none",) if case.device == "cpu" else tuple(skips.reasons)


def marked(step: Step, case: Case) -> Step:
    """The step; with CUDA graphs it first tells torch that the outputs of the step before are no longer needed."""
    if case.device == "cpu" or not case.wants_cuda_graphs:
        return step

    def marked_step() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return step()

    return marked_step


def _first_steps(step: Step, case: Case, timing_folder: Path | None) -> tuple[float, ...]:
    seconds = []
    for _ in range(FIRST_STEPS):
        with Stopwatch(timing_folder) as watch:
            step()
            if case.device == "cuda":
                torch.cuda.synchronize()
        seconds.append(watch.seconds)
    return tuple(seconds)


def sample(eager: Step, compiled: Step, case: Case, seconds: float, *, untuned: Step | None = None) -> Steady:
    """Sample steady steps in alternation: eager, compiled, and eager once more as the control.

    All are warmed up. Sampling the ``untuned`` step, too, takes a third more time.
    """
    # On a GPU the events enclose steps that are queued as a training loop queues them, so the figure contains the time
    # that the GPU waits for the CPU. A replayed graph would hide the cost of eager's launches.
    clock: Clock = "cuda-events" if case.device == "cuda" else "wall-clock"
    steps = {"eager": eager, "compiled": compiled, "control": eager}
    if untuned is not None:
        steps["untuned"] = untuned
    seconds *= len(steps) / 3
    with budget.at_least(max(budget.TIMING, seconds)):
        comparison = compare(steps, device=case.device, clock=clock, seconds=seconds)
    other = None
    if case.untuned is not None and untuned is not None:
        speedup = comparison.speedup("compiled", over="untuned")
        other = Untuned(case.untuned.mode, comparison["untuned"].quantity(), speedup)
    return Steady(
        comparison["eager"].quantity(),
        comparison["compiled"].quantity(),
        comparison.speedup("compiled", over="eager"),
        comparison["compiled"].method,
        cpu_pressure(),
        comparison.speedup("control", over="eager"),
        other,
    )


def self_comparison(case: Case, *, runs: int, seconds: float) -> list[Steady]:
    """Sample a step against a copy of itself several times. Any difference is an error of the method."""
    target = load_case(case)
    one, other = (target.step(target.copied(), train=case.train) for _ in range(2))
    return [sample(one, other, case, seconds) for _ in range(runs)]


def peak_bytes(step: Step, case: Case, bytes_before: int) -> int:
    """Peak memory of a step in bytes: on a GPU above ``bytes_before``, on a CPU without weights."""
    if case.device == "cpu":
        return peak_rise(step)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - bytes_before


def captured_bytes(case: Case) -> int:
    """Bytes that captured graphs keep for their replays.

    The allocator counts them as free and does not give them out. A replay does not change the allocator's counts, so
    these bytes are added to the peak.
    """
    if case.device == "cpu":
        return 0
    segments = [
        segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != _COMMON_POOL
    ]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in segments)


def allocated_bytes(case: Case) -> int:
    """Bytes that torch's allocator has given out on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if case.device == "cuda" else 0


def _release_memory(case: Case) -> None:
    """Return the memory that torch's allocator keeps: other processes measure on this GPU too."""
    if case.device == "cuda":
        torch.cuda.empty_cache()
