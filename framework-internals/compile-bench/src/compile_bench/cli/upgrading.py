"""The command ``upgrade``: the same targets under two installations of torch."""

from __future__ import annotations

from typing import Annotated

import typer

from benchkit import numbers
from benchkit.command.progress import working
from benchkit.report import markdown_table
from compile_bench.check.upgrade import Side, Upgrade, measure_upgrade
from compile_bench.cli import options
from compile_bench.cli.options import OVER_BUDGET, case_of
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
) -> int:
    """Compare targets under two torch installations. Exit status: 0, or 1 if something is worse under the second.

    Each side runs its own torch in processes of its own; compile-bench itself need not be installed there.
    """
    worse = False
    for case in [case_of(target, train, mode, dynamic, device) for target in targets]:
        with working(f"measuring {case.target} three times"):
            comparison = measure_upgrade(before, after, case, seconds=seconds, limit=limit)
        print(describe_upgrade(comparison) + "\n", flush=True)
        worse = worse or bool(comparison.worse)
    return OVER_BUDGET if worse else 0


def describe_upgrade(comparison: Upgrade) -> str:
    """Both sides as a Markdown table, and what is worse under the second."""
    one, other = comparison.before, comparison.after
    rows = [
        ("Python", one.python, other.python, ""),
        ("graphs", numbers.count(one.graphs), numbers.count(other.graphs), ""),
        ("lines with a graph break", numbers.count(one.breaks), numbers.count(other.breaks), ""),
        ("recompilations", numbers.count(one.recompiles), numbers.count(other.recompiles), ""),
        (
            "compile cost, empty caches",
            *(_figure(side.compile_seconds, "s") for side in (one, other)),
            "one sample each",
        ),
    ]
    if comparison.step_before is not None and comparison.step_after is not None and comparison.speedup is not None:
        assert comparison.control is not None
        ratios = f"{numbers.quantity(comparison.speedup)}, control {numbers.quantity(comparison.control)}"
        claim = f"{_CLAIMS[comparison.step_difference]}: {ratios}"
        rows.append(("step", numbers.quantity(comparison.step_before), numbers.quantity(comparison.step_after), claim))
    rows += [
        ("peak memory, compiled", *(_figure(side.compiled_bytes, "B") for side in (one, other)), ""),
        ("peak memory, eager", *(_figure(side.eager_bytes, "B") for side in (one, other)), ""),
        ("error against float64", *(_error(side) for side in (one, other)), ""),
    ]
    header = [f"{comparison.case.target}, {comparison.case.kind}", f"torch {one.torch}", f"torch {other.torch}", ""]
    worse = comparison.worse
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
