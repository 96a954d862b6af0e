"""The lens: what ``scripts/run.py`` configures, measures and reports."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import torch

from benchkit import Quantity, measure
from benchkit.device import Device
from benchkit.run import Lens, Run
from dispatcher_trace.capture.shims import installed
from dispatcher_trace.measure import agreement, checks, hop_cost, native_steps, traces
from dispatcher_trace.report import sections
from native_build.toolchain import missing_cxx


def build_lens(root: Path) -> Lens:
    """The lens, for ``scripts/run.py`` and the root scripts.

    Args:
        root: The package's folder.
    """
    return Lens("dispatcher-trace", root, configure, functools.partial(collect, root=root), sections.report)


def configure(device: Device, quick: bool) -> dict[str, Any]:
    """The configuration of a run.

    Returns:
        ``size``: rows and columns of the inputs. ``seconds`` and ``rounds`` of the timings. ``catalogue_step``: only
        every so many entries of the catalogue are traced. ``stepped``: the cases to single-step.
    """
    return {
        "size": 64 if quick else 256,
        "seconds": 0.5 if quick else 3.0,
        "rounds": 5 if quick else 15,
        "catalogue_step": 6 if quick else 1,
        "stepped": native_steps.stepped_cases(quick=quick),
    }


def collect(run: Run, root: Path) -> None:
    """Measure everything and record it.

    Args:
        run: Where the records go.
        root: The package's folder.
    """
    no_compiler = missing_cxx()
    if no_compiler:
        run.absent("The compiled call", no_compiler)
    subjects = traces.subjects(run, root, compile=no_compiler is None)
    with run.working("Everything once without shims"):
        untraced = {subject: traces.run_untraced(make) for subject, make in subjects.items()}
    with run.working("Time a hop"):
        operands = [torch.ones(hop_cost.SIZE, device=run.device) for _ in range(2)]
        stock = measure(lambda: torch.add(*operands), seconds=run.configuration["seconds"] / 3, clock="wall-clock")
        hop_cost.record_hop_costs(run)
    with run.working("What torch itself refuses of the catalogue"):
        refused = agreement.refused(run.device, agreement.entries(run))
    with checks.restored_tables(run):
        start = time.perf_counter()
        with run.working("Installing the shims"), installed("all") as shims:
            seconds = Quantity(time.perf_counter() - start, "s")
            run.record("installation", values={"seconds": seconds, "shims": Quantity(shims.count, "")})
            for subject, make in subjects.items():
                with run.working(str(subject)):
                    traces.run_traced(run, shims, subject, make, untraced[subject])
            with run.working("The catalogue under every mode"):
                agreement.record_agreement(run, shims, refused)
            with run.working("Overhead of the shims"):
                hop_cost.record_overhead(run, shims, operands, stock.quantity())
    with checks.show_dispatch_trace() as printed:  # torch starts in another process while this one single-steps
        with run.working("Below the backend key"):
            native_steps.record_native_steps(run)
        with run.working("What published notes on the dispatcher say"):
            checks.record_claims(run, printed())
