"""One measurement in a process of its own, which :mod:`compile_bench.nursery` forks.

Request and result are pickles that :mod:`compile_bench.harness` writes and reads. A process of its own is the point:
what was compiled, cached or warmed up before would be in the figures otherwise.
"""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path

from benchkit import UserError
from compile_bench.results import Request

# What a request's job is done by: a function of the case and of the request's arguments. Named, not imported, so that
# the figures of one job hold no import of another's.
JOBS = {
    "toolchain": "compile_bench.measuring:toolchain",
    "eager": "compile_bench.measuring:eager",
    "compiled": "compile_bench.measuring:compiled",
    "self-comparison": "compile_bench.measuring:self_comparison",
    "shapes": "compile_bench.shape_worker:shapes",
    "agreement": "compile_bench.agreement_worker:agreement",
    "inventory": "compile_bench.lock_worker:inventory",
    "triage": "compile_bench.triage_worker:triage",
    "survey": "compile_bench.triage_worker:survey",
    "lost_graphs": "compile_bench.triage_worker:lost_graphs",
    "price": "compile_bench.pricing:price",
    "trials": "compile_bench.mending.trial:trials",
    "reference": "compile_bench.mending.proof:reference",
    "prove": "compile_bench.mending.trial:prove",
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
