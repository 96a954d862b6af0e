"""Counting what a target compiles to, in a process of its own with empty caches."""

from __future__ import annotations

from itertools import islice

import torch

from compile_bench.capture.collector import Collector
from compile_bench.lock import Inventory
from compile_bench.measure.steps import load_case
from compile_bench.targets.case import Case
from compile_bench.targets.regional import compile_case


def inventory(case: Case) -> Inventory:
    """Compile a target with Inductor over its schedule, its own arguments twice, and count."""
    target = load_case(case)
    model = compile_case(target.copied(), case)
    with Collector() as collector:
        step = target.step(model, train=case.train)
        step()
        step()
        for call in islice(target.calls(), 1, None):
            call.step(model, train=case.train)()
    return Inventory.of(collector.trace(), torch.__version__)
