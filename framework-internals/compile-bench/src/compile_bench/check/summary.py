"""The results of a check as Markdown, for the summary of a job of GitHub Actions."""

from __future__ import annotations

from collections.abc import Sequence

from benchkit.report import markdown_table
from compile_bench.check.types import Outcome


def summary_of(outcomes: Sequence[Outcome]) -> str:
    """A table with one row for each target, and below it what is over budget or went wrong."""
    rows = [(f"`{each.target}`", each.verdict, "; ".join(each.found)) for each in outcomes]
    lines = ["### compile-bench check", "", markdown_table(["target", "result", "found"], rows, left=3)]
    for each in outcomes:
        details = [each.error] if each.error else each.exceeded
        if details:
            lines += ["", f"`{each.target}`: {each.verdict}", "", *(f"    {line}" for line in details)]
    return "\n".join(lines) + "\n"
