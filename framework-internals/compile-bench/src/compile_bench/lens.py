"""The main job: the baseline GPT eager against compiled, and a model with planted breaks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from benchkit import UserError
from benchkit.device import Device
from benchkit.results import Json
from benchkit.run import Lens, Run
from compile_bench.harness import Harness, WorkerFailure
from compile_bench.records import bench_records, eager_record
from compile_bench.report import REPORT
from compile_bench.results import Case, FirstSteps
from compile_bench.triage_lens import collect_triage, configure_triage


def build_lens(root: Path) -> Lens:
    """The lens, as ``scripts/run.py`` and the index of reports use it.

    Args:
        root: the folder of the subproject.
    """
    return Lens("compile-bench", root, configure, lambda run: collect(run, root), REPORT)


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """What is measured: cases in order of importance, and the seconds after which no further case is begun."""
    if quick:
        cases: list[Json] = [_case("gpt-one-layer", train=False, warm=False)]
    elif device == "cpu":
        cases = [_case("gpt"), _case("gpt", train=False)]
    else:
        cases = [
            _case("gpt"),
            _case("gpt", train=False),
            _case("gpt", mode="reduce-overhead", warm=False),
            _case("gpt", mode="max-autotune", warm=False),
        ]
    return {
        **configure_triage(device, quick),
        "cases": cases,
        "steady_seconds": 2.0 if quick else (8.0 if device == "cpu" else 4.0),
        "begin_no_case_after_seconds": 40.0 if quick else (180.0 if device == "cpu" else 120.0),
        "limit_seconds": 120.0 if quick else 300.0,
    }


def _case(target: str, *, train: bool = True, mode: str = "default", warm: bool = True) -> Json:
    return {"target": target, "train": train, "mode": mode, "warm": warm}


def collect(run: Run, root: Path) -> None:
    """Measure the cases of the configuration; one that fails leaves the others standing."""
    configuration = run.configuration
    repository = root.parents[1]
    start = time.monotonic()
    eager: dict[tuple[str, bool], FirstSteps] = {}
    with Harness.open(run.device, limit=configuration["limit_seconds"]) as harness:
        collect_triage(run, harness, repository)
        for entry in configuration["cases"]:
            case = Case(entry["target"], run.device, entry["train"], entry["mode"])
            what = f"{case.target} {case.kind}, mode {case.mode}"
            if time.monotonic() - start > configuration["begin_no_case_after_seconds"]:
                run.absent(what, f"{configuration['begin_no_case_after_seconds']:.0f} s were over before its turn")
                continue
            try:
                with run.working(what):
                    key = (case.target, case.train)
                    if key not in eager:
                        eager[key] = harness.eager(case)
                        run.add(eager_record(case, eager[key]))
                    bench = harness.bench(
                        case, eager=eager[key], steady_seconds=configuration["steady_seconds"], warm=entry["warm"]
                    )
                for record in bench_records(bench, repository):
                    run.add(record)
            except (WorkerFailure, UserError) as error:
                run.absent(what, str(error))
        run.record("toolchain", data={"seconds": harness.toolchain_seconds()})
