"""A triage bill as records of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchkit.results import Json, Quantity, Record
from compile_bench.fixes.types import Figures, Mend
from compile_bench.measure.serialize import neutral, shorten
from compile_bench.triage.types import Bill, Finding


def bill_records(bill: Bill, root: Path) -> list[Record]:
    """One record for the whole, one for every finding (dearest first), one for all mends together.

    Args:
        bill: the bill.
        root: files below it are named relative to it, others by their last part.
    """
    labels = {"target": bill.target}
    traced = sum(survey.trace_seconds for survey in bill.surveys)
    values = {
        "findings": Quantity(len(bill.findings), ""),
        "recompiles": Quantity(len(bill.recompiles), ""),
        "tracing": Quantity(traced, "s"),
        "collecting": Quantity(sum(survey.collect_seconds for survey in bill.surveys), "s"),
    }
    data: dict[str, Json] = {
        "kinds": [survey.case.kind for survey in bill.surveys],
        "recompiles": [
            {
                "file": shorten(each.file, root),
                "line": each.line,
                "guard": neutral(each.guard, root),
                "source": neutral(each.source, root),
                "called from": neutral(each.called_from, root),
            }
            for each in bill.recompiles
        ],
        "absent": [*bill.raised, *bill.absent],
    }
    records = [Record("bill", labels, values, data)]
    records += [_finding(each, index, bill.target, root) for index, each in enumerate(bill.findings, 1)]
    if bill.together is not None:
        records.append(_together(bill.together, bill.target))
    return records


def _finding(finding: Finding, index: int, target: str, root: Path) -> Record:
    values: dict[str, Quantity] = {"met": Quantity(finding.times, "")}
    if finding.price is not None:
        values["crossing"] = Quantity(finding.price.crossing, "B")
        values["compiling"] = Quantity(finding.price.compile_seconds, "s")
        if finding.price.gap is not None:
            values["gap"] = finding.price.gap
    mend = finding.mend
    if mend is not None and mend.accepted:
        assert mend.before is not None
        assert mend.after is not None
        values |= _counts("before", mend.before) | _counts("after", mend.after)
    data: dict[str, Any] = {
        "kind": finding.kind,
        "place": f"{shorten(finding.file, root)}:{finding.line}",
        "source": finding.source,
        "category": finding.category,
        "reason": neutral(finding.reason, root),
        "case": finding.case,
        "advice": finding.advice,
        "kinds": list(finding.kinds),
        "share": 1 if finding.price is None else finding.price.share,
        "no gap": "" if finding.price is None else finding.price.no_gap,
        "mend": None
        if mend is None
        else {
            "title": mend.title,
            "effect": mend.effect,
            "accepted": mend.accepted,
            "verdict": neutral(mend.verdict, root),
            "apart": neutral(mend.apart, root),
        },
        "patch": mend.patch if mend is not None else "",
    }
    return Record("finding", {"target": target, "number": index}, values, data)


def _together(mend: Mend, target: str) -> Record:
    assert mend.before is not None
    assert mend.after is not None
    values = _counts("before", mend.before) | _counts("after", mend.after)
    return Record(
        "mended", {"target": target}, values, {"title": mend.title, "effect": mend.effect, "cases": mend.case}
    )


def _counts(when: str, figures: Figures) -> dict[str, Quantity]:
    values = {
        f"breaks {when}": Quantity(figures.breaks, ""),
        f"graphs {when}": Quantity(figures.graphs, ""),
    }
    if figures.step is not None:
        values[f"step {when}"] = figures.step
    if figures.compile_seconds is not None:
        values[f"first steps {when}"] = Quantity(figures.compile_seconds, "s")
    return values
