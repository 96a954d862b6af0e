"""The command ``upgrade``: the same targets under two installations of torch."""

from __future__ import annotations

from typing import Annotated

import typer

from benchkit import numbers
from benchkit.command.progress import working
from benchkit.report import markdown_table
from compile_bench.check.upgrade import Side, Upgrade, measure_upgrade
from compile_bench.cli import options
from compile_bench.cli.options import OVER_BUDGET, case_of, leave
from compile_bench.measure.harness import DEFAULT_LIMIT

Before = Annotated[str, typer.Argument(help="Python executable with the torch in use, such as .venv/bin/python.")]
After = Annotated[str, typer.Argument(help="Python executable with the other torch.")]

_CLAIMS = {"none": "no difference", "faster": "faster", "slower": "slower"}


def upgrade(
    before: Before,
    after: After,
    targets: options.TargetNames,
    train: options.Train = True,
    mode: options.Mode = "default",
    dynamic: options.Dynamic = None,
    device: options.DeviceName = "auto",
    limit: options.Limit = DEFAULT_LIMIT,
    seconds: options.Seconds = 10.0,
) -> None:
    """Compare targets under two torch installations. Exit status: 0, or 1 if something is worse under the second.

    Each side runs its own torch in processes of its own; compile-bench itself need not be installed there.
    """

    def compare() -> int:
        worse = False
        for case in [case_of(target, train, mode, dynamic, device) for target in targets]:
            with working(f"measuring {case.target} three times"):
                found = measure_upgrade(before, after, case, seconds=seconds, limit=limit)
            print(describe_upgrade(found) + "\n", flush=True)
            worse = worse or bool(found.worse)
        return OVER_BUDGET if worse else 0

    leave(compare)


def describe_upgrade(found: Upgrade) -> str:
    """Both sides as a Markdown table, and what is worse under the second."""
    one, other = found.before, found.after
    rows = [
        ("Python", one.python, other.python, ""),
        ("graphs", numbers.count(one.graphs), numbers.count(other.graphs), ""),
        ("lines with a graph break", numbers.count(one.breaks), numbers.count(other.breaks), ""),
        ("recompilations", numbers.count(one.recompiles), numbers.count(other.recompiles), ""),
        (
            "compile cost, empty caches",
            *(_figure(each.compile_seconds, "s") for each in (one, other)),
            "one sample each",
        ),
    ]
    if found.step_before is not None and found.step_after is not None and found.speedup is not None:
        assert found.control is not None
        ratios = f"{numbers.quantity(found.speedup)}, control {numbers.quantity(found.control)}"
        claim = f"{_CLAIMS[found.step_difference]}: {ratios}"
        rows.append(("step", numbers.quantity(found.step_before), numbers.quantity(found.step_after), claim))
    rows += [
        ("peak memory, compiled", *(_figure(each.compiled_bytes, "B") for each in (one, other)), ""),
        ("peak memory, eager", *(_figure(each.eager_bytes, "B") for each in (one, other)), ""),
        ("error against float64", *(_error(each) for each in (one, other)), ""),
    ]
    header = [f"{found.case.target}, {found.case.kind}", f"torch {one.torch}", f"torch {other.torch}", ""]
    worse = found.worse
    lines = [markdown_table(header, rows, left=4), ""]
    lines += [f"worse: {line}" if not line.startswith(" ") else line for line in worse]
    return "\n".join([*lines, "" if worse else "nothing is worse"]).rstrip()


def _figure(value: float | None, unit: str) -> str:
    return "not measured" if value is None else numbers.with_unit(value, unit)


def _error(side: Side) -> str:
    if side.not_compared:
        return side.not_compared
    if side.error is None or side.error_bound is None:
        return "not measured"
    return f"{numbers.error_size(side.error)}, bound {numbers.error_size(side.error_bound)}"
