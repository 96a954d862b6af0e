"""Try a change for every break, keep what is proved, and put what is kept together."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchkit import UserError
from benchkit.processes import ChildFailure
from compile_bench.capture.trace import Break
from compile_bench.fixes.choosing import Choice, Place, choose
from compile_bench.fixes.rewrites import Candidate, candidates
from compile_bench.fixes.source import Edit, Source, unified_diff
from compile_bench.fixes.types import Figures, Fix, Proposal, Trial
from compile_bench.measure.harness import Harness
from compile_bench.measure.survey_types import Mark, Survey, mark
from compile_bench.targets.case import Case
from compile_bench.targets.overlay import Overlay

# Says nothing against a change.
_UNSEEN = "a function around it is still given up, and nothing shows whether the break is gone"


@dataclass(frozen=True)
class FixResults:
    """Changes that were tried.

    Attributes:
        mends: by place (file and line) of the break.
        together: what was accepted as one change; None without any.
        overlay: the sources with it.
    """

    fixes: dict[Place, Fix]
    together: Fix | None
    overlay: Overlay


@dataclass(frozen=True)
class _Attempt:
    """One candidate at one place, with what came of it.

    Attributes:
        place: of the break.
        way: which of the place's candidates it is.
        candidate: what it changes.
        overlay: the sources with it.
        trial: what came of it.
    """

    place: Place
    way: int
    candidate: Candidate
    overlay: Overlay
    trial: Trial


class Fixer:
    """Tries changes of a target's sources.

    Args:
        harness: runs every trial in a fresh process.
        case: whose outputs and gradients are compared.
        surveys: what the unchanged target does.
        root: folder that patches are relative to.
    """

    def __init__(self, harness: Harness, case: Case, surveys: Sequence[Survey], root: Path) -> None:
        self._harness = harness
        self._case = case
        self._kinds = tuple(survey.case.train for survey in surveys)
        self._breaks = {mark(each): each for survey in surveys for each in survey.breaks}
        self._hidden = frozenset[Mark]().union(*(survey.hidden for survey in surveys))
        # Seeds beyond the first are only tried where one of them found something that the first did not.
        needed = {seeds[0] for survey in surveys for seeds in survey.seeds if seeds}
        self._seeds = tuple(sorted(needed | {0}))
        self._graphs = len(surveys[0].trace.graphs)
        self._root = root
        self._reference = harness.folder / "reference.pt"
        self._calibrated = False
        self._proofs: dict[frozenset[tuple[Place, int]], Trial] = {}

    def fix(self, places: Sequence[Place]) -> FixResults:
        """Try to mend the breaks at these places, which are in files of the user's.

        Args:
            places: costliest first; of mends that are in each other's way the earlier ones are kept.

        Raises:
            ChildFailure: if the unchanged model cannot be run for comparison.
            UserError: likewise.
        """
        attempts = self._attempts(places)
        last = {place: ways[-1] for place, ways in self._tried(attempts).items()}
        refused: dict[Place, str] = {}
        while True:
            choice = self._chosen([last[place] for place in last if place not in refused])
            refused |= choice.refused
            others = self._others(attempts, last, choice.refused)
            if not others:
                break
            last |= others
            refused = {place: verdict for place, verdict in refused.items() if place not in others}
        fixes = {
            place: replace(self._fix(each, refused.get(place, "")), apart=choice.apart.get(place, ""))
            for place, each in last.items()
        }
        if choice.trial is None:
            return FixResults(fixes, None, {})
        kept = [each for place, each in last.items() if place in choice.kept]
        title = "mends that hold together" if choice.apart else "all mends together"
        return FixResults(fixes, self._as_one(kept, choice.trial, title), _joined(kept))

    def _chosen(self, attempts: Sequence[_Attempt]) -> Choice:
        """Which of the changes that pass without Inductor hold together with it."""
        passed = {each.place: each for each in attempts if not each.trial.verdict}

        def proved(places: Collection[Place]) -> Trial:
            return self._proved([each for place, each in passed.items() if place in places])

        return choose(tuple(passed), proved)

    def _others(
        self, attempts: Mapping[Place, list[_Attempt]], last: Mapping[Place, _Attempt], refused: Mapping[Place, str]
    ) -> dict[Place, _Attempt]:
        """Of lines whose change the proof refused, the next one that passes without Inductor."""
        places = (place for place, verdict in refused.items() if verdict != _UNSEEN)
        left = {place: rest for place in places if (rest := attempts[place][last[place].way + 1 :])}
        found = {place: ways[-1] for place, ways in self._tried(left).items()}
        return {place: way for place, way in found.items() if not way.trial.verdict}

    def _attempts(self, places: Sequence[Place]) -> dict[Place, list[_Attempt]]:
        """Candidates by place, those left out that do not fit the code."""
        attempts: dict[Place, list[_Attempt]] = {}
        for place in places:
            for found in (each for each in self._breaks.values() if (each.file, each.line) == place):
                for candidate in _candidates(found):
                    try:
                        overlay = {place[0]: candidate.source.apply(candidate.edits)}
                    except (ValueError, SyntaxError):
                        continue
                    ways = attempts.setdefault(place, [])
                    ways.append(_Attempt(place, len(ways), candidate, overlay, Trial("not tried")))
        return attempts

    def _tried(self, attempts: Mapping[Place, list[_Attempt]]) -> dict[Place, list[_Attempt]]:
        """The candidates of every place up to the first that passes."""
        if not attempts:
            return {}
        proposals = [
            Proposal(tuple(each.overlay for each in ways), self._allowed({place})) for place, ways in attempts.items()
        ]
        # Every process makes a reference of its own: the first one's is what the proof is held against.
        parts = [proposals[start :: self._harness.beside] for start in range(self._harness.beside)]
        answers = self._harness.ask_all(
            [partial(self._trials, part, index) for index, part in enumerate(parts) if part]
        )
        results: list[list[Trial]] = [[] for _ in proposals]
        for start, answer in enumerate(answers):
            if isinstance(answer, Exception):
                raise answer
            results[start :: self._harness.beside] = answer
        return {
            place: [replace(way, trial=trial) for way, trial in zip(attempts[place], trials, strict=False)]
            for place, trials in zip(attempts, results, strict=True)
        }

    def _trials(self, proposals: Sequence[Proposal], index: int) -> list[list[Trial]]:
        path = self._reference if index == 0 else self._reference.with_suffix(f".{index}.pt")
        from compile_bench.fixes.trial import trials

        return self._harness.trace(
            trials, self._case, kinds=self._kinds, seeds=self._seeds, proposals=proposals, path=path
        )

    def _proved(self, attempts: Sequence[_Attempt]) -> Trial:
        """Some changes as one, with Inductor; the same ones are proved once."""
        key = frozenset((each.place, each.way) for each in attempts)
        if key not in self._proofs:
            self._proofs[key] = self._prove(attempts)
        return self._proofs[key]

    def _prove(self, attempts: Sequence[_Attempt]) -> Trial:
        places = {each.place for each in attempts}
        try:
            overlay = _joined(attempts)
        except (ValueError, SyntaxError) as error:
            return Trial(f"two of the changes are in each other's way: {error}")
        self._harness.toolchain_seconds()
        try:
            trial = self._compiled(overlay, places)
            if trial.off and self._calibrate():
                trial = self._compiled(overlay, places)
        except ChildFailure as error:
            return Trial(str(error))
        return self._judged(trial, places)

    def _calibrate(self) -> bool:
        """Allow for what the compiler's rounding alone does; whether that is new. It takes a compilation."""
        if self._calibrated:
            return False
        self._calibrated = True
        from compile_bench.fixes.verify import reference

        try:
            return self._harness.ask(reference, self._case, path=self._reference, calibrated=True)
        except (ChildFailure, UserError):
            return False

    def _compiled(self, overlay: Overlay, places: Collection[Place]) -> Trial:
        from compile_bench.fixes.trial import prove

        return self._harness.ask(
            prove,
            self._case,
            overlay=overlay,
            kinds=self._kinds,
            seeds=self._seeds,
            allowed=self._allowed(places),
            path=self._reference,
        )

    def _judged(self, trial: Trial, places: Collection[Place]) -> Trial:
        """A trial; where a mended break lies behind a function that is still given up, it has proved nothing."""
        unseen = [each for each in self._hidden & self._breaks.keys() if each not in self._allowed(places)]
        if trial.verdict or not trial.skips_frames or not unseen:
            return trial
        return replace(trial, verdict=_UNSEEN, unseen=True)

    def _as_one(self, attempts: Sequence[_Attempt], trial: Trial, title: str) -> Fix:
        """All changes that hold together, of which ``trial`` came."""
        rewrites = [each.candidate.rewrite for each in attempts]
        cases = ", ".join(dict.fromkeys(rewrite.case for rewrite in rewrites))
        effects = "; ".join(dict.fromkeys(rewrite.effect for rewrite in rewrites if rewrite.effect))
        sources = {each.place[0]: each.candidate.source for each in attempts}
        fix = Fix(cases, title, effects, "", tuple(sources), False, "")
        return self._accepted(fix, sources, _joined(attempts), trial, {each.place for each in attempts})

    def _fix(self, attempt: _Attempt, refused: str) -> Fix:
        """The change at one place; ``refused`` is what the proof says against it."""
        rewrite, file = attempt.candidate.rewrite, attempt.place[0]
        verdict = refused or attempt.trial.verdict
        fix = Fix(rewrite.case, rewrite.title, rewrite.effect, "", (file,), False, verdict)
        if verdict:
            return fix
        return self._accepted(fix, {file: attempt.candidate.source}, attempt.overlay, attempt.trial, {attempt.place})

    def _accepted(
        self,
        fix: Fix,
        sources: Mapping[str, Source],
        overlay: Overlay,
        trial: Trial,
        places: Collection[Place],
    ) -> Fix:
        # A trial does not look behind functions that are given up: what was hidden there, and not mended, still is.
        left = trial.left | (self._hidden & self._allowed(places) if trial.skips_frames else frozenset())
        diffs = [unified_diff(self._relative(file), source.content, overlay[file]) for file, source in sources.items()]
        return replace(
            fix,
            patch="".join(diffs),
            accepted=True,
            verdict="outputs and gradients are within their bounds",
            before=Figures(self._graphs, len(self._breaks)),
            after=Figures(trial.graphs, len(left)),
        )

    def _allowed(self, places: Collection[Place]) -> frozenset[Mark]:
        return frozenset(key for key, each in self._breaks.items() if (each.file, each.line) not in places)

    def _relative(self, file: str) -> str:
        return Path(os.path.relpath(file, self._root)).as_posix()


def patch_root(files: Sequence[str], here: Path) -> Path:
    """The folder that patches are applied in: the working directory, or the files' own where they lie elsewhere."""
    user_code = [Path(file).parent for file in files]
    if not user_code or all(folder.is_relative_to(here) for folder in user_code):
        return here
    return Path(os.path.commonpath(user_code))


def _joined(attempts: Sequence[_Attempt]) -> Overlay:
    """The sources with several changes.

    Raises:
        ValueError: if two of them overlap.
        SyntaxError: if the result is not Python.
    """
    edits: dict[str, list[Edit]] = {}
    sources = {each.place[0]: each.candidate.source for each in attempts}
    for each in attempts:
        edits.setdefault(each.place[0], []).extend(each.candidate.edits)
    return {file: source.apply(edits[file]) for file, source in sources.items()}


def _candidates(found: Break) -> list[Candidate]:
    try:
        return list(candidates(Source.read(Path(found.file)), found))
    except (OSError, SyntaxError):
        return []
