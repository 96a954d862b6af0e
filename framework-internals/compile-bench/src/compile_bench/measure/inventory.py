"""Counts what a target compiles to, for the lock file."""

from __future__ import annotations

from itertools import islice

import torch

from compile_bench.capture.collector import Collector
from compile_bench.measure.measurements import Inventory
from compile_bench.measure.steps import load_case
from compile_bench.targets.case import Case
from compile_bench.targets.regional import compile_case


def inventory(case: Case) -> Inventory:
    """Compile a target with Inductor, call it twice and then over its schedule, and count."""
    target = load_case(case)
    model = compile_case(target.copied(), case)
    with Collector() as collector:
        step = target.step(model, train=case.train)
        step()
        step()
        for call in islice(target.calls(), 1, None):
            call.step(model, train=case.train)()
    return Inventory.of(collector.trace(), torch.__version__)
