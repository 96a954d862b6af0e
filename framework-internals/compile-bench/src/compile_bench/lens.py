"""The main job: the baseline GPT in full, shapes, counts held against PyTorch's own; and what a sweep covers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from benchkit import UserError
from benchkit.device import Device
from benchkit.processes import ChildFailure
from benchkit.results import Json, Record
from benchkit.run import Lens, Run
from compile_bench.measure.harness import Harness
from compile_bench.measure.measurements import FirstSteps
from compile_bench.measure.serialize import agreement_record, bench_records, eager_record, plural, shape_record
from compile_bench.measure.shapes import Strategy
from compile_bench.report.sections import REPORT
from compile_bench.sweep.run import MEMORY, sweep
from compile_bench.targets.case import MODES, Case, Mode
from compile_bench.triage.job import collect_triage, configure_triage

# What a sweep that is cut short has first. Mamba, whose scan in Python is unrolled, takes minutes to compile: begun
# last, it would go on alone when all others are done.
SWEEP_GROUPS = (
    ("gpt", "gpt2", "llama", "resnet", "bert", "vit", "mamba"),
    ("mlp", "qwen3", "qwen3-moe", "t5", "longformer", "wav2vec2"),
)

# Passes through a schedule of shapes that the strategies are ranked for.
SHAPE_PASSES = (1, 100, 10_000)

Work = tuple[str, Callable[[], list[Record]]]


def build_lens(root: Path) -> Lens:
    """The lens, as ``scripts/run.py`` and the index of reports use it.

    Args:
        root: the folder of the subproject.
    """
    return Lens(
        "compile-bench",
        root,
        configure,
        lambda run: collect(run, root),
        REPORT,
        lambda run, seconds: sweep(run, root.parents[1], seconds),
    )


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """What is measured, the seconds after the start at which no more of a part is begun, and those of the end.

    ``cases`` come first, ``more cases`` last, with what time is left. ``sweep`` is no part of the main job.
    """
    return {**configure_triage(device, quick), **_sizes(device, quick)}


def _sizes(device: Device, quick: bool) -> dict[str, Json]:
    if quick:
        return {
            "cases": [_case("mlp", train=False)],
            "more cases": [],
            "sweep": _sweep(device, [["mlp"]], 1, 300.0, 0.3, modes=MODES[:2]),
            "shapes": [],
            "agreement": {"targets": [], "kinds": [], "side_by_side": 1},
            "steady_seconds": 0.5,
            "until_seconds": {"cases": 20.0},
            "end_seconds": 120.0,
            "limit_seconds": 120.0,
        }
    if device == "cpu":
        return {
            "cases": [_case("gpt", warm=True, mega=True), _case("mlp", train=False)],
            "more cases": [
                _case("gpt", train=False),
                _case("mlp", train=False, mode="max-autotune"),
                _case("gpt", train=False, scope="blocks"),
            ],
            "sweep": _sweep(device, SWEEP_GROUPS, 1, 600.0, 1.0),
            "shapes": [_shape("mlp", "last-batch", ("eager", "automatic", "mark_dynamic", "padding"))],
            "agreement": {
                "targets": ["gpt", "gpt2", "wav2vec2", "longformer"],
                "kinds": ["training"],
                "side_by_side": 2,
            },
            "steady_seconds": 3.0,
            "until_seconds": {"cases": 120.0, "shapes": 165.0, "agreement": 182.0, "more cases": 172.0},
            "end_seconds": 200.0,
            "limit_seconds": 150.0,
        }
    return {
        "cases": [_case("gpt", warm=True, mega=True)],
        "more cases": [_case("gpt", scope="blocks")],
        "sweep": _sweep(device, SWEEP_GROUPS, 20, 800.0, 0.5),
        "shapes": [_shape("gpt2", "growing-sequence", ("eager", "automatic", "mark_dynamic", "padding"))],
        "agreement": {"targets": list(chain(*SWEEP_GROUPS)), "kinds": ["training"], "side_by_side": 13},
        "steady_seconds": 3.0,
        "until_seconds": {"cases": 150.0, "shapes": 300.0, "agreement": 400.0, "more cases": 480.0},
        "end_seconds": 560.0,
        "limit_seconds": 200.0,
    }


def _sweep(
    device: Device,
    groups: Sequence[Sequence[str]],
    side_by_side: int,
    limit_seconds: float,
    steady_seconds: float,
    modes: Sequence[Mode] = MODES,
) -> Json:
    """Of the part that ``run.py --sweep`` measures, a process for a cell."""
    return {
        "device": device,
        "groups": [list(group) for group in groups],
        "kinds": ["training", "inference"],
        "modes": list(modes),
        "side_by_side": side_by_side,
        # More than there are cores: most processes are at work in Python, and one waits long for its kernels. On a CPU
        # one at a time: sampling right after others compiled, a cell would find the machine busy.
        "compile_threads": 4 if side_by_side > 1 else None,
        "limit_seconds": limit_seconds,
        "steady_seconds": steady_seconds,
    }


def _shape(target: str, schedule: str, strategies: Sequence[Strategy]) -> Json:
    return {"target": target, "train": False, "schedule": schedule, "strategies": list(strategies)}


def _case(
    target: str,
    *,
    train: bool = True,
    mode: str = "default",
    scope: str = "whole",
    warm: bool = False,
    mega: bool = False,
) -> Json:
    return {"target": target, "train": train, "mode": mode, "scope": scope, "warm": warm, "mega": mega}


def collect(run: Run, root: Path) -> None:
    """Measure what the configuration names; what fails leaves the rest standing, what is measured is kept at once."""
    repository = root.parents[1]
    with Harness.open(run.device, limit=run.configuration["limit_seconds"]) as harness:
        measuring = _Measuring(run, harness, repository)
        run.record("toolchain", data={"seconds": harness.toolchain_seconds(), "forked": True})
        measuring.cases("cases")
        # A report needs a case, however slow the machine; from here on time is what it is.
        harness.deadline = measuring.start + run.configuration["end_seconds"]
        collect_triage(run, harness, repository)
        measuring.shapes()
        measuring.agreement()
        measuring.cases("more cases")


class _Measuring:
    """The parts of the main job, over one harness."""

    def __init__(self, run: Run, harness: Harness, repository: Path) -> None:
        self.run = run
        self.harness = harness
        self.repository = repository
        self.start = time.monotonic()
        self.eager: dict[tuple[str, bool], FirstSteps] = {}

    def cases(self, part: str) -> None:
        """The cases that are measured alone on the machine."""
        work: list[Work] = []
        for entry in self.run.configuration[part]:
            case = Case(entry["target"], self.run.device, entry["train"], entry["mode"], None, entry["scope"])
            work.append((_name(case), partial(self._alone, case, entry)))
        self._keep(part, work, 1)

    def _alone(self, case: Case, entry: Mapping[str, Any]) -> list[Record]:
        eager = self._eager(case)
        bench = self.harness.bench(
            case,
            eager=eager,
            steady_seconds=self.run.configuration["steady_seconds"],
            warm=entry["warm"],
            mega=entry["mega"],
        )
        return [eager_record(case, eager), *bench_records(bench, self.repository)]

    def _eager(self, case: Case) -> FirstSteps:
        """The first eager steps: the same for every mode, so they are measured once."""
        key = (case.target, case.train)
        if key not in self.eager:
            self.eager[key] = self.harness.eager(case)
        return self.eager[key]

    def shapes(self) -> None:
        """Schedules of shapes."""
        work: list[Work] = []
        for entry in self.run.configuration["shapes"]:
            case = Case(entry["target"], self.run.device, entry["train"])
            work.append((f"shapes of {_name(case)}", partial(self._shape, case, entry)))
        self._keep("shapes", work, 1)

    def _shape(self, case: Case, entry: Mapping[str, Any]) -> list[Record]:
        study = self.harness.shapes(case, schedule=entry["schedule"], seconds=1.0, strategies=entry["strategies"])
        return [shape_record(study, SHAPE_PASSES, self.repository)]

    def agreement(self) -> None:
        """Counts against PyTorch's own; nothing is timed."""
        wanted = self.run.configuration["agreement"]
        work: list[Work] = []
        for kind in wanted["kinds"]:
            for target in wanted["targets"]:
                case = Case(target, self.run.device, kind == "training")
                work.append((f"counts of {_name(case)}", partial(self._count, case)))
        self._keep("agreement", work, wanted["side_by_side"])

    def _count(self, case: Case) -> list[Record]:
        from compile_bench.measure.agreement_worker import agreement

        return [agreement_record(self.harness.trace(agreement, case), self.repository)]

    def _keep(self, part: str, work: Sequence[Work], side_by_side: int) -> None:
        """Do work, keep its records as they come, and say what failed or had no time left.

        What found no memory beside others is done once more when it is alone.
        """
        late: list[str] = []
        crowded: list[Work] = []
        actions = dict(work)
        for what, records in self._done(part, work, side_by_side):
            if records is None:
                late.append(what)
            elif side_by_side > 1 and isinstance(records, Exception) and MEMORY.search(str(records)):
                crowded.append((what, actions[what]))
            elif isinstance(records, Exception):
                self.run.absent(what, str(records))
            else:
                self.run.add_all(record for record in records if not self._is_known(record))
        if late:
            seconds = self.run.configuration["until_seconds"][part]
            names = "; ".join(late) if len(late) < 4 else f"{'; '.join(late[:3])}; {plural(len(late) - 3, 'other')}"
            self.run.absent(names, f"left out for time: of {part} no more is begun {seconds:.0f} s after the start")
        if crowded:
            self._keep(part, crowded, 1)

    def _too_late(self, part: str) -> bool:
        if part == "cases" and not self.run.recorder.results.select("verdict"):
            return False  # a report needs one case, however slow the machine
        return time.monotonic() > self.start + self.run.configuration["until_seconds"][part]

    def _is_known(self, record: Record) -> bool:
        """Whether it holds the first eager steps of a model that is there already."""
        known = self.run.recorder.results.select("first steps", mode="eager")
        return any(other.labels == record.labels for other in known)

    def _done(
        self, part: str, work: Sequence[Work], side_by_side: int
    ) -> Iterator[tuple[str, list[Record] | Exception | None]]:
        """Results in the order they come; None for work whose turn came too late."""
        waiting = list(work)
        running: dict[Future[list[Record]], str] = {}
        with ThreadPoolExecutor(side_by_side) as pool:
            try:
                while waiting or running:
                    free = side_by_side - len(running)
                    begun, waiting = waiting[:free], waiting[free:]
                    for what, action in begun:
                        if self._too_late(part):
                            yield what, None
                        else:
                            running[pool.submit(action)] = what
                    if not running:
                        continue
                    with self.run.working(", ".join(running.values())):
                        done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield running.pop(future), _result(future)
            except BaseException:
                self.harness.stop()  # the threads of the pool wait for these processes
                raise


def _result(future: Future[list[Record]]) -> list[Record] | Exception:
    try:
        return future.result()
    except (ChildFailure, UserError) as error:
        return error


def _name(case: Case) -> str:
    scope = "" if case.scope == "whole" else f", {case.scope}"
    return f"{case.target} {case.kind}, mode {case.mode}{scope}"
