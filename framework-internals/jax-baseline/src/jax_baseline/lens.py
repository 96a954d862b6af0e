"""The lens: parity with torch, throughput of both frameworks, and XLA's program of the step.

``--sweep`` adds measurements on several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchkit.device import Device
from benchkit.results import SMALLER, Json
from benchkit.run import Lens, Run, Step
from jax_baseline.diff import measurements as diff
from jax_baseline.parity import measurements as parity
from jax_baseline.report.sections import report
from jax_baseline.timing import measurements as timing
from jax_baseline.timing import scaling


def build_lens(root: Path) -> Lens:
    """The lens, as ``scripts/run.py`` and the index of reports use it; ``root`` is the subproject's folder."""
    return Lens("jax-baseline", root, configure, collect, report, lambda run: scaling.sweep(run, root), fit)


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Return the settings of a run."""
    return {
        **parity.configure(device, quick),
        **timing.configure(device, quick),
        "hlo": diff.configure(device, quick),
        "sweep": scaling.configure(device, quick),
    }


def fit(asked: Mapping[str, Json], device: Device, available: int) -> Mapping[str, Json]:
    """Return what is different in the settings where only so many bytes are free."""
    changes: dict[str, Json] = {}
    smaller: list[str] = []
    for part, fitting in (("bench", timing.fit), ("hlo", diff.fit)):
        if different := fitting(asked[part], device, available):
            smaller += different.pop(SMALLER)
            changes[part] = {**asked[part], **different}
    return {**changes, SMALLER: smaller} if smaller else {}


def collect(run: Run) -> None:
    """Measure and record every part, the most important first."""
    run.steps(Step(name, partial(measure, run)) for name, measure in parts(run))


def parts(run: Run) -> list[tuple[str, Callable[[Run], None]]]:
    """Return all measurements, the most important first, each with the name that the report uses if it is missing."""
    first, *more = parity.sections(run)
    return [
        first,
        ("Tokens per second", timing.record_engines),
        *more,
        ("Training to the end in both frameworks", parity.record_convergence),
        *diff.sections(run),
    ]
