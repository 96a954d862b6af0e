"""Trace the expressions and programs of the report, and record each beside its untraced run and the profiler's view."""

from __future__ import annotations

import functools
import gzip
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchkit import Quantity
from benchkit.command import user_file
from benchkit.results import write_bytes_atomically, write_text_atomically
from benchkit.run import Run
from dispatcher_trace.capture import profile
from dispatcher_trace.capture.shims import Shims
from dispatcher_trace.capture.types import Call
from dispatcher_trace.capture.user_stack import calls_user_code
from dispatcher_trace.explain.operator_cost import THRESHOLD, operator_costs
from dispatcher_trace.measure.cases import FOUR_MODES, PAGE, PERFETTO, SHOWN, Case, cases
from dispatcher_trace.measure.programs import PROGRAMS
from dispatcher_trace.recording import record
from dispatcher_trace.render import by_line, text
from dispatcher_trace.trace import Trace

calls_user_code(__file__)

# Operators that make inputs; they are not what a case is about.
_FACTORIES = ("aten::empty", "aten::linspace")
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
            _record_gpt_step(run, trace, profiled)
        return
    condition = (subject.expression, subject.dtype, subject.mode) if isinstance(subject, Case) else _CUSTOM_OPERATOR
    labels = dict(zip(("expression", "dtype", "mode"), condition, strict=True))
    run.record("trace", labels, values, {**facts, **_trace_data(trace, whole=condition in SHOWN)})


def _trace_data(trace: Trace, *, whole: bool) -> dict[str, Any]:
    """What the report says of a trace; the tree and the reasons only when the report shows the whole trace."""
    forward = [call for call in trace.calls if not call.hops[0].node and not call.operator.startswith(_FACTORIES)]
    main = max(forward, key=lambda call: sum(1 for _ in call.walk()))
    rows = [row for call in trace.calls for row in _rows(call, 0)]
    return {
        "lines": text.tree(trace.calls).splitlines() if whole else [],
        "main_path": [[hop.operator, hop.key] for hop in main.main_path()],
        "hops": rows if whole else [],
        "keys": [hop.key for hop in trace.hops],
        "autocast": {
            "included": any(key.startswith("Autocast") for hop in trace.hops for key in hop.included),
            "removed": any(key.startswith("Autocast") for key in trace.hops[0].removed),
        },
        "disagreements": [
            {name: row[name] for name in ("number", "operator", "key", "predicted")}
            for row in rows
            if row["predicted"] != row["key"]
        ],
        "threads": dict(Counter(hop.thread for hop in trace.hops)),
        "kernels": [
            {**asdict(kernel), "library": kernel.library, "operator": call.operator, "node": call.hops[0].node}
            for call in trace.all_calls
            for kernel in call.kernels
        ],
    }


def _rows(call: Call, depth: int) -> list[dict[str, Any]]:
    """One row for each hop of a call and of the calls inside it."""
    rows: list[dict[str, Any]] = []
    for hop in call.hops:
        rows.append(
            {
                "number": hop.number,
                "depth": depth,
                "operator": hop.operator,
                "key": hop.key,
                "how": hop.how,
                "kind": hop.kind,
                "where": hop.where,
                "native": hop.native,
                "predicted": hop.predicted,
                "dtypes": sorted({tensor.dtype for tensor in hop.tensors}),
                "included": hop.included,
                "removed": hop.removed,
                "thread": hop.thread,
                "node": hop.node,
                "made_node": hop.made_node,
                "effects": hop.effects,
                "key_line": text.key_line(hop).strip(),
                "why": hop.why,
            }
        )
        rows += [row for inner in hop.calls for row in _rows(inner, depth + 1)]
    return rows


def _record_gpt_step(run: Run, trace: Trace, profiled: profile.Profile) -> None:
    """Record the GPT step by line of code and by operator, and write the whole trace beside the report."""
    run.record("source_lines", data=[asdict(row) for row in by_line.summarize(trace.calls)])
    costs = operator_costs(profiled, trace.all_calls)
    run.record("operator_cost", data=[asdict(item) for item in costs if item.share >= THRESHOLD])
    page = trace.to_html("One training step of the GPT, every hop")
    write_text_atomically(run.recorder.directory / PAGE, page)
    document = json.dumps(trace.to_perfetto(), separators=(",", ":")).encode()
    write_bytes_atomically(run.recorder.directory / PERFETTO, gzip.compress(document, mtime=0))
