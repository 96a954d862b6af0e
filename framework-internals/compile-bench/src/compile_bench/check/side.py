"""One torch installation of an upgrade: measures a target in this interpreter, then times steps as it is told to.

``python -m compile_bench.check.side`` reads one JSON object a line and answers each with one. The first is a request
(:class:`compile_bench.check.upgrade.Request`), every further one the seconds for which to sample the step.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
from dataclasses import asdict
from typing import IO, Any

import torch

from benchkit import UserError
from benchkit.errors import first_line
from compile_bench.capture.text import break_lines, recompile_lines
from compile_bench.check.upgrade import Request, Side
from compile_bench.measure.records import Compiled
from compile_bench.measure.steps import compiled, eager, load_case, marked
from compile_bench.measure.survey.survey import triage
from compile_bench.targets.case import FIRST_STEPS, Case
from compile_bench.targets.regional import compile_case
from compile_bench.targets.target import Step


def measure(request: Request) -> tuple[Side, Step | None]:
    """Measure a target, and return its compiled step; None if compiling it fails."""
    case = request.case
    first_eager = eager(case)
    measured, failure = None, ""
    try:
        measured = compiled(case, steady_seconds=request.seconds)
    except Exception as error:  # whatever the compiler or the compiled step raises
        failure = first_line(error)
    counted = triage(case)
    failures = tuple(dict.fromkeys([*([failure] if failure else []), *counted.failures]))
    side = Side(
        torch=torch.__version__,
        python=platform.python_version(),
        graphs=len(counted.trace.graphs),
        breaks=counted.trace.broken_lines,
        break_lines=tuple(break_lines(counted.trace.breaks)),
        recompiles=len(counted.trace.recompiles),
        recompile_lines=tuple(recompile_lines(counted.trace.recompiles)),
        failures=failures,
    )
    if measured is None:
        return side, None
    return _with_figures(side, measured, first_eager.total), _step(case)


def _with_figures(side: Side, measured: Compiled, eager_seconds: float) -> Side:
    accuracy, memory = measured.accuracy, measured.memory
    assert accuracy is not None
    assert memory is not None
    worst = max((pair for pair in (accuracy.output, accuracy.gradient) if pair), key=_over_bound, default=None)
    figures = {
        "compile_seconds": measured.first.total - measured.first.toolchain_seconds - eager_seconds,
        "eager_bytes": memory.eager,
        "compiled_bytes": memory.compiled,
        "error": None if worst is None else worst.compiled,
        "error_bound": None if worst is None else worst.bound,
        "accurate": accuracy.holds,
        "not_compared": accuracy.skipped or accuracy.wrong,
    }
    return Side(**{**asdict(side), **figures})


def _over_bound(pair: Any) -> float:
    return float(pair.compiled / pair.bound) if pair.bound else float("inf") if pair.compiled else 0.0


def _step(case: Case) -> Step:
    """The compiled step, warmed up; Inductor's cache has its code by now."""
    torch.compiler.reset()
    target = load_case(case)
    step = marked(target.step(compile_case(target.copied(), case), train=case.train), case)
    for _ in range(FIRST_STEPS + 1):
        step()
    return step


def sample(step: Step, seconds: float, device: str) -> float:
    """Mean seconds of a step over ``seconds``, at least once."""
    steps, start = 0, time.perf_counter()
    while not steps or time.perf_counter() - start < seconds:
        step()
        steps += 1
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until there is none."""

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)
    request = Request.of(json.loads(requests.readline()))
    try:
        side, step = measure(request)
    except UserError as error:
        answer(error=str(error))
        return
    answer(side=asdict(side))
    for line in requests:
        assert step is not None
        answer(seconds=sample(step, json.loads(line), request.case.device))


if __name__ == "__main__":
    # The target may print. What it prints goes to standard error, and the answers alone to standard output.
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, own)
