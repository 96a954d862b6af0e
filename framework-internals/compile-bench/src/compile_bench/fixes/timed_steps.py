"""Times the unchanged and the changed model in alternation, in one process, past the recompile limit."""

from __future__ import annotations

import torch

from benchkit.processes import Stopwatch
from compile_bench.capture.collector import (
    Collector,
    empty_caches,
    prepare_toolchain,
    settings_restored,
    user_code_filter,
)
from compile_bench.capture.reasons import RECOMPILE_LIMIT
from compile_bench.fixes.rewrites import CHANGED_SETTINGS
from compile_bench.fixes.types import TimedSteps
from compile_bench.measure.steps import load_case, sample
from compile_bench.measure.survey.tracing import own_model, run_until_settled
from compile_bench.targets.case import FIRST_STEPS, Case
from compile_bench.targets.overlay import Overlay, forget_user_modules, overlaid
from compile_bench.targets.randomness import seed_everything
from compile_bench.targets.regional import compile_case
from compile_bench.targets.target import Step

_SECONDS = 2.0


def timed_steps(case: Case, overlay: Overlay) -> TimedSteps:
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
    limits = (each.place for each in collector.trace().breaks if each.category == RECOMPILE_LIMIT)
    return step, watch.seconds, tuple(dict.fromkeys(limits))
