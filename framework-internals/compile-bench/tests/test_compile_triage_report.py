"""The report's section on triage, from made-up findings."""

from dataclasses import replace
from pathlib import Path

from benchkit import Quantity
from benchkit.environment import capture
from benchkit.report import render
from benchkit.results import Results
from compile_bench.capture.trace import CompileTrace, Recompile
from compile_bench.catalogue import CAUSES
from compile_bench.fixes.types import Figures, Fix
from compile_bench.measure.records import BreakCost, Survey
from compile_bench.report.breaks import by_line, cost_cells, not_measured
from compile_bench.report.sections import report
from compile_bench.targets.case import Case
from compile_bench.triage.findings import Finding, TriageReport, recompile_advice
from compile_bench.triage.run import Progress

ROOT = Path(__file__).parents[3]
PATCH = "--- a/a/model.py\n+++ b/a/model.py\n@@ -12 +12 @@\n-if x:\n+x = torch.where(x)\n"


def finding(line, time_lost, fix=None, breaks_between=1):
    quantity = Quantity(time_lost, "s", time_lost, time_lost, 40, "p20-p80") if time_lost else None
    cost = BreakCost(quantity, breaks_between, 4096, 1.5, "" if time_lost else "forward runs eagerly")
    return Finding(
        kind="graph break",
        place=f"{ROOT / 'a/model.py'}:{line}",
        source="if x.sum() > 0:",
        category="data-dependent control flow",
        reason="Data-dependent branching",
        advice="torch.where",
        case="branch-on-value",
        kinds=("training", "inference"),
        times=3,
        cost=cost,
        fix=fix,
    )


def triage_report():
    survey = Survey(Case("planted"), (), (), (), CompileTrace(), (), 3, (), 0.01, 2.0)
    fixed = Fix(
        "choose",
        cases="branch-on-value",
        effect="both sides run",
        patch=PATCH,
        accepted=True,
        before=Figures(4, 2),
        after=Figures(3, 1),
    )
    refused = Fix("keep", cases="item", verdict="output is off by 1")
    alone = replace(
        fixed, title="leave out", effect="", conflict=f"two edits of {ROOT / 'a/model.py'} overlap at byte 9"
    )
    step = Quantity(2e-3, "s", 1.9e-3, 2.1e-3, 40, "p20-p80")
    faster = Quantity(1e-3, "s", 0.9e-3, 1.1e-3, 40, "p20-p80")
    sides = Figures(4, 2, step, 9.0), Figures(3, 1, faster, 5.0)
    combined = Fix(
        "verified fixes without conflicts",
        cases="branch-on-value",
        patch=PATCH,
        accepted=True,
        before=sides[0],
        after=sides[1],
    )
    findings = (finding(12, 3e-4, fixed), finding(20, 1e-4, refused, breaks_between=2), finding(30, 0, alone))
    again = Recompile(
        str(ROOT / "a/model.py"), 9, "self.calls == 1", "self.calls += 1", compile_id="0/1", function="forward"
    )
    return replace(
        TriageReport.of_surveys("planted", (survey,)),
        findings=findings,
        recompiles=(replace(again, advice=recompile_advice(again)),),
        combined=combined,
        absent=("break costs: a process was ended",),
    )


def test_the_triage_report_is_shown_costliest_first():
    records = triage_report().records(ROOT)
    text = render(Results("compile-bench", capture("cpu", root=ROOT), {}, tuple(records), (), complete=True), report)
    section = text[text.index("Triage of `planted`") :]
    assert (
        "(training): 3 findings. The costliest is `model.py:12`, which loses 300 µs of Python time per step." in section
    )
    assert "| `model.py:12` | 300 µs | 1.50 s for 3 lines | yes |" in section
    assert section.index("model.py:12") < section.index("model.py:20")
    assert "| `model.py:30` | – | shared with model.py:12 | yes |" in section
    assert "In every row: code: `if x.sum() > 0:`; category: data-dependent control flow; in: both;" in section
    assert "The time lost at `model.py:30` could not be measured: forward runs eagerly." in section
    assert "The model is recompiled for 1 cause:" in section
    # The report has no source of the model: advice comes with its condition.
    counter = CAUSES["counter"].advices[0]
    advice = f"{counter.named()} (Where {counter.when.text}.) (catalogue: counter)"
    assert f"| `model.py:9` | Python value | self.calls is no longer 1 | {advice} |" in section
    assert "Breaks between the same two graphs have one time" in section
    assert f"```diff\n{PATCH}```" in section
    assert (
        "choose: 2 breaks before, 1 after; outputs and gradients are within their float64 bounds. Note: both" in section
    )
    assert "`model.py:20` — keep was tried and refused: output is off by 1." in section
    assert "leave out: 2 breaks before" in section
    assert "The combined fix leaves it out: two edits of a/model.py overlap at byte 9." in section
    assert "| verified fixes without conflicts | breaks |" in section
    assert "| before | 2 | 4 | 2.00 ms (1.90–2.10) | 9.00 s |" in section
    assert "The collector took 0.5 % of the tracing time." in section
    assert "Not done: break costs: a process was ended." in section


def test_a_triage_report_without_findings_has_no_table():
    (record,) = TriageReport.of_surveys("mlp", triage_report().surveys).records(ROOT)
    text = render(Results("compile-bench", capture("cpu", root=ROOT), {}, (record,), (), complete=True), report)
    assert "Triage of `mlp`, a model with planted breaks (training): 0 findings." in text
    assert "time lost per step" not in text


def test_a_triage_report_is_read_as_it_was_written():
    records = triage_report().records(ROOT)
    summary, *findings, combined = records
    assert TriageReport.of(summary).recompiles[0].file == "a/model.py"
    assert [Finding.of(each).number for each in findings] == [1, 2, 3]
    assert Finding.of(findings[0]).cost.time_lost.value == 3e-4
    assert Fix.of(combined).before.compile_seconds == 9.0
    kinds = (TriageReport, *[Finding] * 3, Fix)
    assert [kind.of(each).record() for kind, each in zip(kinds, records, strict=True)] == records


def test_a_cost_that_several_lines_share_stands_once(monkeypatch):
    """Between two graphs lie two breaks of one line and one of another; a third line has a cost of its own."""
    first = finding(12, 3e-4, breaks_between=3)
    other = replace(first, kind="skipped frame", reason="other", kinds=("training",))
    alone = replace(finding(20, 1e-4), cost=replace(finding(20, 1e-4).cost, compile_seconds=2.5))
    lines = by_line([first, other, replace(first, place=f"{ROOT / 'a/model.py'}:16"), alone])
    assert cost_cells(lines) == [
        ("both", "300 µs for 2 lines", "4.00 KiB", "1.50 s for 2 lines", "–"),
        ("both", "shared with model.py:12", "″", "shared with model.py:12", "–"),
        ("both", "100 µs", "4.00 KiB", "2.50 s", "–"),
    ]
    told = []
    monkeypatch.chdir(ROOT)
    Progress(told.append, ()).costs([first, other, replace(first, place=f"{ROOT / 'a/model.py'}:16"), alone])
    names = [each.strip().replace(f"{ROOT}/", "") for each in told]
    assert names == [
        "a/model.py:12, a/model.py:16: together lose 300 µs per step",
        "a/model.py:20: loses 100 µs per step",
    ]


def test_why_a_time_was_not_measured_stands_once():
    same = [finding(line, 0) for line in (3, 5, 5)]
    assert not_measured(same) == {"forward runs eagerly": ["model.py:3", "model.py:5"]}
