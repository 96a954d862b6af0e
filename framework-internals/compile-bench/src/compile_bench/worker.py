"""One measurement in a process of its own: ``python -m compile_bench.worker REQUEST RESULT``.

Both files are pickles that :mod:`compile_bench.harness` writes and reads. A fresh process is the point: what was
compiled, cached or warmed up before would be in the figures otherwise.
"""

from __future__ import annotations

import pickle
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from benchkit import UserError, compare
from benchkit.environment import cpu_pressure
from benchkit.timing import Clock
from compile_bench.accuracy import compare_with_eager
from compile_bench.collector import Collector, import_compiler, prepare_toolchain
from compile_bench.results import FIRST_STEPS, Accuracy, Case, Compiled, FirstSteps, Memory, Request, Steady, Triage
from compile_bench.target import Step, Target, load_target


def answer(request: Request) -> object:
    """Do what a request asks for."""
    case = request.case
    torch.manual_seed(0)
    if request.job == "toolchain":
        import_compiler()
        return prepare_toolchain(case.device)
    target = load_target(case.target, case.device)
    target.model.train(case.train)
    if request.job == "eager":
        return FirstSteps(_first_steps(target.step(target.copied(), target.args, train=case.train), case))
    if request.job == "triage":
        return _triage(case, target)
    return _compiled(request, target)


def _compiled(request: Request, target: Target) -> Compiled:
    case = request.case
    held_before = _allocated(case)
    own = target.copied()
    import_seconds, toolchain_seconds = import_compiler(), prepare_toolchain(case.device)
    compiled = _compile(own, case)
    step = _marked(target.step(compiled, target.args, train=case.train), case)
    with Collector() as collector:
        first = FirstSteps(_first_steps(step, case), import_seconds, toolchain_seconds)
    first = FirstSteps(first.steps, import_seconds, toolchain_seconds, collector.trace())
    if request.steady_seconds <= 0:
        return Compiled(first)
    compiled_peak = _peak(step, case, held_before)
    held_before = _allocated(case)
    eager_step = target.step(target.copied(), target.args, train=case.train)
    for _ in range(FIRST_STEPS):
        eager_step()
    eager_peak = _peak(eager_step, case, held_before)
    steady = _steady(eager_step, step, request)
    memory = Memory(eager_peak, compiled_peak) if case.device == "cuda" else None
    accuracy = _accuracy(target, compiled, own, case)
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


def _steady(eager: Step, compiled: Step, request: Request) -> Steady:
    # On a GPU the events stand around steps that are queued as a training loop queues them: where the CPU cannot keep
    # up, the wait for it is in the figure. A replayed graph would hide what eager pays for its launches.
    clock: Clock = "cuda-events" if request.case.device == "cuda" else "wall-clock"
    comparison = compare(
        {"eager": eager, "compiled": compiled},
        device=request.case.device,
        clock=clock,
        seconds=request.steady_seconds,
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


def _triage(case: Case, target: Target) -> Triage:
    """Trace without generating code: ``aot_eager`` follows the backward pass too, ``eager`` the forward pass alone."""
    backend = "aot_eager" if case.train else "eager"
    model = cast(nn.Module, torch.compile(target.copied(), backend=backend, dynamic=case.dynamic))
    # Twice with the first arguments: what changes from call to call of itself shows before any shape does.
    calls = (target.args, target.args, *target.schedule)
    with Collector() as collector:
        for args in calls:
            target.step(model, args, train=case.train)()
    return Triage(case, collector.trace(), len(calls))


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


def main() -> None:
    """Answer the request in the first argument's file into the second's."""
    request_path, result_path = Path(sys.argv[1]), Path(sys.argv[2])
    request = pickle.loads(request_path.read_bytes())
    warnings.simplefilter("ignore")  # what PyTorch warns about while compiling is on the record already
    try:
        result = answer(request)
    except UserError as error:
        result = error
    result_path.write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
