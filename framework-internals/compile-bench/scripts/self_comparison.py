"""How often does a step differ from itself by the verdict's rule? Exit status 1 if in more than 5 % of the runs.

python scripts/self_comparison.py --runs 200
"""

from typing import Annotated

import typer

from benchkit import numbers
from benchkit.command.finite import seconds_option
from benchkit.command.progress import working
from benchkit.device import resolve_device
from compile_bench import Case, Harness
from compile_bench.measure.steps import self_comparison
from compile_bench.measure.verdict import BUSY, difference

ALLOWED = 0.05


def main(
    target: Annotated[str, typer.Option(help="A name of the zoo, or file.py:function.")] = "mlp",
    runs: Annotated[int, typer.Option(min=1, help="Number of comparisons.")] = 100,
    seconds: Annotated[float, seconds_option(help="Seconds of sampling for each comparison.")] = 1.0,
    train: Annotated[bool, typer.Option("--train/--infer", help="A training step, or a forward pass.")] = True,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    case = Case(target, resolve_device(device), train)
    limit = 120.0 + 4 * runs * max(seconds, 1.0)
    with Harness.open(case.device, limit=limit) as harness, working(f"comparing {target} with itself"):
        found = harness.ask(self_comparison, case, runs=runs, seconds=seconds)
    different = sum(difference(steady.speedup, steady.control) != "none" for steady in found)
    bare = sum(not (steady.speedup.low or 0) <= 1 <= (steady.speedup.high or 0) for steady in found)
    busy = sum((steady.pressure or 0) > BUSY for steady in found)
    print(f"{target} {case.kind} on {case.device} against itself, {runs} comparisons of {seconds:g} s:")
    print(f"  no difference in {numbers.percent(1 - different / runs)}")
    print(f"  the interval alone covers 1 in {numbers.percent(1 - bare / runs)} (no control)")
    print(f"  on a machine that was busy in {numbers.percent(busy / runs)} of them")
    raise typer.Exit(int(different > ALLOWED * runs))


if __name__ == "__main__":
    typer.run(main)
