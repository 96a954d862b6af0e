"""One change of the source, tried in a process of its own: do the breaks fall, and does the model compute the same?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compile_bench.collector import folders
from compile_bench.findings import Mark, Trial, mark
from compile_bench.mending.overlay import Overlay, forget_user_modules, overlaid
from compile_bench.mending.proof import holds
from compile_bench.results import Case
from compile_bench.triage_worker import survey

def trial(
    case: Case, *, overlay: Overlay, kinds: Sequence[bool], seeds: Sequence[int], allowed: frozenset[Mark], path: Path
) -> Trial:
    """Try changed sources.

    Args:
        case: whose model is compared.
        overlay: the changed sources.
        kinds: training, inference or both: where breaks are looked for.
        seeds: for that.
        allowed: the breaks that may be left.
        path: what :func:`compile_bench.mending.proof.reference` wrote.
    """
    with overlaid(overlay):
        surveys = [survey(replace(case, train=train), seeds=seeds, behind=False) for train in kinds]
        failures = [failure for each in surveys for failure in each.failures]
        left = {mark(each): each for found in surveys for each in found.breaks}
        graphs = len(surveys[0].trace.graphs)
        new = [each for key, each in left.items() if key not in allowed]
        if new:
            return Trial(f"it still breaks: {Path(new[0].file).name}:{new[0].line}, {new[0].reason}", len(left), graphs)
        if failures:
            return Trial(f"the changed model fails: {failures[0]}", len(left), graphs)
        forget_user_modules(folders())
        return Trial(holds(case, path=path), len(left), graphs)
