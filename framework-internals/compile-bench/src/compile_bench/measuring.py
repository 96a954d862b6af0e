"""The measuring jobs, each done in a process of its own: first steps, steady state, memory, accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from benchkit import compare
from benchkit.environment import cpu_pressure
from benchkit.timing import Clock
from compile_bench.accuracy import compare_with_eager
from compile_bench.collector import Collector, import_compiler, prepare_toolchain
from compile_bench.results import FIRST_STEPS, Accuracy, Case, Compiled, FirstSteps, Memory, Steady
from compile_bench.target import Step, Target, load_target


def load_case(case: Case) -> Target:
    """The target of a case on its device, in training or evaluation mode."""
    torch.manual_seed(0)
    target = load_target(case.target, case.device)
    target.model.train(case.train)
    return target


def toolchain(case: Case) -> float:
    """Seconds that a first process spends on finding out about compiler and machine."""
    import_compiler()
    return prepare_toolchain(case.device)


def eager(case: Case) -> FirstSteps:
    """First steps without compiling."""
    target = load_case(case)
    return FirstSteps(_first_steps(target.step(target.copied(), target.args, train=case.train), case))


def compiled(case: Case, *, steady_seconds: float) -> Compiled:
    """First compiled steps and, where ``steady_seconds`` is not 0, everything about later ones."""
    target = load_case(case)
    held_before = _allocated(case)
    own = target.copied()
    import_seconds, toolchain_seconds = import_compiler(), prepare_toolchain(case.device)
    module = _compile(own, case)
    step = _marked(target.step(module, target.args, train=case.train), case)
    with Collector() as collector:
        first = FirstSteps(_first_steps(step, case), import_seconds, toolchain_seconds)
    first = FirstSteps(first.steps, import_seconds, toolchain_seconds, collector.trace())
    if steady_seconds <= 0:
        return Compiled(first)
    compiled_peak = _peak(step, case, held_before)
    held_before = _allocated(case)
    eager_step = target.step(target.copied(), target.args, train=case.train)
    for _ in range(FIRST_STEPS):
        eager_step()
    eager_peak = _peak(eager_step, case, held_before)
    steady = _steady(eager_step, step, case, steady_seconds)
    memory = Memory(eager_peak, compiled_peak) if case.device == "cuda" else None
    accuracy = _accuracy(target, module, own, case)
    return Compiled(first, steady, accuracy, memory)


def _compile(model: nn.Module, case: Case) -> nn.Module:
    mode = None if case.mode == "default" else case.mode
    return cast(nn.Module, torch.compile(model, mode=mode, dynamic=case.dynamic))


def _marked(step: Step, case: Case) -> Step:
    """With CUDA graphs, tell torch that the outputs of the step before are no longer needed."""
    if case.device == "cpu" or case.mode in ("default", "max-autotune-no-cudagraphs"):
        return step

    def marked() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return step()

    return marked


def _first_steps(step: Step, case: Case) -> tuple[float, ...]:
    seconds = []
    for _ in range(FIRST_STEPS):
        start = time.perf_counter()
        step()
        _wait(case)
        seconds.append(time.perf_counter() - start)
    return tuple(seconds)


def _steady(eager: Step, compiled: Step, case: Case, seconds: float) -> Steady:
    # On a GPU the events stand around steps that are queued as a training loop queues them: where the CPU cannot keep
    # up, the wait for it is in the figure. A replayed graph would hide what eager pays for its launches.
    clock: Clock = "cuda-events" if case.device == "cuda" else "wall-clock"
    comparison = compare(
        {"eager": eager, "compiled": compiled},
        device=case.device,
        clock=clock,
        seconds=seconds,
    )
    return Steady(
        comparison["eager"].quantity(),
        comparison["compiled"].quantity(),
        comparison.speedup("compiled", over="eager"),
        comparison["compiled"].method,
        cpu_pressure(),
    )


def _accuracy(target: Target, compiled: Callable[..., Any], model: nn.Module, case: Case) -> Accuracy:
    if case.device == "cuda":
        torch.compiler.cudagraph_mark_step_begin()
    return compare_with_eager(target, compiled, model, train=case.train)


def _peak(step: Step, case: Case, held_before: int) -> int:
    if case.device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held_before


def _allocated(case: Case) -> int:
    return torch.cuda.memory_allocated() if case.device == "cuda" else 0


def _wait(case: Case) -> None:
    if case.device == "cuda":
        torch.cuda.synchronize()
