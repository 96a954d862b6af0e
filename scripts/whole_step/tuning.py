"""Chooses the lowerings of the step on this machine, where no row says yet which are faster here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchkit import Record
from benchkit.device import Device
from benchkit.environment import capture
from benchkit.processes import budget
from benchkit.run import Run
from compile_bench.measure.harness import Harness
from compile_bench.measure.lowerings.greedy import measure_lowerings
from compile_bench.targets.case import Case
from lowering import added_table
from lowering.rows import rows_here

TARGETS: Mapping[Device, str] = {"cpu": "whole_step.targets:tiny", "cuda": "whole_step.targets:gpt2_124m"}

# The step's operators with two lowerings, and the packages of their kernels.
_SOURCES = {
    "rms_norm": "rmsnorm_fused",
    "rms_norm_add": "rmsnorm_fused",
    **dict.fromkeys(("bias_gelu", "flash_attention", "linear", "rotary"), "custom_ops"),
}

# Time of the samples of each variant: the shortest, and the longest. Between them it is a part of the budget.
_SECONDS, _MOST_SECONDS = 5.0, 20.0
_PART_OF_BUDGET = 0.01
_LIMIT = 300.0


def tuned(device: Device) -> bool:
    """Whether any row, committed or of this machine, is for an operator of the step."""
    return any(rows_here(operator, source, device, added_table()) for operator, source in _SOURCES.items())


def tune(run: Run) -> Iterator[Record]:
    """Measure the kernel of each operator in the whole step, and keep the rows for this machine.

    Operators for which the time is too short get no row. A record ``tuning`` has the lowering that is taken, the speed
    of the step with the kernel, the kernels tried together with it, and the speed of the plain step over itself.
    """
    device = run.device
    seconds = min(max(_SECONDS, _PART_OF_BUDGET * budget.left()), _MOST_SECONDS)
    with Harness.open(device, limit=_LIMIT) as harness:
        study = measure_lowerings(harness, Case(TARGETS[device], device), seconds=seconds)
    study.keep(capture(device, root=Path(__file__).parent))
    if study.undecided:
        run.absent(
            f"The lowering of {', '.join(study.undecided)} on this machine", "the choice of the others took its time"
        )
    if study.interrupted:
        raise KeyboardInterrupt
    for operator, trial in study.decisive.items():
        values = {"control": trial.control} | ({"speedup": trial.speedup} if trial.speedup is not None else {})
        data = {"choice": trial.choice, "why": trial.why, "together": list(trial.together)}
        yield Record("tuning", {"operator": operator}, values, data)
