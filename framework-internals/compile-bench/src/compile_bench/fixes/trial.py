"""Changes of the source, tried: do the breaks fall, and does the changed model compute the same?

Candidates are tried one after the other in one process, without a code generator. What passes is put together and
proved in a process of its own, with Inductor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchkit import UserError
from compile_bench.capture.collector import settings_restored, user_code_filter
from compile_bench.capture.trace import Break
from compile_bench.fixes.rewrites import CHANGED_SETTINGS
from compile_bench.fixes.source import line_before
from compile_bench.fixes.types import Proposal, Trial
from compile_bench.fixes.verify import reference, refusal
from compile_bench.measure.survey import survey
from compile_bench.measure.survey_types import Mark, mark
from compile_bench.targets.case import Case
from compile_bench.targets.overlay import Overlay, forget_user_modules, overlaid


def trials(
    case: Case, *, kinds: Sequence[bool], seeds: Sequence[int], proposals: Sequence[Proposal], path: Path
) -> list[list[Trial]]:
    """Try the candidates of every proposal until one passes.

    Args:
        case: whose outputs and gradients are compared, eagerly.
        kinds: training, inference or both: where breaks are looked for.
        seeds: for that.
        proposals: one for every break.
        path: file for what the unchanged model gives, for :func:`prove` as well.

    Returns:
        For every proposal the trials in turn; the last one may have passed.
    """
    reference(case, path=path)
    results = []
    for proposal in proposals:
        tried: list[Trial] = []
        for overlay in proposal.overlays:
            tried.append(_trial(case, overlay, kinds, seeds, proposal.allowed, path, compiled=False))
            if not tried[-1].verdict:
                break
        results.append(tried)
    return results


def prove(
    case: Case, *, overlay: Overlay, kinds: Sequence[bool], seeds: Sequence[int], allowed: frozenset[Mark], path: Path
) -> Trial:
    """Try changed sources with Inductor; arguments as for :func:`trials`.

    Args:
        case: as above.
        overlay: the changed sources.
        kinds: as above.
        seeds: as above.
        allowed: the breaks that may be left.
        path: what :func:`trials` wrote.
    """
    return _trial(case, overlay, kinds, seeds, allowed, path, compiled=True)


def _trial(
    case: Case,
    overlay: Overlay,
    kinds: Sequence[bool],
    seeds: Sequence[int],
    allowed: frozenset[Mark],
    path: Path,
    *,
    compiled: bool,
) -> Trial:
    user_code = user_code_filter()
    with settings_restored(CHANGED_SETTINGS), overlaid(overlay):
        surveys = []
        for train in kinds:
            forget_user_modules(user_code)
            try:
                surveys.append(survey(replace(case, train=train), seeds=seeds, behind=False))
            except UserError as error:
                return Trial(f"the changed model fails: {error}")
        failures = [failure for each in surveys for failure in each.failures]
        left = {_mark_before(each, overlay): each for found in surveys for each in found.breaks}
        graphs = len(surveys[0].trace.graphs)
        seen = Trial("", frozenset(left), any(each.whole_frame for each in left.values()), graphs)
        new = next(((key, each) for key, each in left.items() if key not in allowed), None)
        if new is not None:
            (file, line), found = new
            place = f"{Path(file).name}:{line}" if line else f"{Path(file).name}, in `{found.source}`"
            return replace(seen, verdict=f"it still breaks: {place}, {found.reason}")
        if failures:
            return replace(seen, verdict=f"the changed model fails: {failures[0]}")
        forget_user_modules(user_code)
        torch.compiler.reset()
        refused = refusal(case, path=path, with_inductor=compiled)
        return seen if refused is None else replace(seen, verdict=refused.why, off=refused.off)


def _mark_before(found: Break, overlay: Overlay) -> Mark:
    file, line = mark(found)
    return (file, line_before(Path(file).read_bytes(), overlay[file], line)) if file in overlay else (file, line)
