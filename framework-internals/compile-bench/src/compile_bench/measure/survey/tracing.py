"""One tracing pass: run a compiled target step by step, without generating code, and keep what Dynamo reports."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import cast

import torch
from torch import nn

from benchkit import UserError
from benchkit.errors import first_line
from compile_bench.capture.collector import Collector, user_code_filter
from compile_bench.capture.eager_frames import EagerWatch
from compile_bench.capture.failing_operator import FailingOperatorBackend
from compile_bench.capture.frames import Frame, UserCodeFilter, plain_function
from compile_bench.capture.parsing import broken_in_error, with_failing_lines
from compile_bench.capture.silent_eager import SilentEager, silent_functions
from compile_bench.capture.trace import Break, CompileTrace
from compile_bench.measure.steps import load_case
from compile_bench.targets.case import Case
from compile_bench.targets.randomness import seed_everything
from compile_bench.targets.target import Target

# Steps with the same arguments: an attribute that changes from call to call recompiles before any shape does.
STEADY_CALLS = 3


@dataclass
class TracingPass:
    """What Dynamo reported for one state of the sources.

    Attributes:
        traces: One for every seed.
        breaks: Every graph break with the seed that met it.
        eager: Functions that ran eagerly without a message, by their first line.
        failures: Errors that the compiled model raised and the eager one does not, each in one line.
    """

    traces: list[CompileTrace] = field(default_factory=list)
    breaks: list[tuple[int, Break]] = field(default_factory=list)
    eager: dict[Frame, SilentEager] = field(default_factory=dict)
    failures: dict[str, None] = field(default_factory=dict)

    def add_failure(self, error: Exception, seed: int, user_code: UserCodeFilter) -> None:
        """Add an error, and its place as a break."""
        self.failures[first_line(error)] = None
        place = broken_in_error(str(error), type(error).__name__, user_code, raised_at(error))
        if place is not None:
            # Dynamo reports the same error at the library's line, without the user's line.
            self.breaks = [each for each in self.breaks if each[1].place != place.library or not place.library]
            self.breaks.append((seed, place))


def trace_target(target: Target, case: Case, seeds: Sequence[int]) -> TracingPass:
    """Trace a target once with every seed.

    The backend is ``aot_eager`` for a training step, which traces the backward pass as well, and ``eager`` for
    inference.

    Raises:
        UserError: If the target raises without ``torch.compile`` too.
    """
    user_code = user_code_filter()
    found = TracingPass()
    for seed in seeds:
        torch.compiler.reset()
        model = own_model(target, case)
        backend = FailingOperatorBackend("aot_eager" if case.train else "eager", user_code)
        compiled = cast(nn.Module, torch.compile(model, backend=backend, dynamic=case.dynamic))
        seed_everything(seed)
        error: Exception | None = None
        with Collector() as collector:
            try:
                # One step function for all calls with the same arguments: the state it keeps can cause recompilations.
                step = target.step(compiled, train=case.train)
                others = (each.step(compiled, train=case.train) for each in islice(target.calls(), 1, None))
                for each in chain(repeat(step, STEADY_CALLS), others):
                    each()
            except Exception as raised:  # whatever the model or the compiler raises
                error = raised
        trace = with_failing_lines(collector.trace(), backend.lines, user_code)
        found.traces.append(trace)
        found.breaks += [(seed, each) for each in trace.breaks]
        if error is None:
            for silent in silent_functions(EagerWatch(model.modules(), user_code).run(step), trace):
                found.eager.setdefault(silent.frame, silent)
            continue
        _raise_if_eager_fails(target, case)
        found.add_failure(error, seed, user_code)
    return found


def own_model(target: Target, case: Case) -> nn.Module:
    """A copy of the target's model that no other step changes; the model is loaded again where it cannot be copied."""
    try:
        return copy.deepcopy(target.model)
    except Exception:  # whatever deepcopy raises for a lock, an open file, …
        return load_case(case).model


def raised_at(error: Exception) -> list[Frame]:
    """The frames of an error's traceback, outermost first."""
    return [
        Frame(each.filename, each.lineno or 0, plain_function(each.name), each.line or "")
        for each in traceback.extract_tb(error.__traceback__)
    ]


def _raise_if_eager_fails(target: Target, case: Case) -> None:
    try:
        target.step(own_model(target, case), train=case.train)()
    except Exception as error:  # whatever the model raises
        message = f"{case.target} raises by itself, uncompiled, in {case.kind}: {first_line(error)}"
        raise UserError(message) from error
