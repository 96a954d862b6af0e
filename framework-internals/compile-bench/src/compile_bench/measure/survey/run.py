"""Survey a target: trace it without generating code, in a process of its own, and report what stays out of graphs."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import torch

from benchkit import UserError
from compile_bench.capture.collector import CudaGraphSkips, user_code_filter
from compile_bench.capture.parsing import merge_breaks
from compile_bench.capture.silent_eager import SilentEager, lost_cuda_graphs
from compile_bench.capture.trace import Recompile
from compile_bench.measure.measurements import Triage
from compile_bench.measure.steps import load_case
from compile_bench.measure.survey.skipped_frames import Hidden, breaks_behind_skipped_frames
from compile_bench.measure.survey.tracing import STEADY_CALLS, own_model, trace_target
from compile_bench.measure.survey.types import Survey, place_of
from compile_bench.targets.case import Case
from compile_bench.targets.regional import OwnRegions, compile_case

SEEDS = (0, 1, 2)


def triage(case: Case) -> Triage:
    """Count graph breaks and recompilations over a case's schedule."""
    seen = survey(case, seeds=(0,))
    if seen.eager_failure:
        raise UserError(f"{case.target} {seen.eager_failure}")
    return Triage(case, replace(seen.trace, breaks=seen.breaks), seen.calls, seen.failures)


def survey(case: Case, *, seeds: Sequence[int] = SEEDS, behind: bool = True, cost: bool = False) -> Survey:
    """Find what keeps a target out of graphs."""
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)  # the trace contains what it warns of
    user_code = user_code_filter()
    target = load_case(case)
    start = time.perf_counter()
    seen = trace_target(target, case, seeds, cost=cost, tell=True)
    seconds = time.perf_counter() - start
    hidden = breaks_behind_skipped_frames(case, seen, seeds) if behind else Hidden()
    breaks = seen.breaks + hidden.breaks
    merged = merge_breaks(met for _, met in breaks)
    seeds_of: dict[Hashable, dict[int, None]] = defaultdict(dict)  # sets that keep their order
    for seed, met in breaks:
        seeds_of[met.identity][seed] = None
    return Survey(
        case,
        breaks=merged,
        seeds=tuple(tuple(seeds_of[met.identity]) for met in merged),
        eager=tuple(seen.eager.values()),
        trace=seen.first,
        recompiles=_distinct(seen.trace.recompiles),
        calls=seen.calls,
        failures=tuple(seen.failures),
        collect_seconds=seen.trace.handler_seconds,
        trace_seconds=seconds,
        user_files=frozenset(met.file for met in merged if user_code.is_user(met.file)),
        notes=(*([f"the model {seen.eager_failure}"] if seen.eager_failure else ()), *hidden.notes),
        eager_failure=seen.eager_failure,
        regions=target.model.text if isinstance(target.model, OwnRegions) else "",
        hidden=frozenset(place_of(met) for _, met in hidden.breaks),
        untraced=hidden.untraced,
        costs=seen.costs,
    )


def _distinct(recompiles: Iterable[Recompile]) -> tuple[Recompile, ...]:
    """One recompilation for every place and guard."""
    distinct: dict[Hashable, Recompile] = {}
    for again in recompiles:
        distinct.setdefault(again.identity, again)
    return tuple(distinct.values())


def reasons_without_cuda_graphs(case: Case) -> list[SilentEager]:
    """Why Inductor does not use CUDA graphs for a case that asks for them, each reason with the model's line.

    Regions that the model's code compiles keep their own mode.
    """
    target = load_case(case)
    asked = case if isinstance(target.model, OwnRegions) else replace(case, mode="reduce-overhead")
    compiled = compile_case(own_model(target, case), asked)
    step = target.step(compiled, train=case.train)
    with CudaGraphSkips() as skips:
        for _ in range(STEADY_CALLS):
            torch.compiler.cudagraph_mark_step_begin()
            step()
    return lost_cuda_graphs(skips.reasons, skips.messages, user_code_filter())
