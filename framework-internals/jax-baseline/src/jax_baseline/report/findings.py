"""What the results say: the sentences, tables and figures of the report, computed from the records alone.

Parity and throughput are in ``training_findings``; the compiled program is in ``hlo_findings``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchkit import Results
from benchkit.report import Figure
from jax_baseline.report import hlo_findings, training_findings


def finding(results: Results) -> str:
    """The report in one sentence."""
    clauses = [*training_findings.clauses(results), *hlo_findings.clauses(results)]
    sentence = "; ".join(clauses) or "this run was interrupted before it had anything to say"
    return f"{sentence[0].upper()}{sentence[1:]}."


def context(results: Results) -> dict[str, Any]:
    """The template's variables."""
    return {**training_findings.context(results), **hlo_findings.context(results)}


def figures(results: Results) -> Sequence[Figure]:
    """The figures that the records allow."""
    return [*training_findings.figures(results), *hlo_findings.figures(results)]
