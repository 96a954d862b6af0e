"""One measurement in a process of its own, which :mod:`compile_bench.measure.nursery` forks.

Request and result are pickles that :mod:`compile_bench.measure.harness` writes and reads. A process of its
own is the point: what was compiled, cached or warmed up before would be in the figures otherwise.
"""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path

from benchkit import UserError
from compile_bench.measure.measurements import Request

# What a request's job is done by: a function of the case and of the request's arguments. Named, not imported, so that
# the figures of one job hold no import of another's.
JOBS = {
    "toolchain": "compile_bench.measure.steps:toolchain",
    "eager": "compile_bench.measure.steps:eager",
    "compiled": "compile_bench.measure.steps:compiled",
    "self-comparison": "compile_bench.measure.steps:self_comparison",
    "shapes": "compile_bench.measure.shape_schedule:shapes",
    "agreement": "compile_bench.measure.agreement_worker:agreement",
    "inventory": "compile_bench.measure.inventory:inventory",
    "triage": "compile_bench.measure.survey:triage",
    "survey": "compile_bench.measure.survey:survey",
    "lost_graphs": "compile_bench.measure.survey:lost_graphs",
    "cost": "compile_bench.triage.break_cost:cost",
    "trials": "compile_bench.fixes.trial:trials",
    "reference": "compile_bench.fixes.verify:reference",
    "prove": "compile_bench.fixes.trial:prove",
}

# Jobs that trace and time nothing run side by side: the threads of two processes on two cores wait for one another.
TRACING = frozenset(("agreement", "triage", "survey", "trials"))


def answer(request: Request) -> object:
    """Do what a request asks for."""
    if request.job in TRACING:
        importlib.import_module("torch").set_num_threads(1)
    module, _, function = JOBS[request.job].partition(":")
    return getattr(importlib.import_module(module), function)(request.case, **request.arguments)


def answer_to(request_path: Path, result_path: Path) -> None:
    """Answer the request in one file into the other."""
    request = pickle.loads(request_path.read_bytes())  # noqa: S301 # the parent's, in its private folder
    try:
        result = answer(request)
    except UserError as error:
        result = error
    result_path.write_bytes(pickle.dumps(result))
