"""Try a change for every graph break, keep the verified ones, and combine them into one fix."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchkit import UserError
from benchkit.processes import ChildFailure, deferred_module
from compile_bench.capture.text import distinct
from compile_bench.capture.trace import Break
from compile_bench.catalogue.source import Edit, Source, unified_diff
from compile_bench.fixes.rewrites import Candidate, candidates
from compile_bench.fixes.types import Figures, Fix, Proposal, Trial
from compile_bench.measure.harness import Harness
from compile_bench.measure.records import Place, Survey, place_of
from compile_bench.targets.case import Case
from compile_bench.targets.overlay import Overlay

if TYPE_CHECKING:
    from compile_bench.fixes import trial as jobs
else:
    jobs = deferred_module("compile_bench.fixes.trial")

# The verdict on a change whose result cannot be seen. It says nothing against the change.
_UNSEEN = "Dynamo still skips a frame around it, and nothing shows whether the break is gone"


@dataclass(frozen=True)
class FixResults:
    """The results of trying changes."""

    fixes: dict[Place, Fix]  # the change that was tried last for every break
    combined: Fix | None  # the verified fixes as one change; None if there are none
    overlay: Overlay  # the sources with the combined fix
    revealed: tuple[Break, ...] = ()  # breaks that a skipped frame hid and that verified fixes brought to light
    # For every break, the entries of the catalogue whose change was tried and refused.
    refuted: Mapping[Place, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Attempt:
    """One candidate for one break."""

    place: Place  # the break
    index: int  # position among the candidates for this break
    candidate: Candidate  # the change
    overlay: Overlay  # the sources with the change
    trial: Trial  # the result


@dataclass(frozen=True)
class Choice:
    """The changes of the combined fix, and why the others are left out."""

    kept: frozenset[Place]  # places of the changes that were accepted at once
    trial: Trial | None  # result of these changes; None if there are none
    refused: dict[Place, str]  # verdicts on changes that fail even alone
    conflicts: dict[Place, str]  # verdicts on changes that are accepted alone, but not beside those that are kept


class Fixer:
    """Tries changes of a target's sources."""

    def __init__(
        self, harness: Harness, case: Case, surveys: Sequence[Survey], root: Path, *, timed: bool = False
    ) -> None:
        self._harness = harness
        self._case = case
        self._timed = timed
        self._kinds = tuple(survey.case.train for survey in surveys)
        self._places = {survey.case.train: {place_of(met) for met in survey.breaks} for survey in surveys}
        self._breaks = {place_of(met): met for survey in surveys for met in survey.breaks}
        self._reasons = {met.identity: met for survey in surveys for met in survey.breaks}
        self._hidden = frozenset[Place]().union(*(survey.hidden for survey in surveys))
        self._untraced = frozenset[tuple[str, str]]().union(*(survey.untraced for survey in surveys))
        # Further seeds are tried only where they met a break that the first seed did not meet.
        needed = {seeds[0] for survey in surveys for seeds in survey.seeds if seeds}
        self._seeds = tuple(sorted(needed | {0}))
        self._graphs = {survey.case.train: len(survey.trace.graphs) for survey in surveys}
        self._root = root.resolve()
        self._reference = harness.folder / "reference.pt"
        self._calibrated = False
        self._proofs: dict[frozenset[tuple[Place, int]], Trial] = {}

    def fix(self, places: Sequence[Place]) -> FixResults:
        """Try to fix the breaks at these places, then the breaks that the fixes bring to light, and so on.

        The places have the costliest first: if fixes conflict, the first one is kept.
        """
        attempts = self.attempts(places)
        last = self._tried(attempts)
        refused: dict[Place, str] = {}
        revealed: dict[Place, Break] = {}
        while True:
            choice = self._chosen([last[place] for place in last if place not in refused])
            refused |= choice.refused
            more = self._next_candidates(attempts, last, choice.refused)
            new = self._newly_revealed(choice)
            if new:
                revealed |= new
                new_attempts = self.attempts(new)
                attempts |= new_attempts
                more |= self._tried(new_attempts)
            if not more:
                break
            last |= more
            refused = {place: verdict for place, verdict in refused.items() if place not in more}
        fixes = {
            place: replace(self._fix(attempt, refused.get(place, "")), conflict=choice.conflicts.get(place, ""))
            for place, attempt in last.items()
        }
        breaks = tuple(revealed.values())
        refuted = {
            place: frozenset(
                attempt.candidate.rewrite.case
                for attempt in attempts[place][: last[place].index + 1]
                if attempt.index < last[place].index or (fixes[place].verdict != _UNSEEN and not fixes[place].accepted)
            )
            for place in last
        }
        if choice.trial is None:
            return FixResults(fixes, None, {}, breaks, refuted)
        kept = [attempt for place, attempt in last.items() if place in choice.kept]
        title = "verified fixes without conflicts" if choice.conflicts else "all verified fixes"
        trial = choice.trial if choice.trial.timed or not self._timed else self._prove(kept, timed=True)
        return FixResults(fixes, self._verified(kept, trial, title), _joined(kept), breaks, refuted)

    def _chosen(self, attempts: Sequence[Attempt]) -> Choice:
        """The changes of the combined fix, out of those that are accepted without Inductor."""
        accepted = {attempt.place: attempt for attempt in attempts if not attempt.trial.verdict}

        def proved(places: Collection[Place]) -> Trial:
            return self._proved([attempt for place, attempt in accepted.items() if place in places])

        return choose(tuple(accepted), proved)

    def _next_candidates(
        self, attempts: Mapping[Place, list[Attempt]], last: Mapping[Place, Attempt], refused: Mapping[Place, str]
    ) -> dict[Place, Attempt]:
        """For breaks whose change the proof refused, the next candidate that is accepted without Inductor."""
        places = (place for place, verdict in refused.items() if verdict != _UNSEEN)
        left = {place: rest for place in places if (rest := attempts[place][last[place].index + 1 :])}
        return {place: attempt for place, attempt in self._tried(left).items() if not attempt.trial.verdict}

    def _newly_revealed(self, choice: Choice) -> dict[Place, Break]:
        """The breaks that only the combined fix shows; from now on they count as hidden in the unchanged model."""
        revealed = choice.trial.revealed if choice.trial is not None else ()
        new = {place_of(met): met for met in revealed if place_of(met) not in self._breaks}
        self._breaks |= new
        self._reasons |= {met.identity: met for met in new.values()}
        self._hidden |= new.keys()
        for places in self._places.values():
            places |= new.keys()
        return new

    def attempts(self, places: Iterable[Place]) -> dict[Place, list[Attempt]]:
        """The candidates for every break, without those that do not fit the code."""
        attempts: dict[Place, list[Attempt]] = {}
        for place in places:
            reasons = [met for met in self._reasons.values() if place_of(met) == place]
            for candidate in [candidate for met in reasons for candidate in _candidates(met)]:
                try:
                    overlay = {place[0]: candidate.source.apply(candidate.edits)}
                except (ValueError, SyntaxError):
                    continue
                tried = attempts.setdefault(place, [])
                tried.append(Attempt(place, len(tried), candidate, overlay, Trial("not tried")))
        return attempts

    def _tried(self, attempts: Mapping[Place, list[Attempt]]) -> dict[Place, Attempt]:
        """Try the candidates for every break up to the first that is accepted. Returns the last one tried."""
        if not attempts:
            return {}
        proposals = [
            self._proposal(tuple(attempt.overlay for attempt in candidates), {place})
            for place, candidates in attempts.items()
        ]
        # Every process writes a reference. The proof reads the one of the first process.
        parts = [proposals[start :: self._harness.beside] for start in range(self._harness.beside)]
        jobs: list[Callable[[], list[list[Trial]] | float]] = [
            partial(self._trials, part, index) for index, part in enumerate(parts) if part
        ]
        # The proof needs the toolchain's check, which is made meanwhile.
        answers = self._harness.ask_all([*jobs, self._harness.toolchain_seconds])
        results: list[list[Trial]] = [[] for _ in proposals]
        for start, answer in enumerate(answers[:-1]):
            if isinstance(answer, Exception):
                raise answer
            assert isinstance(answer, list)
            results[start :: self._harness.beside] = answer
        return {
            place: replace(attempts[place][len(trials) - 1], trial=trials[-1])
            for place, trials in zip(attempts, results, strict=True)
        }

    def _trials(self, proposals: Sequence[Proposal], index: int) -> list[list[Trial]]:
        path = self._reference if index == 0 else self._reference.with_suffix(f".{index}.pt")
        return self._harness.trace(
            jobs.trials, self._case, kinds=self._kinds, seeds=self._seeds, proposals=proposals, path=path
        )

    def _proved(self, attempts: Sequence[Attempt]) -> Trial:
        """Try changes at once with Inductor; no set of changes is tried twice."""
        key = frozenset((attempt.place, attempt.index) for attempt in attempts)
        if key not in self._proofs:
            # Only the first set is likely to be the last one, too.
            self._proofs[key] = self._prove(attempts, timed=self._timed and not self._proofs)
        return self._proofs[key]

    def _prove(self, attempts: Sequence[Attempt], *, timed: bool) -> Trial:
        places = {attempt.place for attempt in attempts}
        try:
            proposal = self._proposal((_joined(attempts),), places)
        except (ValueError, SyntaxError) as error:
            return Trial(f"two of the changes conflict: {error}")
        self._harness.toolchain_seconds()
        try:
            trial = self._with_inductor(proposal, timed=timed)
            if trial.out_of_bound and self._calibrate():
                trial = self._with_inductor(proposal, timed=timed)
        except ChildFailure as error:
            return Trial(str(error))
        unseen = [place for place in self._hidden & self._breaks.keys() if place in places]
        if trial.verdict or not trial.skips_frames or not unseen:
            return trial
        # A change of a hidden break proves nothing while a skipped frame may still hide the break.
        return replace(trial, verdict=_UNSEEN, unseen=True)

    def _calibrate(self) -> bool:
        """Add the compiler's rounding to the bound: compile the unchanged model once. False if the bound has it."""
        if self._calibrated:
            return False
        self._calibrated = True
        try:
            return self._harness.ask(
                jobs.references, self._case, kinds=self._kinds, path=self._reference, calibrated=True
            )
        except (ChildFailure, UserError):
            return False

    def _with_inductor(self, proposal: Proposal, *, timed: bool) -> Trial:
        return self._harness.ask(
            jobs.prove,
            self._case,
            kinds=self._kinds,
            seeds=self._seeds,
            proposal=proposal,
            path=self._reference,
            timed=timed,
        )

    def _proposal(self, overlays: tuple[Overlay, ...], places: Collection[Place]) -> Proposal:
        kinds = tuple(train for train in self._kinds if self._places[train] & set(places)) or self._kinds[:1]
        compiled = kinds[:1] if self._places[kinds[0]].issuperset(places) else kinds
        return Proposal(overlays, frozenset(places), self._others(places), self._untraced, kinds, compiled)

    def _fix(self, attempt: Attempt, refused: str) -> Fix:
        """The fix of one break; ``refused`` is why the proof refused it."""
        rewrite = attempt.candidate.rewrite
        verdict = refused or attempt.trial.verdict
        if not verdict:
            train = self._proposal((), {attempt.place}).kinds[0]
            others = self._others({attempt.place})
            elsewhere = others.difference(self._places[train])  # where the trial did not look
            trial = replace(attempt.trial, remaining=attempt.trial.remaining | elsewhere)
            return self._verified([attempt], trial, rewrite.title, train=train)
        return Fix(rewrite.title, verdict, effect=rewrite.effect, cases=rewrite.case)

    def _verified(self, attempts: Sequence[Attempt], trial: Trial, title: str, *, train: bool | None = None) -> Fix:
        """The verified fix that makes these changes at once.

        ``train`` is the kind of step whose graphs the trial counted; by default that of the proof.
        """
        rewrites = [attempt.candidate.rewrite for attempt in attempts]
        sources = {attempt.place[0]: attempt.candidate.source for attempt in attempts}
        overlay, places = _joined(attempts), {attempt.place for attempt in attempts}
        # A trial does not look behind skipped frames. What is hidden there, and not fixed, remains.
        remaining = trial.remaining | (self._hidden & self._others(places) if trial.skips_frames else frozenset())
        diffs = [
            unified_diff(Path(os.path.relpath(os.path.realpath(file), self._root)).as_posix(), *contents)
            for file, contents in ((file, (source.content, overlay[file])) for file, source in sources.items())
        ]
        before = Figures(self._graphs[self._kinds[0] if train is None else train], len(self._breaks))
        after = Figures(trial.graphs, len(remaining))
        timed = trial.timed
        if timed is not None:
            steady = timed.steady
            before = replace(
                before, step=steady.eager, compile_seconds=timed.first_before, still_eager=timed.eager_before
            )
            after = replace(
                after, step=steady.compiled, compile_seconds=timed.first_after, still_eager=timed.eager_after
            )
        return Fix(
            cases=distinct(rewrite.case for rewrite in rewrites),
            title=title,
            effect="; ".join(dict.fromkeys(rewrite.effect for rewrite in rewrites if rewrite.effect)),
            patch="".join(diffs),
            accepted=True,
            verdict="outputs and gradients are within their bounds",
            before=before,
            after=after,
            speedup=None if timed is None else timed.steady.speedup,
            control=None if timed is None else timed.steady.control,
            pressure=None if timed is None else timed.steady.pressure,
        )

    def _others(self, places: Collection[Place]) -> frozenset[Place]:
        """The breaks at other places."""
        return frozenset(self._breaks.keys() - set(places))


def patch_root(files: Sequence[str], here: Path) -> Path:
    """The folder to apply patches in: the working directory, or the files' common folder if they lie elsewhere.

    Symbolic links are followed: git applies no patch to a file behind one.
    """
    folders, here = [Path(file).resolve().parent for file in files], here.resolve()
    if not folders or all(folder.is_relative_to(here) for folder in folders):
        return here
    return Path(os.path.commonpath(folders))


def _joined(attempts: Sequence[Attempt]) -> Overlay:
    """The sources with several changes."""
    edits: dict[str, list[Edit]] = {}
    sources = {attempt.place[0]: attempt.candidate.source for attempt in attempts}
    for attempt in attempts:
        edits.setdefault(attempt.place[0], []).extend(attempt.candidate.edits)
    return {file: source.apply(edits[file]) for file, source in sources.items()}


def _candidates(met: Break) -> list[Candidate]:
    try:
        return list(candidates(Source.read(Path(met.file)), met))
    except (OSError, SyntaxError):
        return []


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
