"""Why Inductor does not use CUDA graphs for a target."""

from __future__ import annotations

from dataclasses import replace

import torch

from compile_bench.capture.collector import CudaGraphSkips, user_code_filter
from compile_bench.capture.silent_eager import SilentEager, lost_cuda_graphs
from compile_bench.measure.steps import load_case
from compile_bench.measure.survey.tracing import STEADY_CALLS, own_model
from compile_bench.targets.case import Case
from compile_bench.targets.regional import OwnRegions, compile_case


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
