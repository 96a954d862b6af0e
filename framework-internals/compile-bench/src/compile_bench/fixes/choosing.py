"""Choose which of several changes make up the combined fix, where not all of them work at once.

Nothing here imports torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compile_bench.fixes.types import Trial
from compile_bench.measure.survey.types import Place


@dataclass(frozen=True)
class Choice:
    """The changes of the combined fix, and why the others are left out."""

    kept: frozenset[Place]  # places of the changes that were accepted at once
    trial: Trial | None  # result of these changes; None if there are none
    refused: dict[Place, str]  # verdicts on changes that fail even alone
    conflicts: dict[Place, str]  # verdicts on changes that are accepted alone, but not beside those that are kept


def choose(places: Sequence[Place], attempt: Callable[[frozenset[Place]], Trial]) -> Choice:
    """Find changes that are accepted at once, in at most 2n + 1 trials of n changes.

    First all changes are tried at once. If that is refused, each is tried alone, and then all those at once that were
    accepted or whose result a skipped frame hides. If that is refused too, some changes conflict. The changes are then
    added one by one, and a change stays if it is accepted beside those before it. ``places`` has the costliest first;
    ``attempt`` is called once for a set.
    """
    tried = functools.cache(attempt)
    everything = frozenset(places)
    if not places or not tried(everything).verdict:
        return Choice(everything, tried(everything) if places else None, {}, {})
    alone = {place: tried(frozenset((place,))) for place in places}
    accepted = [place for place in places if not alone[place].verdict]
    unseen = [place for place in places if alone[place].unseen]
    possible = frozenset(accepted + unseen)
    kept = possible if possible and not tried(possible).verdict else frozenset[Place]()
    verdicts = {place: trial.verdict for place, trial in alone.items()}
    for place in accepted + unseen:
        if place not in kept:
            verdicts[place] = tried(kept | {place}).verdict
            kept |= set() if verdicts[place] else {place}
    left_out = {place: verdict for place, verdict in verdicts.items() if place not in kept}
    conflicts = {place: verdict for place, verdict in left_out.items() if place in accepted}
    refused = {place: verdict for place, verdict in left_out.items() if place not in accepted}
    return Choice(kept, tried(kept) if kept else None, refused, conflicts)
