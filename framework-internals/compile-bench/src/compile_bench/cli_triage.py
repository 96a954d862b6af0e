"""The command ``triage``."""

from __future__ import annotations

from benchkit.progress import working
from benchkit.report import markdown_table
from compile_bench.cli_common import DeviceName, Dynamic, Limit, TargetName, Train, case_of, leave, place
from compile_bench.harness import DEFAULT_LIMIT, Harness
from compile_bench.results import Triage


def triage(
    target: TargetName,
    train: Train = True,
    dynamic: Dynamic = None,
    device: DeviceName = "auto",
    limit: Limit = DEFAULT_LIMIT,
) -> None:
    """List every graph break and recompilation with its line, its reason and its category."""

    def trace() -> int:
        case = case_of(target, train, "default", dynamic, device)
        with Harness.open(case.device, limit=limit) as harness, working(f"tracing {target}"):
            found = harness.triage(case)
        print(describe_triage(found))
        return 0

    leave(trace)


def describe_triage(found: Triage) -> str:
    """Breaks and recompilations as Markdown."""
    trace = found.trace
    lines = [
        f"{found.case.target}, {found.case.kind}: {len(trace.graphs)} graphs, {trace.operations} operations, "
        f"{trace.guards} guards, {len(trace.breaks)} breaks, {len(trace.recompiles)} recompilations "
        f"in {found.calls} calls"
    ]
    if trace.breaks:
        rows = [
            (
                place(e.file, e.line),
                e.category,
                e.reason + (" (whole function eager)" if e.whole_frame else ""),
                e.source,
            )
            for e in trace.breaks
        ]
        lines += ["", markdown_table(["break", "category", "reason", "line"], rows, left=4)]
    if trace.recompiles:
        rows = [(place(e.file, e.line), e.cause, e.guard, e.function) for e in trace.recompiles]
        lines += ["", markdown_table(["recompiled", "cause", "guard that failed", "function"], rows, left=4)]
    return "\n".join(lines)
