"""What the report records of a trace: its hops as rows, and the GPT step by line and by operator."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from benchkit.results import write_bytes_atomically, write_text_atomically
from benchkit.run import Run
from dispatcher_trace.capture.profile import Profile
from dispatcher_trace.capture.types import Call
from dispatcher_trace.explain.operator_cost import THRESHOLD, operator_costs
from dispatcher_trace.measure.cases import PAGE, PERFETTO
from dispatcher_trace.render import by_line, text
from dispatcher_trace.trace import Trace

# Operators that make inputs; they are not what a case is about.
_FACTORIES = ("aten::empty", "aten::linspace")


def trace_data(trace: Trace, *, whole: bool) -> dict[str, Any]:
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


def record_gpt_step(run: Run, trace: Trace, profiled: Profile) -> None:
    """Record the GPT step by line of code and by operator, and write the whole trace beside the report."""
    run.record("source_lines", data=[asdict(row) for row in by_line.summarize(trace.calls)])
    costs = operator_costs(profiled, trace.all_calls)
    run.record("operator_cost", data=[asdict(item) for item in costs if item.share >= THRESHOLD])
    page = trace.to_html("One training step of the GPT, every hop")
    write_text_atomically(run.recorder.directory / PAGE, page)
    document = json.dumps(trace.to_perfetto(), separators=(",", ":")).encode()
    write_bytes_atomically(run.recorder.directory / PERFETTO, gzip.compress(document, mtime=0))
