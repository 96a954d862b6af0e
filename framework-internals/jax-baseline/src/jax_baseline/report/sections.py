"""The sections of the report: sentences, tables and figures, computed from the records only.

:mod:`~jax_baseline.report.training_sections` has parity and scaling, :mod:`~jax_baseline.report.engine_sections` the
throughput, :mod:`~jax_baseline.report.hlo_sections` the compiled program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchkit import Results
from benchkit.report import Figure
from jax_baseline.report import engine_sections, hlo_sections, training_sections


def finding(results: Results) -> str:
    """Return the finding: whether JAX computes the same, how fast it is, and its worst result."""
    sentences = [training_sections.verdict(results), engine_sections.verdict(results)]
    found = [f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences if sentence]
    return " ".join(found) or "This run was interrupted before it measured anything."


def headline(results: Results) -> str:
    """Return the finding in one sentence, for the index of reports."""
    clauses = [clause for clause in (training_sections.headline(results), engine_sections.headline(results)) if clause]
    return f"{'; '.join(clauses)}." if clauses else finding(results)


def context(results: Results) -> dict[str, Any]:
    """Return the variables of the template."""
    parts = (training_sections, engine_sections, hlo_sections)
    return {name: value for part in parts for name, value in part.context(results).items()}


def figures(results: Results) -> Sequence[Figure]:
    """Return the figures that the records allow."""
    return [
        *engine_sections.figures(results),
        *training_sections.figures(results),
        *hlo_sections.figures(results),
    ]
