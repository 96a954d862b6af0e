"""The command ``triage``. What imports torch is imported when the command runs."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchkit import UserError, numbers
from benchkit.report import Block, Column, Table
from benchkit.results import write_text_atomically
from compile_bench.capture.text import distinct, plural, recompile_lines, short_place, some
from compile_bench.cli import options
from compile_bench.cli.options import INTERRUPTED, case_of, ended_as_by_ctrl_c, print_blocks, tell
from compile_bench.fixes.types import Fix
from compile_bench.measure.harness import DEFAULT_LIMIT, Harness
from compile_bench.measure.records import Triage
from compile_bench.report.breaks import by_line, combined_section, findings_table, not_measured_lines
from compile_bench.targets.case import missing_file
from compile_bench.triage.findings import (
    NOTHING_KNOWN,
    Finding,
    TriageReport,
    break_before,
    guarded_attribute,
    page,
    recompile_advice,
    with_entry,
)

if TYPE_CHECKING:
    from compile_bench.capture.trace import Break, Recompile
    from compile_bench.measure.records import Survey

Kinds = Annotated[
    bool | None, typer.Option("--train/--infer", help="Only a training step, or only a forward pass; by default both.")
]
MeasureCost = Annotated[
    bool, typer.Option("--cost/--no-cost", help="Compile with Inductor and measure what every break costs.")
]
TryFixes = Annotated[bool, typer.Option("--fix/--no-fix", help="Try changes of the source and verify them.")]
Patches = Annotated[
    Path, typer.Option(help="Folder for the patches of verified fixes. Patches of an earlier triage are deleted.")
]

_SCOPES = {
    "blocks": "each repeated block by itself; what is outside was not traced",
    "nested": "the model, with its repeated blocks as nested regions",
}

# The names that write_patches gives to its files.
_OWN_PATCH = re.compile(r"\d\d+-[\w-]+\.patch|all\.patch")


def triage(
    target: options.TargetName,
    train: Kinds = None,
    cost: MeasureCost = True,
    fix: TryFixes = True,
    patches: Patches = Path("compile-bench-patches"),
    dynamic: options.Dynamic = None,
    scope: options.ScopeName = "whole",
    device: options.DeviceName = "auto",
    limit: options.Limit = DEFAULT_LIMIT,
) -> int:
    """Find every graph break and whatever else runs eagerly: line, reason, cost, and a verified patch."""
    case = case_of(target, True, "default", dynamic, device, scope)
    if reason := missing_file(target):
        raise UserError(reason)
    from compile_bench.triage.run import run_triage

    kinds = (True, False) if train is None else (train,)
    with Harness.open(case.device, limit=limit, trust_cpu=True) as harness, ended_as_by_ctrl_c():
        triaged = run_triage(harness, case, kinds=kinds, cost=cost, fix=fix, tell=tell)
    print()
    print_blocks(describe_report(triaged, write_patches(triaged, patches)))
    return INTERRUPTED if triaged.interrupted else 0


def write_patches(report: TriageReport, folder: Path) -> dict[str, Path]:
    """Write a file for every verified fix and one for all, and delete earlier ones. Returns the files by patch."""
    fixes = [finding.fix for finding in report.findings if finding.fix is not None and finding.fix.accepted]
    if report.combined is not None and len(fixes) > 1:
        fixes.append(replace(report.combined, cases="all"))
    for earlier in folder.glob("*.patch"):
        if _OWN_PATCH.fullmatch(earlier.name):
            earlier.unlink()
    written: dict[str, Path] = {}
    for number, fix in enumerate(fixes, 1):
        if fix.patch in written:
            continue
        path = folder / ("all.patch" if fix.cases == "all" else f"{number:02d}-{fix.cases}.patch")
        write_text_atomically(path, fix.patch)
        written[fix.patch] = path
    return written


def describe_report(report: TriageReport, patches: dict[str, Path]) -> list[Block]:
    """The report's tables of lines, the costliest first, then what to do about every one."""
    summary = [_headline(report), *_regions(report), *report.raised]
    lines = by_line(report.findings)
    if not lines and not report.recompiles:
        summary += map(_compiled, [survey for survey in report.surveys if not survey.failures])
    told: dict[str, list[str]] = {}
    consequences = _consequences(report)
    own = [line for line in lines if not all(finding.follows_from for finding in line)]
    details = ["\n".join([*_details(line, patches, told), *consequences.get(line[0].place, ())]) for line in own]
    if remaining := [again for again in report.recompiles if not _break_before(again, report)]:
        details.append("\n".join(_recompilations(remaining, told)))
    combined = "" if report.combined is None else report.combined.patch
    last = [f"patch: {patches[combined]}"] if combined in patches else []
    last += _how_to_apply(report.root, list(patches.values()))
    last += [f"not done: {what}" for what in report.absent]
    return [
        "\n".join(summary),
        findings_table(report.findings, Column("line", lambda line: short_place(line[0].place)), Column("what", _what)),
        *not_measured_lines(report.findings),
        *details,
        "" if report.combined is None else combined_section(report.combined),
        "\n".join(last),
    ]


def _how_to_apply(root: Path | None, patches: Sequence[Path]) -> list[str]:
    """The command that applies the last patch, which has all changes, from the working directory."""
    if root is None or not patches:
        return []
    if root.resolve() == Path.cwd().resolve():
        return [f"apply it: git apply {shlex.quote(str(patches[-1]))}"]
    return [f"apply it: git -C {shlex.quote(str(root))} apply {shlex.quote(str(patches[-1].resolve()))}"]


def _break_before(again: Recompile, report: TriageReport) -> str:
    """The place of the break that a recompilation follows from; empty if none is known."""
    cause = break_before(again, [met for survey in report.surveys for met in survey.breaks])
    return "" if cause is None else cause.place


def _consequences(report: TriageReport) -> dict[str, list[str]]:
    """For each place, what Dynamo meets only because of the break there."""
    here: dict[str, dict[str, list[str]]] = {}
    for finding in report.findings:
        if finding.follows_from:
            here.setdefault(finding.follows_from, {}).setdefault(finding.reason, []).append(short_place(finding.place))
    for again in report.recompiles:
        if cause := _break_before(again, report):
            reason = f"compiled again, {again.what_changed}"
            here.setdefault(cause, {}).setdefault(reason, []).append(short_place(again.place))
    return {
        cause: [
            "  follows from it, since Dynamo compiles what is called here by itself:",
            *(f"    {some(list(dict.fromkeys(places)))}: {reason}" for reason, places in reasons.items()),
        ]
        for cause, reasons in here.items()
    }


def _recompilations(recompiles: Sequence[Recompile], told: Mapping[str, Sequence[str]]) -> list[str]:
    """What compiled functions again, and what to do about it where the code's use shows that it is safe.

    ``told`` is the advice that was given before, with the lines that it was given for.
    """
    lines = ["compiled again, because:", *(f"  {line}" for line in recompile_lines(recompiles))]
    advice: dict[str, dict[str, None]] = {}
    for again in recompiles:
        at = short_place(again.called_from or again.place)
        attribute = guarded_attribute(again)
        text = (recompile_advice(again) if again.advice is None else again.advice) or NOTHING_KNOWN
        if at not in told.get(text, ()):
            advice.setdefault(text, {})[f"{attribute} at {at}" if attribute else at] = None
    for text, places in advice.items():
        lines.append(f"  do, for {some(list(places))}: {f'as for {told[text][0]}' if text in told else text}")
    return lines


def _headline(report: TriageReport) -> str:
    lines = plural(len({finding.place for finding in report.findings}), "line")
    collecting = report.collect_seconds / max(report.trace_seconds, 1e-9)
    return (
        f"{report.target}, {' and '.join(report.kinds)}: {lines} out of the graph, "
        f"{plural(len(report.recompiles), 'cause')} of recompilation; "
        f"the collector took {numbers.percent(collecting)} of the tracing time"
    )


def _regions(report: TriageReport) -> list[str]:
    """Which regions were compiled, if it was not the target as a whole."""
    scope = next((survey.case.scope for survey in report.surveys), "whole")
    if scope != "whole":
        return [f"compiled: {_SCOPES[scope]}"]
    regions = distinct(survey.regions for survey in report.surveys)
    if not regions:
        return []
    raising = "; fullgraph=True raises at the first break" if "fullgraph=True" in regions and report.findings else ""
    return [f"compiled as its own code does: {regions}; what is outside was not traced{raising}"]


def _compiled(survey: Survey) -> str:
    """What was compiled of a target without findings."""
    if not survey.trace.graphs:
        return f"{survey.case.kind}: it computes nothing with tensors, so there is nothing to compile"
    graphs, operations = plural(len(survey.trace.graphs), "graph"), plural(survey.trace.operations, "operation")
    what = "all of it is" if survey.case.scope == "whole" and not survey.regions else "all of these regions are"
    return f"{survey.case.kind}: {what} compiled, as {graphs} with {operations}"


def _details(findings: Sequence[Finding], patches: dict[str, Path], told: dict[str, list[str]]) -> list[str]:
    """Reasons, advice and fix of one line's findings. Advice that is new is added to ``told``, with the line."""
    first, at = findings[0], short_place(findings[0].place)
    reasons = [(finding.reason, _in_library(finding)) for finding in findings]
    if len(reasons) == 1:
        lines = [f"{at}: {first.reason}", f"    {first.source}"]
        lines += [f"    … to line {first.end_line}"] if first.end_line != first.line else []
        lines += [f"  {called}" for _, called in reasons if called]
    else:
        lines = [f"{at}: {_counted(finding.kind for finding in findings)}", f"    {first.source}"]
        lines += [f"  {reason}" + (f", {called}" if called else "") for reason, called in reasons]
    lines += [f"  {limit}" for limit in dict.fromkeys(finding.past_limit for finding in findings) if limit]
    advised = [finding for finding in findings if finding.advice and not finding.follows_from]
    advice = dict.fromkeys(with_entry(finding.advice, finding.case) for finding in advised)
    for text in advice:
        lines.append(f"  do: {f'as for {told[text][0]}' if text in told else text}")
        told.setdefault(text, []).append(at)
    if not advice and not any(finding.fix is not None and finding.fix.accepted for finding in findings):
        lines += _nothing_known(findings)
    return [*lines, *_fix(first.fix, patches)] if first.fix is not None else lines


def _nothing_known(findings: Sequence[Finding]) -> list[str]:
    """That no safe change is known, with what PyTorch says and its own pages."""
    hints = (finding.hint for finding in findings if finding.fix is None)  # a refused change may be just that
    said = "; ".join(dict.fromkeys(hint.rstrip(".") for hint in hints if hint))
    pages = distinct(page(finding.registry) for finding in findings)
    lines = [f"  do: {NOTHING_KNOWN}{f'; PyTorch describes this break: {pages}' if pages else ''}"]
    return [*lines, f"  PyTorch proposes, not checked here: {said}."] if said else lines


def _what(findings: Sequence[Finding]) -> str:
    """What happened at a line, and which line it follows from."""
    kinds = _counted(finding.kind for finding in findings)
    if not all(finding.follows_from for finding in findings):
        return kinds
    return f"{kinds}, follows from {distinct(short_place(finding.follows_from) for finding in findings)}"


def _in_library(finding: Finding) -> str:
    """``in accelerate/optimizer.py:186``; empty for a break of the user's own line."""
    called = [short_place(line) for line in finding.library.split(", ") if line]
    return f"in {some(called)}" if called else ""


def _counted(kinds: Iterable[str]) -> str:
    """``2 × graph break, skipped frame``."""
    return ", ".join(kind if count == 1 else f"{count} × {kind}" for kind, count in Counter(kinds).items())


def _fix(fix: Fix, patches: dict[str, Path]) -> list[str]:
    if not fix.accepted:
        return [f"  tried and refused: {fix.title}: {fix.verdict}"]
    assert fix.before is not None
    assert fix.after is not None
    lines = [
        f"  verified fix: {fix.title}; {plural(fix.before.breaks, 'break')} before, {fix.after.breaks} after, "
        f"{plural(fix.before.graphs, 'graph')} before, {fix.after.graphs} after; {fix.verdict}",
        f"  patch: {patches[fix.patch]}",
    ]
    lines += [f"  the combined fix leaves it out: {fix.conflict}"] if fix.conflict else []
    return [*lines, f"  note: {fix.effect}"] if fix.effect else lines


def describe_triage(counted: Triage) -> list[Block]:
    """Counted breaks and recompilations."""
    trace = counted.trace
    return [
        f"{counted.case.target}, {counted.case.kind}: {len(trace.graphs)} graphs, {trace.operations} operations, "
        f"{trace.guards} guards, {len(trace.breaks)} breaks, {len(trace.recompiles)} recompilations "
        f"in {counted.calls} calls",
        Table(
            trace.breaks,
            [
                Column("break", lambda entry: short_place(entry.place)),
                Column("category", "category"),
                Column("reason", lambda entry: entry.reason + (" (skipped frame)" if entry.whole_frame else "")),
                Column("code", _code, left=True),
            ],
        ),
        "\n".join(_recompilations(trace.recompiles, {})) if trace.recompiles else "",
    ]


def _code(entry: Break) -> str:
    return f"{Path(entry.library).name} {entry.stack[-1].source}" if entry.library else entry.source
