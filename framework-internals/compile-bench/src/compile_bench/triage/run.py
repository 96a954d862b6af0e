"""Triage from end to end: survey a target, measure what its graph breaks cost, and try to fix them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from benchkit import UserError
from benchkit.processes import ChildFailure, deferred_module
from compile_bench.capture.parsing import merge_breaks
from compile_bench.capture.text import plural
from compile_bench.capture.trace import CompileTrace, Recompile
from compile_bench.fixes.fixer import Fixer, patch_root
from compile_bench.fixes.types import Fix
from compile_bench.measure.harness import Harness
from compile_bench.measure.survey.types import Survey
from compile_bench.targets.case import Case
from compile_bench.triage import findings
from compile_bench.triage.progress import Progress
from compile_bench.triage.types import Finding, TriageReport

if TYPE_CHECKING:
    from compile_bench.measure.survey import run as survey_jobs
    from compile_bench.triage import cuda_graphs
else:
    survey_jobs = deferred_module("compile_bench.measure.survey.run")
    cuda_graphs = deferred_module("compile_bench.triage.cuda_graphs")

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
        self._progress.stage("breaks", f"tracing {' and '.join(each.kind for each in self._cases)}")
        calls = [partial(self._harness.trace, survey_jobs.survey, each, cost=self._cost) for each in self._cases]
        failures: list[ChildFailure | UserError] = []
        for case, found in zip(self._cases, self._harness.ask_all(calls), strict=True):
            if isinstance(found, (ChildFailure, UserError)):
                failures.append(found)
                self.absent.append(str(found))
                if isinstance(found, ChildFailure):
                    self._keep_seen(case)
            else:
                self._surveys.append(found)
        if not self._surveys:
            raise _together(failures)
        for survey in self._surveys:
            self.absent += [f"{survey.case.kind}: {each}" for each in survey.notes]
        self._findings = findings.findings_of(self._surveys)
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
            self._findings = findings.findings_of(self._surveys)

    def _keep_seen(self, case: Case) -> None:
        breaks = merge_breaks(self._progress.seen[case.train])
        if breaks:
            from compile_bench.capture.collector import user_code_filter  # imports torch

            files = frozenset(each.file for each in breaks if user_code_filter().is_user(each.file))
            seeds = ((0,),) * len(breaks)
            trace = CompileTrace(breaks=breaks)
            self._surveys.append(Survey(case, breaks, seeds, (), trace, (), 0, (), 0.0, 0.0, files, complete=False))

    def measure_costs(self) -> None:
        """Say what the breaks cost, which the surveys have measured, and whether CUDA graphs are lost."""
        main = self._traced[0]
        if self._case.device == "cuda":
            lost = _attempted(
                lambda: self._harness.ask(cuda_graphs.reasons_without_cuda_graphs, main.case),
                "CUDA graphs",
                self.absent,
            )
            self._findings += [findings.finding_of_silent(each, self._surveys[0]) for each in lost or ()]
        self._findings = [replace(each, cost=main.costs.get((each.file, each.line))) for each in self._findings]
        self._findings.sort(key=_costliest_first)
        if self._cost and self._findings:
            self._progress.stage("costs", plural(len(self._findings), "finding"))
            self._progress.costs(self._findings)

    def fix(self, root: Path | None) -> None:
        """Try changes of the source."""
        surveys = [each for each in self._traced if each.complete]
        places = tuple(dict.fromkeys((each.file, each.line) for each in self._findings if each.user_file))
        if not surveys or not places:
            return
        self._root = root or patch_root([file for file, _ in places], Path.cwd())
        fixer = Fixer(self._harness, surveys[0].case, surveys, self._root, timed=self._cost)
        candidates = fixer.attempts(places)
        if not candidates:
            return
        self._progress.stage("fixes", f"changes for {len(candidates)} of {plural(len(places), 'line')}")
        results = _attempted(lambda: fixer.fix(places), "fixes", self.absent)
        if results is not None:
            revealed = [
                findings.finding_of_break(each, (0,), surveys[0], results.revealed) for each in results.revealed
            ]
            self._findings = [
                replace(
                    findings.without_refuted(each, results.refuted.get((each.file, each.line), ())),
                    fix=results.fixes.get((each.file, each.line)),
                )
                for each in (*self._findings, *revealed)
            ]
            self._combined = results.combined

    @property
    def _traced(self) -> list[Survey]:
        """The surveys without an error, if there are any."""
        return [survey for survey in self._surveys if not survey.failures] or self._surveys

    def report(self) -> TriageReport:
        """The report on what was found."""
        recompiles: dict[Hashable, Recompile] = {}
        for each in (each for survey in self._surveys for each in survey.recompiles):
            recompiles.setdefault(each.identity, each)
        return TriageReport(
            self._case.target,
            tuple(self._findings),
            tuple(recompiles.values()),
            tuple(self._surveys),
            self._combined,
            tuple(self.absent),
            self.interrupted,
            self._root,
        )


def _together(failures: Sequence[ChildFailure | UserError]) -> ChildFailure | UserError:
    """The failures of all kinds of step as one; what is the same for all is said once."""
    text = "; ".join(dict.fromkeys(map(str, failures)))
    if all(isinstance(each, UserError) for each in failures):
        return UserError(text)
    return ChildFailure(text, "\n".join(each.details for each in failures if isinstance(each, ChildFailure)))


def _attempted(action: Callable[[], Result], what: str, absent: list[str]) -> Result | None:
    """The result of an action, or None if it fails. A failure is added to ``absent``; the triage continues."""
    try:
        return action()
    except (ChildFailure, UserError) as error:
        absent.append(f"{what}: {error}")
        return None


def _costliest_first(finding: Finding) -> tuple[float, float, str, int]:
    cost = finding.cost
    time_lost = cost.time_lost.value if cost is not None and cost.time_lost is not None else 0.0
    return -time_lost, -(cost.compile_seconds if cost is not None else 0.0), finding.file, finding.line
