"""Tracing without generating code, in a process of its own."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from compile_bench.collector import Collector
from compile_bench.measuring import load_case
from compile_bench.results import Case, Triage


def triage(case: Case) -> Triage:
    """Count graph breaks and recompilations over a case's schedule.

    ``aot_eager`` follows the backward pass too, ``eager`` the forward pass alone.
    """
    target = load_case(case)
    backend = "aot_eager" if case.train else "eager"
    model = cast(nn.Module, torch.compile(target.copied(), backend=backend, dynamic=case.dynamic))
    # Twice with the first arguments: what changes from call to call of itself shows before any shape does.
    calls = (target.args, target.args, *target.schedule)
    with Collector() as collector:
        for args in calls:
            target.step(model, args, train=case.train)()
    return Triage(case, collector.trace(), len(calls))
