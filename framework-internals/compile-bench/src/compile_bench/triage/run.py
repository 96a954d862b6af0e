"""Triage from end to end: survey a target, measure what its graph breaks cost, and try to fix them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from benchkit import Quantity, UserError, numbers
from benchkit.processes import ChildFailure, deferred_module
from compile_bench.capture.parsing import merge_breaks
from compile_bench.capture.text import plural, short_place, shorten, some
from compile_bench.capture.trace import Break, CompileTrace, Recompile
from compile_bench.catalogue.source import Source
from compile_bench.fixes.fixer import Fixer, patch_root
from compile_bench.fixes.types import Fix, Tried
from compile_bench.measure.harness import Harness
from compile_bench.measure.records import Seen, Survey
from compile_bench.targets.case import Case
from compile_bench.triage.findings import (
    Finding,
    TriageReport,
    finding_of_break,
    finding_of_silent,
    findings_of,
    recompile_advice,
    without_refuted,
)

if TYPE_CHECKING:
    from compile_bench.measure import survey as survey_jobs
else:
    survey_jobs = deferred_module("compile_bench.measure.survey")

Result = TypeVar("Result")


def run_triage(
    harness: Harness,
    case: Case,
    *,
    kinds: Sequence[bool] = (True, False),
    cost: bool = True,
    fix: bool = True,
    root: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> TriageReport:
    """Find what keeps a target out of graphs, measure what it costs, and fix what can be fixed.

    An interrupt ends the triage, and the report has what was found until then.

    Args:
        harness: Runs every survey and every measurement in a fresh process.
        case: The target; its ``train`` does not matter.
        kinds: Training (True), inference (False) or both.
        cost: Whether to measure what the breaks cost, and what the fixes change.
        fix: Whether to try changes of the source.
        root: Folder that patches are relative to; by default the working directory, or the sources' own folder.
        tell: Called with a line for each stage and for each thing found, at once.

    Raises:
        UserError: If the target is at fault in every kind of step.
        ChildFailure: If no kind of step could be traced.
    """
    triage = _Triage(harness, case, kinds, cost, tell, proves=fix)
    try:
        triage.collect()
        triage.measure_costs()
        if fix:
            triage.fix(root)
    except KeyboardInterrupt:
        harness.stop()
        triage.interrupted = True
        triage.keep_what_was_seen()
    finally:
        harness.on_message = None
    return triage.report()


class _Triage:
    """What a triage has found so far; the arguments are those of :func:`run_triage`."""

    def __init__(
        self,
        harness: Harness,
        case: Case,
        kinds: Sequence[bool],
        cost: bool,
        tell: Callable[[str], None],
        *,
        proves: bool = False,
    ) -> None:
        self._harness, self._case, self._cost, self._proves = harness, case, cost, proves
        self._cases = [replace(case, train=train) for train in kinds]
        self._progress = Progress(tell, ("breaks", "costs", "fixes"))
        harness.on_message = self._progress.hear
        self._surveys: list[Survey] = []
        self._findings: list[Finding] = []
        self._combined: Fix | None = None
        self._root: Path | None = None
        self.absent: list[str] = []
        self.interrupted = False

    def collect(self) -> None:
        """Survey every kind of step that can be traced."""
        if self._proves:
            self._harness.on_message = self._hear_first
        self._progress.stage("breaks", f"tracing {' and '.join(case.kind for case in self._cases)}")
        calls = [partial(self._harness.trace, survey_jobs.survey, case, cost=self._cost) for case in self._cases]
        failures: list[ChildFailure | UserError] = []
        for case, answer in zip(self._cases, self._harness.ask_all(calls), strict=True):
            if isinstance(answer, (ChildFailure, UserError)):
                failures.append(answer)
                self.absent.append(str(answer))
                if isinstance(answer, ChildFailure):
                    self._keep_seen(case)
            else:
                self._surveys.append(answer)
        if not self._surveys:
            raise _together(failures)
        for survey in self._surveys:
            self.absent += [f"{survey.case.kind}: {note}" for note in survey.notes]
        self._findings = findings_of(self._surveys)
        self._progress.take_back(self._findings)

    def _hear_first(self, message: object) -> None:
        """The first break: its fix will need the toolchain's check, which takes longer than the surveys."""
        self._harness.on_message = self._progress.hear
        self._harness.begin_toolchain_check()
        self._progress.hear(message)

    def keep_what_was_seen(self) -> None:
        """Make findings of what the interrupted surveys have reported, and say what is missing."""
        removed = self._progress.removed
        what = f"the proof of the changes that remove the breaks of {', '.join(removed)}" if removed else "the rest"
        self.absent.append(f"{what}: triage was interrupted")
        if not self._surveys:
            for case in self._cases:
                self._keep_seen(case)
            self._findings = findings_of(self._surveys)

    def _keep_seen(self, case: Case) -> None:
        breaks = merge_breaks(self._progress.seen[case.train])
        if breaks:
            from compile_bench.capture.collector import user_code_filter  # imports torch

            files = frozenset(met.file for met in breaks if user_code_filter().is_user(met.file))
            seeds = ((0,),) * len(breaks)
            trace = CompileTrace(breaks=breaks)
            self._surveys.append(Survey(case, breaks, seeds, (), trace, (), 0, (), 0.0, 0.0, files, complete=False))

    def measure_costs(self) -> None:
        """Say what the breaks cost, which the surveys have measured, and whether CUDA graphs are lost."""
        main = self._traced[0]
        if self._case.device == "cuda":
            lost = self._attempted(
                lambda: self._harness.ask(survey_jobs.reasons_without_cuda_graphs, main.case), "CUDA graphs"
            )
            self._findings += [finding_of_silent(silent, self._surveys[0]) for silent in lost or ()]
        self._findings = [
            replace(finding, cost=main.costs.get((finding.file, finding.line))) for finding in self._findings
        ]
        self._findings.sort(key=_costliest_first)
        if self._cost and self._findings:
            self._progress.stage("costs", plural(len(self._findings), "finding"))
            self._progress.costs(self._findings)

    def fix(self, root: Path | None) -> None:
        """Try changes of the source."""
        surveys = [survey for survey in self._traced if survey.complete]
        users = [finding for finding in self._findings if finding.user_file]
        places = tuple(dict.fromkeys((finding.file, finding.line) for finding in users))
        if not surveys or not places:
            return
        for file in dict.fromkeys(file for file, _ in places):
            try:
                Source.read(Path(file))
            except SyntaxError as error:  # of a file in another encoding, which Python reads
                self.absent.append(f"fixes: {error}")
        self._root = root or patch_root([file for file, _ in places], Path.cwd())
        fixer = Fixer(self._harness, surveys[0].case, surveys, self._root, timed=self._cost)
        candidates = fixer.attempts(places)
        if not candidates:
            return
        self._progress.stage("fixes", f"changes for {len(candidates)} of {plural(len(places), 'line')}")
        results = self._attempted(lambda: fixer.fix(places), "fixes")
        if results is None:
            return
        revealed = [finding_of_break(met, surveys[0], results.revealed) for met in results.revealed]
        fixed = []
        for finding in (*self._findings, *revealed):
            place = (finding.file, finding.line)
            kept = without_refuted(finding, results.refuted.get(place, ()))
            fixed.append(replace(kept, fix=results.fixes.get(place)))
        self._findings, self._combined = fixed, results.combined

    @property
    def _traced(self) -> list[Survey]:
        """The surveys without an error, if there are any."""
        return [survey for survey in self._surveys if not survey.failures] or self._surveys

    def _attempted(self, action: Callable[[], Result], what: str) -> Result | None:
        """The result of an action, or None if it fails. A failure is added to ``absent``; the triage continues."""
        try:
            return action()
        except (ChildFailure, UserError) as error:
            self.absent.append(f"{what}: {error}")
            return None

    def report(self) -> TriageReport:
        """The report on what was found."""
        static = any(survey.case.dynamic is False for survey in self._surveys)
        recompiles: dict[Hashable, Recompile] = {}
        for again in (again for survey in self._surveys for again in survey.recompiles):
            recompiles.setdefault(again.identity, again)
        return replace(
            TriageReport.of_surveys(self._case.target, tuple(self._surveys)),
            recompiles=tuple(
                replace(again, advice=recompile_advice(again, static_shapes=static)) for again in recompiles.values()
            ),
            absent=tuple(self.absent),
            findings=tuple(self._findings),
            combined=self._combined,
            interrupted=self.interrupted,
            root=self._root,
        )


def _together(failures: Sequence[ChildFailure | UserError]) -> ChildFailure | UserError:
    """The failures of all kinds of step as one; what is the same for all is said once."""
    text = "; ".join(dict.fromkeys(map(str, failures)))
    if all(isinstance(failure, UserError) for failure in failures):
        return UserError(text)
    return ChildFailure(text, "\n".join(failure.details for failure in failures if isinstance(failure, ChildFailure)))


def _costliest_first(finding: Finding) -> tuple[float, float, str, int]:
    cost = finding.cost
    time_lost = cost.time_lost.value if cost is not None and cost.time_lost is not None else 0.0
    return -time_lost, -(cost.compile_seconds if cost is not None else 0.0), finding.file, finding.line


class Progress:
    """The stages of a triage, by name and in order; ``tell`` is called with each line."""

    def __init__(self, tell: Callable[[str], None], stages: Sequence[str]) -> None:
        self._tell = tell
        self._stages = list(stages)
        self._current = ""
        self._told: set[object] = set()
        self._one_at_a_time = threading.Lock()
        self.seen: dict[bool, list[Break]] = defaultdict(list)  # breaks that unfinished surveys have reported, by train
        self.removed: list[str] = []  # lines whose break an accepted change removes, before the proof

    def stage(self, name: str, text: str) -> None:
        """A stage begins."""
        self._current = name
        self._tell(f"[{self._stages.index(name) + 1}/{len(self._stages)}] {name}: {text}")

    def hear(self, message: object) -> None:
        """Tell a message of a child process. Several threads may call this."""
        with self._one_at_a_time:
            if isinstance(message, Seen) and self._current == "breaks":  # a trial has a survey, too
                self.seen[message.case.train].append(message.met)
                self._tell_once(f"  {short_place(message.met.place)}: {message.met.reason}")
            elif isinstance(message, Tried):
                place = f"{shorten(message.place[0])}:{message.place[1]}"
                outcome = message.verdict or "the break is gone, and the eager results are the same"
                self.removed += [] if message.verdict else [place]
                self._tell_once(f"  {place}, change {message.index + 1}: {outcome}")

    def take_back(self, findings: Sequence[Finding]) -> None:
        """Say of each break that was told and is no finding what became of it.

        Later steps may show the user's line that calls a library's line, or that a break belongs to another line.
        """
        reported = {(finding.place, finding.reason) for finding in findings}
        for met in [met for seen in self.seen.values() for met in seen]:
            if (met.place, met.reason) in reported:
                continue
            same = [finding for finding in findings if finding.reason == met.reason]
            called = [finding for finding in same if met.place in finding.library.split(", ")]
            now = next((short_place(finding.place) for finding in called or same), "")
            what = f"it is the break of {now}" if now else "no later step met it"
            self._tell_once(f"  taken back: {short_place(met.place)}: {met.reason}: {what}")

    def costs(self, findings: Sequence[Finding]) -> None:
        """What is lost between two graphs, as far as it is known, with all lines that cause it."""
        lost: dict[tuple[Quantity, int], list[str]] = {}
        for finding in findings:
            cost = finding.cost
            if cost is not None and cost.time_lost is not None:
                lost.setdefault((cost.time_lost, cost.output_bytes), []).append(short_place(finding.place))
        for (time_lost, _), places in lost.items():
            lines = list(dict.fromkeys(places))
            verb = "loses" if len(lines) == 1 else "together lose"
            self._tell(f"  {some(lines)}: {verb} {numbers.with_unit(time_lost.value, 's')} per step")

    def _tell_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._tell(line)
