"""Trace the expressions and programs of the report, and check each against its untraced run and the profiler."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from benchkit import Quantity
from benchkit.command import user_file
from benchkit.run import Run
from dispatcher_trace.capture import profile
from dispatcher_trace.capture.shims import Shims
from dispatcher_trace.capture.user_stack import calls_user_code
from dispatcher_trace.measure.cases import FOUR_MODES, SHOWN, Case, cases
from dispatcher_trace.measure.programs import PROGRAMS
from dispatcher_trace.measure.trace_records import record_gpt_step, trace_data
from dispatcher_trace.recording import record

calls_user_code(__file__)

_CUSTOM_OPERATOR = ("scaled_relu(x, 2.0)", "f32", "requires_grad")
Evaluate = Callable[[], list[torch.Tensor]]
Subjects = dict[Case | str, Callable[[], Evaluate]]
Untraced = tuple[list[torch.Tensor], profile.Profile]


def subjects(run: Run, root: Path, *, compile: bool) -> Subjects:
    """Everything that the report traces, by case or name: functions that make the inputs and return the call.

    The most important are first: the cases that the report begins with or shows hop by hop, then the GPT's step.

    Args:
        run: The run, for its device and the size of the inputs.
        root: The package's folder, which has ``examples/custom_op.py``.
        compile: Whether this machine can compile.
    """
    made: Subjects = {case: case.prepare for case in cases(run.configuration["size"], run.device, compile=compile)}
    made |= {name: functools.partial(make, run.device) for name, make in PROGRAMS.items()}
    step = user_file.load_file(root / "examples" / "custom_op.py", "traced_").step

    def custom_operator() -> Evaluate:
        def call() -> list[torch.Tensor]:
            with torch.device(run.device):
                result = step()
            result.sum().backward()
            return [result]

        return call

    return dict(sorted({**made, "custom operator": custom_operator}.items(), key=lambda item: _rank(item[0])))


def _rank(subject: Case | str) -> int:
    """The place of a subject in the order of importance."""
    if not isinstance(subject, Case):
        return {"GPT step": 1, "CNN step": 3}.get(subject, 0)
    first = subject.expression in FOUR_MODES and subject.dtype == "f32"
    return 0 if first or (subject.expression, subject.dtype, subject.mode) in SHOWN else 2


def run_untraced(make: Callable[[], Evaluate]) -> Untraced:
    """Run a subject without shims.

    Returns:
        Its results, and what the profiler saw.
    """
    make()()  # the first call of an operator may fill caches, that of a compiled function compiles
    evaluate = make()
    with profile.profiled() as profiled:
        results = evaluate()
    return results, profiled


def run_traced(run: Run, shims: Shims, subject: Case | str, make: Callable[[], Evaluate], untraced: Untraced) -> None:
    """Trace a subject, and record how the trace compares with the untraced run."""
    expected, profiled = untraced
    evaluate = make()
    with record(shims, kernels=True) as trace:
        results = evaluate()
    assert trace.match is not None
    agreed, positions = trace.agreement
    traced_operators = Counter(call.operator.partition(".")[0] for call in trace.all_calls) + Counter(trace.unrecorded)
    untraced_operators = Counter(profile.operator_names(profiled.events))
    counts = {
        "hops": len(trace.hops),
        "positions": positions,
        "agreed": agreed,
        "calls": trace.match.calls,
        "profiled": trace.match.operators,
        "tied": trace.match.tied,
    }
    facts = {
        "bit_equal": len(results) == len(expected) and all(map(torch.equal, results, expected)),
        "same_operators": traced_operators == untraced_operators,
        "only_untraced": dict(untraced_operators - traced_operators),
        "only_traced": dict(traced_operators - untraced_operators),
        "notes": trace.notes,
        "findings": [asdict(finding) for finding in trace.findings if finding.kind != "prediction"],
    }
    values = {name: Quantity(count, "") for name, count in counts.items()}
    if subject in PROGRAMS:
        run.record("program", {"step": str(subject)}, values, facts)
        if subject == "GPT step":
            record_gpt_step(run, trace, profiled)
        return
    condition = (subject.expression, subject.dtype, subject.mode) if isinstance(subject, Case) else _CUSTOM_OPERATOR
    labels = dict(zip(("expression", "dtype", "mode"), condition, strict=True))
    run.record("trace", labels, values, {**facts, **trace_data(trace, whole=condition in SHOWN)})
