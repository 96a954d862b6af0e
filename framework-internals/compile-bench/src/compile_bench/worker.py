"""One measurement in a process of its own: ``python -m compile_bench.worker REQUEST RESULT``.

Both files are pickles that :mod:`compile_bench.harness` writes and reads. A fresh process is the point: what was
compiled, cached or warmed up before would be in the figures otherwise.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import warnings
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
    "prove": "compile_bench.mending.trial:prove",
}


def answer(request: Request) -> object:
    """Do what a request asks for."""
    module, _, function = JOBS[request.job].partition(":")
    return getattr(importlib.import_module(module), function)(request.case, **request.arguments)


def main() -> None:
    """Answer the request in the first argument's file into the second's."""
    request_path, result_path = Path(sys.argv[1]), Path(sys.argv[2])
    request = pickle.loads(request_path.read_bytes())
    warnings.simplefilter("ignore")  # what PyTorch warns about while compiling is on the record already
    try:
        result = answer(request)
    except UserError as error:
        result = error
    result_path.write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
