"""The command ``tune``. What imports torch is imported when the command runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchkit import Quantity, numbers
from benchkit.environment import capture
from benchkit.report import markdown_table
from benchkit.results import require_writable
from compile_bench.capture.text import plural
from compile_bench.cli import options
from compile_bench.cli.options import INTERRUPTED, case_of, ended_as_by_ctrl_c, tell
from compile_bench.measure.harness import DEFAULT_LIMIT, Harness

if TYPE_CHECKING:
    from compile_bench.measure.lowerings.greedy import LoweringStudy, Trial

TableFile = Annotated[
    Path | None,
    typer.Option(help="File for the rows, to be committed or loaded; the default is this machine's cache."),
]
Budget = Annotated[
    str | None,
    typer.Option(help="Time for everything, such as 5m; kernels for which none is left are named and get no row."),
]


def tune(
    target: options.TargetName,
    train: options.Train = True,
    mode: options.Mode = "default",
    dynamic: options.Dynamic = None,
    scope: options.ScopeName = "whole",
    device: options.DeviceName = "auto",
    table: TableFile = None,
    limit: options.Limit = DEFAULT_LIMIT,
    seconds: options.Seconds = 10.0,
    budget: Budget = None,
) -> int:
    """Choose between formula and kernel for every operator that has both, in the whole compiled step.

    What was measured is used on this machine from then on, without being named.
    """
    from benchkit.processes.budget import within
    from benchkit.run import parse_duration
    from compile_bench.measure.lowerings.greedy import measure_lowerings
    from lowering import read_table, tuned

    case = case_of(target, train, mode, dynamic, device, scope)
    allowed = math.inf if budget is None else parse_duration(budget)
    require_writable(table or tuned.rows_folder() / "rows")  # before a measurement that would be lost
    if table is not None and table.exists():
        read_table(table)
    try:
        with within(allowed), Harness.open(case.device, limit=limit) as harness, ended_as_by_ctrl_c():
            study = measure_lowerings(harness, case, seconds=seconds, tell=tell)
    except KeyboardInterrupt:  # before the first comparison; a later one ends the study
        tell(
            "interrupted before the first comparison: no row of this run is kept, those of earlier runs stay; the same "
            "command starts anew, and with --budget 5m it ends by itself and keeps what it timed"
        )
        return INTERRUPTED
    print("\n" + describe_study(study))
    print(_keep(study, table))
    return INTERRUPTED if study.interrupted else 0


def _keep(study: LoweringStudy, table: Path | None) -> str:
    """Keep the rows in the table, or for this machine, and say where they are and how they are used."""
    from lowering import mode, write_table

    environment = capture(study.case.device, root=Path(__file__).parent)
    if table is not None:
        rows = study.rows(environment)
        write_table(table, rows)
        return f"{plural(len(rows), 'row')} in {table}; to use them: lowering.load_table({str(table)!r})"
    kept = plural(study.keep(environment), "row")
    if mode() == "off":
        return f"{kept} kept for this machine; torch.compile takes none of them while LOWERING=off is set, as here"
    return (
        f"{kept} kept for this machine, which torch.compile takes from now on; LOWERING=off takes none of them, "
        "--table FILE writes rows to give away"
    )


def describe_study(study: LoweringStudy) -> str:
    """What each operator's kernel brought, and the whole step before and after."""
    taken = [name for name, trial in study.decisive.items() if trial.choice == "kernel"]
    undecided = f"; undecided, no row: {', '.join(study.undecided)}" if study.undecided else ""
    lines = [
        f"{study.case.target}, {study.case.kind}: "
        f"{plural(len(study.decisive) + len(study.undecided), 'operator')} with two lowerings; "
        f"kernel: {', '.join(taken) or 'none'}{undecided}; formula: the rest",
        "",
        markdown_table(
            ["kernel of", "beside", "taken", "step without it / with it", "control", "step with it"],
            [_row(trial) for trial in study.trials],
            left=3,
        ),
        "",
        *(f"{trial.operator}: {trial.why}" for trial in study.trials if trial.why),
        f"step: {numbers.quantity(study.plain)} with every formula",
    ]
    if taken:
        lines.append(
            f"step: {numbers.quantity(study.chosen)} with the choice: {numbers.quantity(study.gain)} as fast; "
            f"the plain step against itself: {numbers.quantity(study.control)}"
        )
    return "\n".join(lines)


def _row(trial: Trial) -> tuple[str, ...]:
    return (
        trial.operator,
        ", ".join(trial.beside) or "–",
        trial.choice,
        _or_failed(trial.speedup),
        numbers.quantity(trial.control),
        _or_failed(trial.step),
    )


def _or_failed(figure: Quantity | None) -> str:
    return "failed" if figure is None else numbers.quantity(figure)
