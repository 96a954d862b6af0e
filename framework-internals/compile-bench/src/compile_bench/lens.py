"""The lens: what the main job measures, the main job itself, and what the sweep covers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchkit import UserError
from benchkit.device import Device
from benchkit.errors import lacks_memory, why_missing
from benchkit.processes import ChildFailure, budget, memory
from benchkit.results import SMALLER, Json, Record
from benchkit.run import Lens, Run
from compile_bench.capture.text import plural
from compile_bench.measure.harness import Harness
from compile_bench.measure.records import Bench, CountedBreaks, FirstSteps, Toolchain
from compile_bench.measure.shapes import Strategy
from compile_bench.report.sections import report
from compile_bench.sweep import sweep
from compile_bench.targets.case import MODES, Case, Mode

# The groups of models of a sweep. A sweep that is cut short has measured the first group. Mamba takes minutes to
# compile, since its scan is a loop in Python. If it began last, it would still run when all other models are done.
SWEEP_GROUPS = (
    ("gpt", "gpt2", "llama", "resnet", "bert", "vit", "mamba"),
    ("mlp", "qwen3", "qwen3-moe", "t5", "longformer", "wav2vec2"),
)

# Numbers of passes through a schedule of shapes that the strategies are ranked for.
SHAPE_PASSES = (1, 100, 10_000)

_SHAPE_STRATEGIES: tuple[Strategy, ...] = ("eager", "automatic", "mark_dynamic", "padding")

# What a training step on a GPU takes at most, with its check against float64; the largest model first.
_GPU_BYTES = {"gpt": 22 << 30, "gpt-one-layer": 12 << 30, "mlp": 2 << 30}

# A part of the main job: a name for the reader, and the function that measures it.
Work = tuple[str, Callable[[], list[Record]]]


def build_lens(root: Path) -> Lens:
    """The lens, as ``scripts/run.py`` and the index of reports use it."""
    return Lens(
        "compile-bench",
        root,
        configure,
        lambda run: collect(run, root),
        report,
        lambda run: sweep(run, root.parents[1]),
        fit,
    )


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """What is measured, and the time for it.

    ``cases`` are measured first, then triage and ``shapes``, and ``more cases`` last. No work of a part is begun later
    than its ``until_seconds`` after the start; at ``end_seconds`` whatever still runs is ended. ``sweep`` is what
    ``run.py --sweep`` measures.
    """
    full_sizes = _cpu_sizes() if device == "cpu" else _gpu_sizes()
    # Triage is done in full (break costs, fixes), or counts breaks alone.
    triage: dict[str, Json] = {"triage": ["planted"], "triage_in_full": not quick}
    return {**triage, **(_quick_sizes(device) if quick else full_sizes)}


def fit(asked: Mapping[str, Json], device: Device, available: int) -> Mapping[str, Json]:
    """Measure a smaller model in place of the GPT where that does not fit on a GPU."""
    chosen = memory.largest_that_fits(_GPU_BYTES, _GPU_BYTES.__getitem__, available)
    if device == "cpu" or chosen == "gpt" or not any(entry["target"] == "gpt" for entry in asked["cases"]):
        return {}
    parts = {
        part: [{**entry, "target": chosen} if entry["target"] == "gpt" else entry for entry in asked[part]]
        for part in ("cases", "more cases")
    }
    return {**parts, SMALLER: [f"the model is `{chosen}` instead of `gpt`, since {memory.gib(available)} were free"]}


def _quick_sizes(device: Device) -> dict[str, Json]:
    return {
        "cases": [_case("mlp", train=False)],
        "more cases": [],
        "sweep": _sweep(device, [["mlp"]], 1, 300.0, 0.3, modes=MODES[:2]),
        "shapes": [],
        "steady_seconds": 0.5,
        "until_seconds": {"cases": 20.0},
        "end_seconds": 120.0,
        "limit_seconds": 120.0,
    }


def _cpu_sizes() -> dict[str, Json]:
    return {
        "cases": [_case("gpt", warm=True, artifacts=True), _case("mlp", train=False)],
        "more cases": [
            _case("gpt", train=False),
            _case("mlp", train=False, mode="max-autotune"),
            _case("gpt", train=False, scope="blocks"),
        ],
        "sweep": _sweep("cpu", SWEEP_GROUPS, 1, 600.0, 1.0),
        "shapes": [_shape("mlp", "last-batch")],
        "steady_seconds": 3.0,
        "until_seconds": {"cases": 120.0, "shapes": 165.0, "more cases": 172.0},
        "end_seconds": 200.0,
        "limit_seconds": 150.0,
    }


def _gpu_sizes() -> dict[str, Json]:
    return {
        "cases": [_case("gpt", warm=True, artifacts=True)],
        "more cases": [_case("gpt", scope="blocks")],
        "sweep": _sweep("cuda", SWEEP_GROUPS, 20, 800.0, 0.5),
        "shapes": [_shape("gpt2", "growing-sequence")],
        "steady_seconds": 3.0,
        "until_seconds": {"cases": 150.0, "shapes": 300.0, "more cases": 480.0},
        "end_seconds": 560.0,
        "limit_seconds": 200.0,
    }


def _sweep(
    device: Device,
    groups: Sequence[Sequence[str]],
    processes: int,
    limit_seconds: float,
    steady_seconds: float,
    modes: Sequence[Mode] = MODES,
) -> Json:
    return {
        "device": device,
        "groups": [list(group) for group in groups],
        "kinds": ["training", "inference"],
        "modes": list(modes),
        "processes": processes,
        # On a GPU there are more threads than cores, since most processes are busy in Python while one waits long for
        # its kernels. On a CPU one process compiles at a time: otherwise a measured cell would find the machine busy.
        "compile_threads": 4 if processes > 1 else None,
        "limit_seconds": limit_seconds,
        "steady_seconds": steady_seconds,
    }


def _shape(target: str, schedule: str) -> Json:
    return {"target": target, "train": False, "schedule": schedule, "strategies": list(_SHAPE_STRATEGIES)}


def _case(
    target: str,
    *,
    train: bool = True,
    mode: str = "default",
    scope: str = "whole",
    warm: bool = False,
    artifacts: bool = False,
) -> Json:
    return {"target": target, "train": train, "mode": mode, "scope": scope, "warm": warm, "artifacts": artifacts}


def collect(run: Run, root: Path) -> None:
    """Measure what the configuration names. Each part is recorded at once; one that fails does not stop the others."""
    repository = root.parents[1]
    with Harness.open(run.device, limit=run.configuration["limit_seconds"]) as harness:
        job = _MainJob(run, harness, repository)
        run.add(Toolchain(harness.toolchain_seconds(), forked=True).record())
        job.measure_cases("cases")
        # A report needs a case, however slow the machine; the deadline holds for everything after it.
        harness.deadline = min(job.start + run.configuration["end_seconds"], time.monotonic() + budget.left())
        job.triage()
        job.measure_shapes()
        job.measure_cases("more cases")


class _MainJob:
    """The parts of the main job, over one harness."""

    def __init__(self, run: Run, harness: Harness, repository: Path) -> None:
        self.run = run
        self.harness = harness
        self.repository = repository
        self.start = time.monotonic()
        self.eager: dict[tuple[str, str], FirstSteps] = {}

    def measure_cases(self, part: str) -> None:
        """Measure the cases of a part, one at a time."""
        work: list[Work] = []
        for entry in self.run.configuration[part]:
            case = Case(entry["target"], self.run.device, entry["train"], entry["mode"], None, entry["scope"])
            work.append((_name(case), partial(self._case, case, entry)))
        self._measure(part, work)

    def _case(self, case: Case, entry: Mapping[str, Any]) -> list[Record]:
        model = (case.target, case.kind)
        if model not in self.eager:  # all modes share the first eager steps
            self.eager[model] = self.harness.eager(case)
        bench = self.harness.bench(
            case,
            eager=self.eager[model],
            steady_seconds=self.run.configuration["steady_seconds"],
            warm=entry["warm"],
            artifacts=entry["artifacts"],
        )
        return bench.records(self.repository, self.run.recorder.results)

    def measure_shapes(self) -> None:
        """Measure the schedules of shapes."""
        work: list[Work] = []
        for entry in self.run.configuration["shapes"]:
            case = Case(entry["target"], self.run.device, entry["train"])
            work.append((f"shapes of {_name(case)}", partial(self._shape, case, entry)))
        self._measure("shapes", work)

    def _shape(self, case: Case, entry: Mapping[str, Any]) -> list[Record]:
        study = self.harness.shapes(case, schedule=entry["schedule"], seconds=1.0, strategies=entry["strategies"])
        return [study.ranked(SHAPE_PASSES, self.repository)]

    def triage(self) -> None:
        """Triage the targets of the configuration; the failure of one does not affect the others."""
        for name in self.run.configuration["triage"]:
            case = Case(name, self.run.device, train=True)
            try:
                with self.run.working(f"triage of {name}"):
                    if self.run.configuration["triage_in_full"]:
                        from compile_bench.triage.run import run_triage  # imports torch, which a report does not need

                        report = run_triage(self.harness, case, root=self.repository)
                        self.run.add_all(report.records(self.repository))
                    else:
                        counted = CountedBreaks.of_triage(self.harness.triage(case), self.repository)
                        self.run.add(counted.record())
            except (ChildFailure, UserError) as error:
                self.run.absent(f"the break table of {name}", str(error))

    def _measure(self, part: str, work: Sequence[Work]) -> None:
        """Do the work of a part and record it. Note what failed, and for what no time was left."""
        late: list[str] = []
        for what, action in work:
            if self._too_late(part):
                late.append(what)
                continue
            try:
                with self.run.working(what):
                    records = action()
            except (ChildFailure, UserError) as error:
                self.run.absent(what, why_missing(error) if lacks_memory(error) else str(error))
            else:
                self.run.add_all(records)
        if late:
            seconds = self.run.configuration["until_seconds"][part]
            names = "; ".join(late) if len(late) < 4 else f"{'; '.join(late[:3])}; {plural(len(late) - 3, 'other')}"
            spent = "no time was left; a run with a larger --budget measures them"
            began = f"left out for time: of {part} no more is begun {seconds:.0f} s after the start"
            self.run.absent(names, spent if budget.left() <= 0 else began)

    def _too_late(self, part: str) -> bool:
        if part == "cases" and not self.run.recorder.results.select(Bench.record_name):
            return False  # a report needs one case, however slow the machine
        return budget.left() <= 0 or time.monotonic() > self.start + self.run.configuration["until_seconds"][part]


def _name(case: Case) -> str:
    scope = "" if case.scope == "whole" else f", {case.scope}"
    return f"{case.target} {case.kind}, mode {case.mode}{scope}"
