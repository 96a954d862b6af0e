"""The report's section on breaks and recompilations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchkit import numbers
from benchkit.report import markdown_table
from benchkit.results import Record, Results
from compile_bench.capture.reasons import cause_of
from compile_bench.measure.serialize import plural
from compile_bench.report.breaks import recompile_advice, without_folders


def triage_context(results: Results) -> dict[str, Any]:
    """The variables of ``triage.md.j2``."""
    return {
        "bills": [_triage_report(record, results) for record in results.select("bill")],
    }


def _triage_report(record: Record, results: Results) -> dict[str, Any]:
    """Tables and sentences of one target's bill."""
    target = str(record.labels["target"])
    findings = results.select("finding", target=target)
    costed = [each for each in findings if "gap" in each.values]
    tracing, collecting = record["tracing"].value, record["collecting"].value
    return {
        "target": target,
        "kinds": " and ".join(record.data["kinds"]),
        "count": plural(len(findings), "finding"),
        "dearest": _costliest(costed),
        "table": markdown_table(_TRIAGE_REPORT, [_summary_row(each) for each in findings], left=4) if findings else "",
        "no_gap": _without_gap(findings),
        "recompiles": plural(len(record.data["recompiles"]), "cause"),
        "recompile_table": _recompile_table(record.data["recompiles"]),
        "shared": any(each.data["share"] > 1 for each in findings),
        "mended": [_fixed(each) for each in findings if each.data["mend"] and each.data["mend"]["accepted"]],
        "refused": [_refused(each) for each in findings if each.data["mend"] and not each.data["mend"]["accepted"]],
        "together": next((_together(each) for each in results.select("mended", target=target)), ""),
        "overhead": f"{collecting / tracing * 100:.1f} %" if tracing else "",
        "absent": list(record.data["absent"]),
    }


_TRIAGE_REPORT = ("line", "code", "category", "in", "gap a step", "bytes across", "compiling", "mended")


def _summary_row(each: Record) -> tuple[str, ...]:
    fix = each.data["mend"]
    kinds = each.data["kinds"]
    gap = each.values.get("gap")
    return (
        f"`{without_folders(each.data['place'])}`",
        f"`{each.data['source']}`" if each.data["source"] else "",
        each.data["category"],
        "both" if len(kinds) > 1 else kinds[0],
        "–" if gap is None else numbers.with_unit(gap.value, "s"),
        numbers.with_unit(each["crossing"].value, "B") if "crossing" in each.values else "–",
        numbers.with_unit(each["compiling"].value, "s") if "compiling" in each.values else "–",
        "–" if fix is None else ("yes" if fix["accepted"] else "no"),
    )


def _costliest(costed: Sequence[Record]) -> str:
    if not costed:
        return ""
    first = max(costed, key=lambda each: each["gap"].value)
    return (
        f"`{without_folders(first.data['place'])}` with {numbers.with_unit(first['gap'].value, 's')} of Python a step"
    )


def _without_gap(findings: Sequence[Record]) -> list[str]:
    """One sentence for every reason why breaks have no gap."""
    places: dict[str, list[str]] = {}
    for each in findings:
        if each.data.get("no gap"):
            places.setdefault(each.data["no gap"], []).append(f"`{without_folders(each.data['place'])}`")
    return [f"No gap is given for {', '.join(dict.fromkeys(lines))}: {why}." for why, lines in places.items()]


def _recompile_table(recompiles: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            _again(each),
            cause_of(each["guard"]),
            f"`{each['guard']}`",
            recompile_advice(each["guard"], each.get("source", "")),
        )
        for each in recompiles
    ]
    header = ["compiled again at", "cause", "guard that failed", "what to do"]
    return markdown_table(header, rows, left=4) if rows else ""


def _again(recompile: dict[str, Any]) -> str:
    place = f"`{Path(recompile['file']).name}:{recompile['line']}`"
    caller = recompile.get("called from")
    return f"{place}, called from `{without_folders(caller)}`" if caller else place


def _fixed(each: Record) -> dict[str, Any]:
    before, after = (int(each[f"breaks {when}"].value) for when in ("before", "after"))
    return {
        "place": without_folders(each.data["place"]),
        "title": each.data["mend"]["title"],
        "effect": each.data["mend"]["effect"],
        "apart": each.data["mend"].get("apart", ""),
        "breaks": f"{plural(before, 'break')} before, {after} after",
        "patch": each.data["patch"].rstrip("\n"),
    }


def _refused(each: Record) -> dict[str, str]:
    return {
        "place": without_folders(each.data["place"]),
        "title": each.data["mend"]["title"],
        "why": each.data["mend"]["verdict"],
    }


def _together(each: Record) -> str:
    rows = []
    for when in ("before", "after"):
        step, first = each.values.get(f"step {when}"), each.values.get(f"first steps {when}")
        rows.append(
            (
                when,
                numbers.count(each[f"breaks {when}"].value),
                numbers.count(each[f"graphs {when}"].value),
                "–" if step is None else numbers.quantity(step),
                "–" if first is None else numbers.with_unit(first.value, "s"),
            )
        )
    title = each.data.get("title", "all mends together")  # records of before there was another
    return markdown_table([title, "breaks", "graphs", "step (p20–p80)", "first steps"], rows)
