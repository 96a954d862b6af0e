"""The main job's part on triage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchkit import UserError
from benchkit.device import Device
from benchkit.processes import ChildFailure
from benchkit.results import Json
from benchkit.run import Run
from compile_bench.measure.harness import Harness
from compile_bench.measure.serialize import triage_record
from compile_bench.targets.case import Case
from compile_bench.triage.serialize import triage_report_records


def configure_triage(device: Device, quick: bool) -> Mapping[str, Json]:
    """The targets, and whether to triage them in full (break costs, fixes) or to count breaks alone."""
    return {"triage": ["planted"], "triage_in_full": not quick}


def collect_triage(run: Run, harness: Harness, repository: Path) -> None:
    """Triage the targets of the configuration; the failure of one does not affect the others."""
    for name in run.configuration["triage"]:
        case = Case(name, run.device, train=True)
        try:
            with run.working(f"triage of {name}"):
                if run.configuration["triage_in_full"]:
                    from compile_bench.triage.run import run_triage  # imports torch, which a report does not need

                    run.add_all(triage_report_records(run_triage(harness, case, root=repository), repository))
                else:
                    run.add(triage_record(harness.triage(case), repository))
        except (ChildFailure, UserError) as error:
            run.absent(f"the break table of {name}", str(error))
