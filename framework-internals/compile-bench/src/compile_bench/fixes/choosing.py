"""Which of several changes hold together, where not all of them do. Nothing here imports torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compile_bench.fixes.types import Trial

Place = tuple[str, int]


@dataclass(frozen=True)
class Choice:
    """Changes that were accepted as one, and why the others are not among them.

    Attributes:
        kept: the changes that hold together.
        trial: what came of these; None without any.
        refused: verdicts on changes that do not even hold by themselves.
        apart: verdicts on changes that do, but not beside those that are kept.
    """

    kept: frozenset[Place]
    trial: Trial | None
    refused: dict[Place, str]
    apart: dict[Place, str]


def choose(places: Sequence[Place], attempt: Callable[[frozenset[Place]], Trial]) -> Choice:
    """Find changes that hold together, in at most 2n + 1 trials of n changes.

    All are tried as one. If that is refused each is tried by itself, and then as one all that may hold: those that do,
    and those of which a function that is given up hides whether they do. If that is refused too, some are in each
    other's way: they are added one by one, the former first, and stay where they hold beside those before them.

    Args:
        places: of the changes, dearest first.
        attempt: tries some of them as one; it is asked once about a set.
    """
    tried = functools.cache(attempt)
    everything = frozenset(places)
    if not places or not tried(everything).verdict:
        return Choice(everything, tried(everything) if places else None, {}, {})
    alone = {place: tried(frozenset((place,))) for place in places}
    sound = [place for place in places if not alone[place].verdict]
    unseen = [place for place in places if alone[place].unseen]
    possible = frozenset(sound + unseen)
    kept = possible if possible and not tried(possible).verdict else frozenset[Place]()
    verdicts = {place: trial.verdict for place, trial in alone.items()}
    for place in sound + unseen:
        if place not in kept:
            verdicts[place] = tried(kept | {place}).verdict
            kept |= set() if verdicts[place] else {place}
    left = {place: verdict for place, verdict in verdicts.items() if place not in kept}
    apart = {place: verdict for place, verdict in left.items() if place in sound}
    refused = {place: verdict for place, verdict in left.items() if place not in sound}
    return Choice(kept, tried(kept) if kept else None, refused, apart)
