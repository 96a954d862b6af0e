"""One torch installation of an upgrade: measures a target in this interpreter, then times steps as it is told to."""

from __future__ import annotations

import logging
import platform
import time
from dataclasses import dataclass, replace

import torch

from benchkit.errors import first_line
from compile_bench.capture.text import break_lines, recompile_lines
from compile_bench.measure.records import Compiled, ErrorPair
from compile_bench.measure.steps import compiled, eager, load_case, marked
from compile_bench.measure.survey import triage
from compile_bench.targets.case import FIRST_STEPS, Case
from compile_bench.targets.regional import compile_case
from compile_bench.targets.target import Step


@dataclass(frozen=True)
class Side:
    """A target under one installation of torch. Figures are None if compiling it fails."""

    torch: str  # version of torch
    python: str  # version of Python
    graphs: int  # captured graphs
    breaks: int  # lines with a graph break
    break_lines: tuple[str, ...]  # the breaks, one line for each cause
    recompiles: int  # recompilations
    recompile_lines: tuple[str, ...]  # the recompilations, one line for each guard
    failures: tuple[str, ...] = ()  # errors that only the compiled model raises
    # How much longer the first steps take than eager's, with empty caches and without the toolchain check; one sample.
    compile_seconds: float | None = None
    eager_bytes: int | None = None  # peak memory of an eager step (:class:`compile_bench.measure.records.Memory`)
    compiled_bytes: int | None = None  # peak memory of a compiled step
    error: float | None = None  # error against float64 of the output or gradient that comes closest to its bound
    error_bound: float | None = None
    accurate: bool = True  # whether everything that was compared is within its bound
    not_compared: str = ""  # why nothing was compared, or what is wrong other than an error's size


class MeasuredSide:
    """A target that was measured for ``seconds``, and its compiled step if compiling it succeeds."""

    def __init__(self, case: Case, seconds: float) -> None:
        logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)
        self._case = case
        first_eager = eager(case)
        measured, failures = None, []
        try:
            measured = compiled(case, steady_seconds=seconds)
        except Exception as error:  # whatever the compiler or the compiled step raises
            failures.append(first_line(error))
        counted = triage(case)
        side = Side(
            torch=torch.__version__,
            python=platform.python_version(),
            graphs=len(counted.trace.graphs),
            breaks=counted.trace.broken_lines,
            break_lines=tuple(break_lines(counted.trace.breaks)),
            recompiles=len(counted.trace.recompiles),
            recompile_lines=tuple(recompile_lines(counted.trace.recompiles)),
            failures=tuple(dict.fromkeys([*failures, *counted.failures])),
        )
        self._side = side if measured is None else _with_figures(side, measured, first_eager.total)
        self._step = None if measured is None else _step(case)

    def figures(self) -> Side:
        """What was measured."""
        return self._side

    def sample(self, seconds: float) -> float:
        """Mean seconds of a step over ``seconds``, at least once."""
        assert self._step is not None
        steps, start = 0, time.perf_counter()
        while not steps or time.perf_counter() - start < seconds:
            self._step()
            steps += 1
        if self._case.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps


def _with_figures(side: Side, measured: Compiled, eager_seconds: float) -> Side:
    accuracy, memory = measured.accuracy, measured.memory
    assert accuracy is not None
    assert memory is not None
    worst = max((pair for pair in (accuracy.output, accuracy.gradient) if pair), key=_over_bound, default=None)
    return replace(
        side,
        compile_seconds=measured.first.total - measured.first.toolchain_seconds - eager_seconds,
        eager_bytes=memory.eager,
        compiled_bytes=memory.compiled,
        error=None if worst is None else worst.compiled,
        error_bound=None if worst is None else worst.bound,
        accurate=accuracy.holds,
        not_compared=accuracy.skipped or accuracy.wrong,
    )


def _over_bound(pair: ErrorPair) -> float:
    return pair.compiled / pair.bound if pair.bound else float("inf") if pair.compiled else 0.0


def _step(case: Case) -> Step:
    """The compiled step, warmed up; Inductor's cache has its code by now."""
    torch.compiler.reset()
    target = load_case(case)
    step = marked(target.step(compile_case(target.copied(), case), train=case.train), case)
    for _ in range(FIRST_STEPS + 1):
        step()
    return step
