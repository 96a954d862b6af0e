"""The sections of the report: sentences, tables and figures, computed from the records only.

:mod:`~jax_baseline.report.training_sections` has parity and throughput, :mod:`~jax_baseline.report.hlo_sections` the
compiled program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchkit import Results
from benchkit.report import Figure
from jax_baseline.report import hlo_sections, training_sections


def finding(results: Results) -> str:
    """Return the finding: the report in one sentence."""
    clauses = [*training_sections.clauses(results), *hlo_sections.clauses(results)]
    sentence = "; ".join(clauses) or "this run was interrupted before it measured anything"
    return f"{sentence[0].upper()}{sentence[1:]}."


def context(results: Results) -> dict[str, Any]:
    """Return the variables of the template."""
    return {**training_sections.context(results), **hlo_sections.context(results)}


def figures(results: Results) -> Sequence[Figure]:
    """Return the figures that the records allow."""
    return [*training_sections.figures(results), *hlo_sections.figures(results)]
