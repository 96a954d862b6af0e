"""Try changes of the source: does the break disappear, and does the changed model compute the same?

All candidates are tried in one process without a code generator. The accepted ones are then proved at once, in a fresh
process, with Inductor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchkit import UserError
from benchkit.processes import Stopwatch, send_message
from compile_bench.capture.collector import (
    Collector,
    empty_caches,
    prepare_toolchain,
    settings_restored,
    user_code_filter,
)
from compile_bench.capture.frames import plain_function
from compile_bench.capture.trace import Break
from compile_bench.capture.wording import RECOMPILE_LIMIT
from compile_bench.fixes.rewrites import CHANGED_SETTINGS
from compile_bench.fixes.source import line_before
from compile_bench.fixes.types import Proposal, TimedSteps, Trial, Tried
from compile_bench.fixes.verify import reference, refusal
from compile_bench.measure.steps import load_case, sample
from compile_bench.measure.survey.run import survey
from compile_bench.measure.survey.tracing import own_model, run_until_settled
from compile_bench.measure.survey.types import Place, Survey, place_of
from compile_bench.targets.case import FIRST_STEPS, Case
from compile_bench.targets.overlay import Overlay, forget_user_modules, overlaid
from compile_bench.targets.randomness import seed_everything
from compile_bench.targets.regional import compile_case
from compile_bench.targets.target import Step

# How long the unchanged and the changed model are sampled together.
_SECONDS = 2.0


def trials(case: Case, *, seeds: Sequence[int], proposals: Sequence[Proposal], path: Path) -> list[list[Trial]]:
    """Try the candidates of every proposal until one is accepted.

    An accepted candidate is the last one. The unchanged model's values go to ``path``, which :func:`prove` reads, too.
    """
    reference(case, path=path)
    results = []
    for proposal in proposals:
        tried: list[Trial] = []
        for overlay in proposal.overlays:
            seen = _traced(case, proposal, overlay, (proposal.train,), seeds)
            tried.append(_compared(case, overlay, seen, path, with_inductor=False))
            send_message(Tried(next(iter(proposal.places)), len(tried) - 1, tried[-1].verdict))
            if not tried[-1].verdict:
                break
        results.append(tried)
    return results


def prove(
    case: Case, *, kinds: Sequence[bool], seeds: Sequence[int], proposal: Proposal, path: Path, timed: bool
) -> Trial:
    """Try the first candidate of a proposal with Inductor.

    If it is accepted and ``timed``, steps before and after are timed.
    """
    overlay = proposal.overlays[0]
    seen = _traced(case, proposal, overlay, kinds, seeds)
    # Timed first: the comparison finds the code in the caches that this compiles.
    steps = _timed_steps(case, overlay) if timed and not seen.verdict else None
    return replace(_compared(case, overlay, seen, path, with_inductor=True), timed=steps)


def _traced(case: Case, proposal: Proposal, overlay: Overlay, kinds: Sequence[bool], seeds: Sequence[int]) -> Trial:
    """The breaks of the changed model."""
    with settings_restored(CHANGED_SETTINGS), overlaid(overlay):
        surveys = []
        for train in kinds:
            forget_user_modules(user_code_filter())
            try:
                surveys.append(survey(replace(case, train=train), seeds=seeds, behind=False))
            except UserError as error:
                return Trial(f"the changed model fails: {error}")
        seen = _seen(surveys, overlay, proposal)
    failures = [failure for survey in surveys for failure in survey.failures]
    return replace(seen, verdict=f"the changed model fails: {failures[0]}") if failures and not seen.verdict else seen


def _compared(case: Case, overlay: Overlay, seen: Trial, path: Path, *, with_inductor: bool) -> Trial:
    """The trial with the comparison of outputs and gradients."""
    if seen.verdict:
        return seen
    with settings_restored(CHANGED_SETTINGS), overlaid(overlay):
        forget_user_modules(user_code_filter())
        torch.compiler.reset()
        refused = refusal(case, path=path, with_inductor=with_inductor)
    return seen if refused is None else replace(seen, verdict=refused.why, out_of_bound=refused.out_of_bound)


def _seen(surveys: Sequence[Survey], overlay: Overlay, proposal: Proposal) -> Trial:
    """The breaks of the changed model; refused if there are others than the proposal allows."""
    remaining = {_place_before(met, overlay): met for other in surveys for met in other.breaks}
    unexpected = {key: met for key, met in remaining.items() if key not in proposal.allowed}
    revealed = {
        key: replace(met, line=key[1])
        for key, met in unexpected.items()
        if key[1] and key not in proposal.places and _was_hidden(met, proposal.untraced)
    }
    seen = Trial(
        "",
        frozenset(remaining),
        tuple(revealed.values()),
        any(met.whole_frame for met in remaining.values()),
        len(surveys[0].trace.graphs),
    )
    for (file, line), other in unexpected.items():
        if (file, line) not in revealed:
            place = f"{Path(file).name}:{line}" if line else f"{Path(file).name}, in `{other.source}`"
            return replace(seen, verdict=f"it still breaks: {place}, {other.reason}")
    return seen


def _was_hidden(met: Break, untraced: frozenset[tuple[str, str]]) -> bool:
    """Whether a break is in a function that was not traced to its end, or in a function called there."""
    frames = [(met.file, met.function), *((frame.file, frame.function) for frame in met.stack)]
    return any((file, plain_function(function)) in untraced for file, function in frames)


def _place_before(met: Break, overlay: Overlay) -> Place:
    """The place of a break in the unchanged sources."""
    file, line = place_of(met)
    return (file, line_before(Path(file).read_bytes(), overlay[file], line)) if file in overlay else (file, line)


def _timed_steps(case: Case, overlay: Overlay) -> TimedSteps:
    """Compile a case with Inductor without and with changed sources, in empty caches, and time both.

    Both run until they compile nothing more, and the process keeps the caches of the changed model.
    """
    prepare_toolchain(case.device)
    torch.compiler.reset()
    after, first_after, eager_after = _compiled_step(case, overlay)
    with empty_caches():
        before, first_before, eager_before = _compiled_step(case, {})
    steady = sample(before, after, case, _SECONDS)
    return TimedSteps(steady, first_before, first_after, eager_before, eager_after)


def _compiled_step(case: Case, overlay: Overlay) -> tuple[Step, float, tuple[str, ...]]:
    """The compiled step, seconds of its first calls, and the lines that keep it eager."""
    with settings_restored(CHANGED_SETTINGS), overlaid(overlay), Collector() as collector:
        forget_user_modules(user_code_filter())
        target = load_case(case)
        step = target.step(compile_case(own_model(target, case), case), train=case.train)
        seed_everything(0)
        with Stopwatch(None) as watch:
            for _ in range(FIRST_STEPS):
                step()
            if case.device == "cuda":
                torch.cuda.synchronize()
        run_until_settled(step, collector)
    limits = (met.place for met in collector.trace().breaks if met.category == RECOMPILE_LIMIT)
    return step, watch.seconds, tuple(dict.fromkeys(limits))
