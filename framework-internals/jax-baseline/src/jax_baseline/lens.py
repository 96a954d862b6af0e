"""The main job: parity per dtype, throughput side by side, and what XLA made of the step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchkit.device import Device
from benchkit.report import ReportSpec
from benchkit.results import Json
from benchkit.run import Lens, Run
from jax_baseline import findings, hlo_lens, training_lens


def build_lens(root: Path) -> Lens:
    """Return the lens.

    Args:
        root: the subproject's folder.
    """
    report = ReportSpec("jax_baseline", findings.context, findings.figures, findings.finding)
    return Lens("jax-baseline", root, configure, collect, report)


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Return what a run does on a device."""
    return {**training_lens.configure(device, quick), "hlo": hlo_lens.configure(device, quick)}


def collect(run: Run) -> None:
    """Measure and keep everything."""
    training_lens.collect(run)
    hlo_lens.collect(run)
