"""The main job: parity per dtype, throughput side by side, what XLA made of the step; several GPUs as its long part."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from benchkit import UserError
from benchkit.device import Device
from benchkit.processes import last_line
from benchkit.report import ReportSpec
from benchkit.results import Json
from benchkit.run import Lens, Run
from jax_baseline.diff import measurements as hlo_lens
from jax_baseline.report import findings
from jax_baseline.timing import measurements as training_lens
from jax_baseline.timing import scaling

_LOG = logging.getLogger(__name__)


def build_lens(root: Path) -> Lens:
    """Return the lens.

    Args:
        root: the subproject's folder.
    """
    report = ReportSpec("jax_baseline", findings.context, findings.figures, findings.finding)
    return Lens(
        "jax-baseline", root, configure, collect, report, lambda run, seconds: scaling.sweep(run, root, seconds)
    )


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Return what a run does on a device."""
    return {
        **training_lens.configure(device, quick),
        "hlo": hlo_lens.configure(device, quick),
        "sweep": scaling.configure(device, quick),
    }


def collect(run: Run) -> None:
    """Measure and keep everything; a part that fails is absent from the report, with the reason, and costs no other."""
    for name, measure in (*training_lens.sections(run), *hlo_lens.sections(run)):
        try:
            measure(run)
        except UserError:
            raise
        except Exception as error:  # compilers and drivers fail in many ways, and there is an hour's work beside it
            _LOG.exception("%s could not be measured", name)
            run.absent(name, f"measuring it failed: {last_line(str(error)).rstrip('.')}")
