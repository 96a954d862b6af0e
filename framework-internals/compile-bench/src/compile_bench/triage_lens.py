"""The main job's part on breaks and recompilations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchkit import UserError
from benchkit.device import Device
from benchkit.results import Json
from benchkit.run import Run
from compile_bench.harness import Harness, WorkerFailure
from compile_bench.records import triage_record
from compile_bench.results import Case


def configure_triage(device: Device, quick: bool) -> Mapping[str, Json]:
    """What is traced: names of targets."""
    return {"triage": ["planted"]}


def collect_triage(run: Run, harness: Harness, repository: Path) -> None:
    """Trace the targets of the configuration; one that fails leaves the others standing."""
    for name in run.configuration["triage"]:
        case = Case(name, run.device, train=True)
        try:
            with run.working(f"tracing {name}"):
                run.add(triage_record(harness.triage(case), repository))
        except (WorkerFailure, UserError) as error:
            run.absent(f"the break table of {name}", str(error))
