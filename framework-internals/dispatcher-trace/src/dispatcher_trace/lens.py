"""The lens: what ``scripts/run.py`` configures, measures and reports."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchkit import Quantity, measure
from benchkit.device import Device
from benchkit.processes import budget
from benchkit.run import Lens, Run, Step
from dispatcher_trace.capture import dispatcher
from dispatcher_trace.capture.shims import installed
from dispatcher_trace.measure import agreement, checks, hop_cost, native_steps, traces
from dispatcher_trace.measure.cases import Case
from dispatcher_trace.report import sections
from native_build.toolchain import missing_cxx

# Time for the traces once the shims are installed, however little is left: nearly all take a tenth of a second.
_TRACES_SECONDS = 5.0

# Measurements that begin without shims and end with them, as readers of the report know them.
_CATALOGUE, _OVERHEAD = "the catalogue", "what the shims cost"


def build_lens(root: Path) -> Lens:
    """The lens, for ``scripts/run.py`` and the root scripts.

    Args:
        root: The package's folder.
    """
    return Lens("dispatcher-trace", root, configure, partial(collect, root=root), sections.report)


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
    """Measure everything and record it, the most important first: traces, the catalogue, costs, checks.

    What a trace is compared with has to be measured before the shims are installed. It takes at most half of the time,
    so that on a slow machine the traces that the report begins with are there, and the later ones are missing.

    Args:
        run: Where the records go.
        root: The package's folder.
    """
    no_compiler = missing_cxx()
    if no_compiler:
        run.absent("The compiled call", no_compiler)
    subjects = traces.subjects(run, root, compile=no_compiler is None)
    operands = [torch.ones(hop_cost.SIZE, device=run.device) for _ in range(2)]
    untraced = _Untraced()
    with budget.within(budget.left() / 2):
        run.steps(untraced.steps(run, subjects, operands))
    tables = dispatcher.dumps()
    start = time.perf_counter()
    with run.working("Installing the shims"), installed("all") as shims:
        seconds = Quantity(time.perf_counter() - start, "s")
        run.record("installation", values={"seconds": seconds, "shims": Quantity(shims.count, "")})
        traced = partial(traces.run_traced, run, shims)
        with budget.at_least(_TRACES_SECONDS):
            run.steps(
                Step(_trace_of(subject), partial(traced, subject, subjects[subject], before))
                for subject, before in untraced.subjects.items()
            )
        # What needs a measurement that ended early is left out with it.
        catalogue = partial(agreement.record_agreement, run, shims)
        run.steps(Step(_CATALOGUE, partial(catalogue, refused)) for refused in untraced.refused)
        overhead = partial(hop_cost.record_overhead, run, shims, operands)
        run.steps(Step(_OVERHEAD, partial(overhead, addition)) for addition in untraced.addition)
    with checks.show_dispatch_trace() as printed:  # torch starts in another process while this one single-steps
        run.steps(
            [
                Step("what a hop costs", partial(hop_cost.record_hop_costs, run)),
                Step("below the backend key", partial(native_steps.record_native_steps, run)),
                Step("what published notes say", lambda: checks.record_claims(run, printed())),
                Step("whether the tables are restored", partial(checks.record_restored, run, tables)),
            ]
        )


@dataclass
class _Untraced:
    """What is measured before the shims are installed.

    Attributes:
        subjects: Results and profile of each subject.
        refused: What torch itself refuses of the catalogue: one entry, or none if it was not measured.
        addition: The time of an addition, likewise.
    """

    subjects: dict[Case | str, traces.Untraced] = field(default_factory=dict)
    refused: list[dict[tuple[str, str], str]] = field(default_factory=list)
    addition: list[Quantity] = field(default_factory=list)

    def steps(self, run: Run, subjects: traces.Subjects, operands: list[torch.Tensor]) -> list[Step]:
        """The measurements, in order of importance; those that compile come last."""

        def run_subject(subject: Case | str) -> None:
            self.subjects[subject] = traces.run_untraced(subjects[subject])

        def find_refused() -> None:
            self.refused.append(agreement.refused(run.device, agreement.entries(run)))

        def time_addition() -> None:
            seconds = run.configuration["seconds"] / 3
            self.addition.append(measure(lambda: torch.add(*operands), seconds=seconds, clock="wall-clock").quantity())

        steps = [Step(_trace_of(subject), partial(run_subject, subject), _needs(subject)) for subject in subjects]
        steps += [Step(_CATALOGUE, find_refused), Step(_OVERHEAD, time_addition)]
        return sorted(steps, key=lambda step: step.needs)


def _trace_of(subject: Case | str) -> str:
    return f"the trace of {subject}"


def _needs(subject: Case | str) -> float:
    """Seconds that a subject takes at least: compilation does."""
    return 4.0 if isinstance(subject, Case) and subject.mode == "compile" else 0.0
