"""A whole lens in one file, and a way to run it as a user would."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import warm_python

from benchkit.environment import capture

# What a subproject's package and its scripts/run.py are together.
LENS = """
import os, signal, sys, time
from pathlib import Path
from benchkit import Quantity
from benchkit.processes import budget
from benchkit.report.plotting import new_figure
from benchkit.report import Column, Figure, Report, Section, Table
from benchkit.run import Lens, main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without one


def collect(run):
    for n in run.configuration["sizes"]:
        if os.environ.get("INTERRUPT_AT") == str(n):
            os.kill(os.getpid(), signal.SIGINT)
        if os.environ.get("KILL_AT") == str(n):
            os.kill(os.getpid(), signal.SIGKILL)
        times = {"time": Quantity(n * 1e-3, "s", n * 0.9e-3, n * 1.1e-3, 9, "p20-p80")}
        run.record("time", {"n": n}, times, "x" * int(os.environ.get("BYTES_A_RECORD", 0)))
    if "WAIT_FOR" in os.environ:
        print("waiting", file=sys.stderr, flush=True)
        while not Path(os.environ["WAIT_FOR"]).exists():
            time.sleep(0.01)
    run.absent("the moon", "it is not up")

def sweep(run):
    known = {record.labels["n"] for record in run.recorder.results.records}
    for n in run.configuration["sweep"]:
        if n in known:
            continue
        if os.environ.get("KILL_AT") == str(n):
            os.kill(os.getpid(), signal.SIGKILL)
        if budget.left() < n:
            return
        run.record("time", {"n": n}, {"time": Quantity(n * 1e-3, "s")})

def draw(results):
    figure, axes = new_figure()
    axes.plot([r.labels["n"] for r in results.select("time")], [r["time"].value for r in results.select("time")])
    axes.set(xlabel="n", ylabel="time (s)")
    return figure


def report(results):
    times = results.select("time")
    finding = f"{len(times)} sizes were measured."
    table = Table(times, [Column("n", "n"), Column("time", "time")])
    times = Section("Times", [Figure("times", "Time over n.", lambda: draw(results), "A line"), table])
    return Report("A lens", finding, [], [times], ["How long?"], ["With a clock."], ["Everything else."])


LENS = Lens(
    "a-lens",
    Path(__file__).parent,
    lambda device, quick: {"sizes": [1] if quick else [1, 2], "sweep": [2, 3, 5000]},
    collect,
    report,
    None if os.environ.get("NO_SWEEP") else sweep,
)
if __name__ == "__main__":
    main(LENS)
"""


LIMITED = """
import resource, runpy, sys
_, size, *sys.argv = sys.argv
resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def lens(tmp_path):
    (tmp_path / "run.py").write_text(LENS)
    return tmp_path


@pytest.fixture
def own(lens: Path) -> Path:
    """Where a whole run of the lens on this machine's CPU writes."""
    return lens / "reports" / f"own-{capture('cpu', root=lens).machine}"


@pytest.fixture
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the lens in a folder to its end: arguments of its command line, and variables of the environment."""

    def run(
        lens: Path, *arguments: str, largest_file: int | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        limited = () if largest_file is None else ("-c", LIMITED, largest_file)
        return warm_python.run([*limited, lens / "run.py", *arguments], env={**os.environ, **environment})

    return run
