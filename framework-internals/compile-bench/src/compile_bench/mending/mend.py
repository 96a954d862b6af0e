"""Try a change for every break, keep what is proved, and put what is kept together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from compile_bench.findings import Figures, Finding, Mark, Mend, Survey, Trial, mark
from compile_bench.harness import Harness, WorkerFailure
from compile_bench.mending.overlay import Overlay
from compile_bench.mending.rewrites import Candidate, candidates
from compile_bench.mending.source import Edit, Source, unified_diff
from compile_bench.results import Case
from compile_bench.trace import Break


@dataclass(frozen=True)
class Mending:
    """Changes that were tried.

    Attributes:
        mends: by place (file and line) of the break.
        together: everything that was accepted as one change; None without any.
        overlay: the sources with it.
    """

    mends: dict[tuple[str, int], Mend]
    together: Mend | None
    overlay: Overlay


class Mender:
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
        # Seeds beyond the first are only tried where one of them found something that the first did not.
        needed = {seeds[0] for survey in surveys for seeds in survey.seeds if seeds}
        self._seeds = tuple(sorted(needed | {0}))
        self._graphs = len(surveys[0].trace.graphs)
        self._root = root
        self._reference = harness.folder / "reference.pt"
        self._accepted: dict[str, tuple[Source, list[Edit]]] = {}

    def mend(self, findings: Sequence[Finding]) -> Mending:
        """Try to mend every finding in a file of the user's.

        Raises:
            WorkerFailure: if the unchanged model cannot be run for comparison.
            UserError: likewise.
        """
        places = {(each.file, each.line): found for each in findings if each.user_file for found in self._at(each.file, each.line)}
        proposals = {place: list(_proposals(found)) for place, found in places.items()}
        if not any(proposals.values()):
            return Mending({}, None, {})
        self._harness.toolchain_seconds()
        self._harness.ask("reference", self._case, path=self._reference)
        mends = {place: self._first_that_holds(place, each) for place, each in proposals.items() if each}
        return Mending(mends, *self._together(mends))

    def _at(self, file: str, line: int) -> list[Break]:
        return [each for each in self._breaks.values() if (each.file, each.line) == (file, line)]

    def _first_that_holds(self, place: tuple[str, int], proposals: Sequence[Candidate]) -> Mend:
        assert proposals
        last: Mend | None = None
        for candidate in proposals:
            last = self._tried(place, candidate)
            if last.accepted:
                source, edits = candidate.source, list(candidate.edits)
                self._accepted.setdefault(place[0], (source, []))[1].extend(edits)
                break
        assert last is not None
        return last

    def _tried(self, place: tuple[str, int], candidate: Candidate) -> Mend:
        rewrite, source = candidate.rewrite, candidate.source
        attempt = Mend(rewrite.case, rewrite.title, rewrite.effect, "", (place[0],), False, "")
        try:
            changed = source.apply(candidate.edits)
        except (ValueError, SyntaxError) as error:
            return replace(attempt, verdict=f"the change does not fit this code: {error}")
        allowed = frozenset(key for key, each in self._breaks.items() if (each.file, each.line) != place)
        tried = self._try({place[0]: changed}, allowed)
        if tried.verdict:
            return replace(attempt, verdict=tried.verdict)
        return replace(
            attempt,
            patch=unified_diff(self._relative(place[0]), source.content, changed),
            accepted=True,
            verdict="the break is gone; outputs and gradients are within their bounds",
            before=Figures(self._graphs, len(self._breaks), None, 0.0),
            after=Figures(tried.graphs, tried.breaks, None, 0.0),
        )

    def _try(self, overlay: Overlay, allowed: frozenset[Mark]) -> Trial:
        try:
            return cast(
                Trial,
                self._harness.ask(
                    "trial",
                    self._case,
                    overlay=overlay,
                    kinds=self._kinds,
                    seeds=self._seeds,
                    allowed=allowed,
                    path=self._reference,
                ),
            )
        except WorkerFailure as error:
            return Trial(str(error), 0, 0)

    def _together(self, mends: dict[tuple[str, int], Mend]) -> tuple[Mend | None, Overlay]:
        accepted = {place: each for place, each in mends.items() if each.accepted}
        if not accepted:
            return None, {}
        try:
            overlay = {file: source.apply(edits) for file, (source, edits) in self._accepted.items()}
        except (ValueError, SyntaxError):
            return None, {}  # two changes of one statement: each holds by itself
        allowed = frozenset(key for key, each in self._breaks.items() if (each.file, each.line) not in accepted)
        tried = self._try(overlay, allowed)
        cases = ", ".join(dict.fromkeys(each.case for each in accepted.values()))
        effects = "; ".join(dict.fromkeys(each.effect for each in accepted.values() if each.effect))
        files = tuple(overlay)
        attempt = Mend(cases, "all of them together", effects, "", files, False, tried.verdict)
        if tried.verdict:
            return attempt, {}
        patch = "".join(
            unified_diff(self._relative(file), source.content, overlay[file])
            for file, (source, _) in self._accepted.items()
        )
        return replace(
            attempt,
            patch=patch,
            accepted=True,
            verdict="the breaks are gone; outputs and gradients are within their bounds",
            before=Figures(self._graphs, len(self._breaks), None, 0.0),
            after=Figures(tried.graphs, tried.breaks, None, 0.0),
        ), overlay

    def _relative(self, file: str) -> str:
        return Path(os.path.relpath(file, self._root)).as_posix()


def patch_root(files: Sequence[str], here: Path) -> Path:
    """The folder that patches are applied in: the working directory, or the files' own where they lie elsewhere."""
    folders = [Path(file).parent for file in files]
    if not folders or all(folder.is_relative_to(here) for folder in folders):
        return here
    return Path(os.path.commonpath(folders))


def _proposals(found: Break) -> list[Candidate]:
    try:
        return list(candidates(Source.read(Path(found.file)), found))
    except (OSError, SyntaxError):
        return []
