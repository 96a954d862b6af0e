"""The C++ operators on a CPU beside a copy, without autograd's entry and with nothing else in the rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchkit import compare
from benchkit.results import Label
from benchkit.run import Run
from benchkit.timing import rotating_inputs
from benchkit.timing.plain_copies import plain_copy
from rmsnorm_fused.bench.candidates import COPY
from rmsnorm_fused.bench.measure import READS, Case, Pass, rates
from rmsnorm_fused.impl import native
from rmsnorm_fused.ops.operators import operator
from rmsnorm_fused.options import Options

_OPTIONS = Options(1e-6)


def measure_operators(run: Run, case: Case) -> None:
    """Time ``native_forward`` and ``native_backward`` (dx and dweight) beside a copy of the same bytes.

    The records ``operator`` have the label ``pass`` and the case's labels; the values are those of a pass.
    ``torch.autograd.grad`` takes 6 us more than the operator on one row, and 25 to 110 us where the pass before has
    evicted its code from the caches (NOTES.md, 2026-11-25). A training step pays that once, not once an operator.
    """
    native.load("cpu")
    weight = case.weight("cpu").detach()
    sets = rotating_inputs(lambda: case.tensors("cpu"), device="cpu")
    forward, backward = operator("native", "forward"), operator("native", "backward")
    rstd = forward(sets[0][0], weight, None, *_OPTIONS)[1]  # another row's rstd takes as long
    functions: dict[Pass, Callable[..., Any]] = {
        "forward": lambda x, _: forward(x, weight, None, *_OPTIONS),
        "backward": lambda x, dy: backward(dy, None, x, weight, rstd, *_OPTIONS[1:], True, False),
    }
    for which, function in functions.items():
        with torch.no_grad():
            ways = {COPY: plain_copy("cpu", sets, reads=READS[which]), "cpp": function}
            timings = compare(ways, device="cpu", inputs=sets, seconds=run.configuration["seconds"])
        for name in ways:
            labels: dict[str, Label] = {"pass": which, **case.labels, "implementation": name}
            run.record("operator", labels, rates(case, which, name, timings))
