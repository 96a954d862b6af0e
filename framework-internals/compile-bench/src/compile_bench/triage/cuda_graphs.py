"""Why Inductor does not use CUDA graphs for a target."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from compile_bench.capture.collector import CudaGraphSkips, user_code_filter
from compile_bench.capture.silent_eager import SilentEager, lost_cuda_graphs
from compile_bench.measure.steps import load_case
from compile_bench.measure.survey.tracing import STEADY_CALLS, own_model
from compile_bench.targets.case import Case


def reasons_without_cuda_graphs(case: Case) -> list[SilentEager]:
    """Why Inductor does not use CUDA graphs for a case that asks for them, each reason with the model's line."""
    target = load_case(case)
    compiled = cast(nn.Module, torch.compile(own_model(target, case), mode="reduce-overhead", dynamic=case.dynamic))
    step = target.step(compiled, train=case.train)
    with CudaGraphSkips() as skips:
        for _ in range(STEADY_CALLS):
            torch.compiler.cudagraph_mark_step_begin()
            step()
    return lost_cuda_graphs(skips.reasons, skips.messages, user_code_filter())
