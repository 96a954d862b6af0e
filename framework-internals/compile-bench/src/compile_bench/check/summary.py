"""The results of a check as Markdown, for the summary of a job of GitHub Actions."""

from __future__ import annotations

from collections.abc import Sequence

from benchkit.report import markdown_table
from compile_bench.check.types import Outcome


def summary_of(outcomes: Sequence[Outcome]) -> str:
    """A table with one row for each target, and below it what is over budget or went wrong."""
    rows = [(f"`{outcome.target}`", outcome.verdict, "; ".join(outcome.found)) for outcome in outcomes]
    lines = ["### compile-bench check", "", markdown_table(["target", "result", "found"], rows, left=3)]
    for outcome in outcomes:
        details = [outcome.error] if outcome.error else outcome.exceeded
        if details:
            lines += ["", f"`{outcome.target}`: {outcome.verdict}", "", *(f"    {line}" for line in details)]
    return "\n".join(lines) + "\n"
