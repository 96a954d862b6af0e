"""The main job under what happens to it: killed, with a damaged note, without a compiler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_all

ROOT = Path(__file__).resolve().parents[2]

# The main job over six jobs of a few lines each, in a folder of its own.
RUN_ALL = """
import sys, typer
from pathlib import Path
import run_all
run_all.ROOT = Path(sys.argv.pop(1))
run_all.write_index = lambda **_: 0
run_all._first_builds = lambda report: 0.0
run_all._shares = lambda device, size: run_all.SHARES  # which asks torch whether this machine is tuned
typer.run(run_all.main)
"""

JOB = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.default_int_handler)  # as benchkit.run.main does

here, name = Path({house!r}), {name!r}
with (here / "begun").open("a") as file:
    print(name, os.getpid(), file=file)
try:
    while name == "compile-bench" and (here / "hold").exists():
        time.sleep(0.01)
except KeyboardInterrupt:
    time.sleep(0.3)  # it keeps what it measured
    print("interrupted", name, file=(here / "begun").open("a"))
    sys.exit(130)
(here / f"{{name}}.md").touch()
print(here / f"{{name}}.md")
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "BENCHKIT_COMMIT": "0123456789", "CUDA_VISIBLE_DEVICES": "", **more}


@pytest.fixture
def house(tmp_path):
    """Six jobs; the second waits as long as there is a file ``hold``."""
    for name, path in run_all.JOBS.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(JOB.format(house=str(tmp_path), name=name))
    (tmp_path / "hold").touch()
    return tmp_path


def start(house: Path, output: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN_ALL, str(house), "--device", "cpu"]
    return subprocess.Popen(command, text=True, env=environment(), stdout=output, stderr=output)


def begun(house: Path) -> list[str]:
    path = house / "begun"
    return path.read_text().splitlines() if path.exists() else []


def wait_for_the_second_job(house: Path) -> int:
    while not any(line.startswith("compile-bench") for line in begun(house)):
        time.sleep(0.02)
    return int(begun(house)[-1].split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a job that its run has ended")
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_killed_in_a_job_and_started_again_it_finishes_what_is_missing(how, house):
    killed = start(house, subprocess.DEVNULL)
    wait_for_the_second_job(house)
    killed.send_signal(how)
    killed.wait()
    (house / "hold").unlink()
    again = start(house, subprocess.PIPE)  # at once: the job of the first run is still ending
    out, errors = again.communicate()
    assert again.returncode == 0, errors
    assert "2/6 dispatcher-trace was finished by the previous run" in out
    assert "3/6 compile-bench on cpu" in out
    names = [line.split()[0] for line in begun(house)]
    assert names.count("dispatcher-trace") == 1
    assert names.index("interrupted") < len(names) - 1 - names[::-1].index("compile-bench")  # it ended, then began anew
    assert errors == ""


@pytest.mark.parametrize("damage", ["[]", '{"commit": "0123456789"}', '{"commit": "0123456789", "done": {"a": 1}}'])
def test_a_damaged_note_of_what_is_done_is_begun_anew(damage, house, monkeypatch):
    monkeypatch.setattr(run_all, "ROOT", house)
    monkeypatch.setenv("BENCHKIT_COMMIT", "0123456789")
    with run_all.only_run("cpu", run_all.Size()) as kept:
        kept.path.write_text(damage)
        kept.load(go_on=True)
        assert kept.done == {}


def test_a_lock_whose_holder_does_not_end_is_named(house, monkeypatch):
    monkeypatch.setattr(run_all, "ROOT", house)
    monkeypatch.setattr(run_all, "PATIENCE", 0.2)
    with run_all.only_run("cpu", run_all.Size()) as kept:
        os.pwrite(kept.lock, b"999999999", 0)  # no such process: a job of a run that was killed
        with pytest.raises(run_all.UserError, match="that was killed has not ended for 0 s, and would write"):
            run_all.only_run("cpu", run_all.Size()).__enter__()


def run_job(job: str, out: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / run_all.JOBS[job]), "--quick", "--device", "cpu", "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(**variables),
    )


# The compiler that every build here, torch's own too, is told to take.
NO_COMPILER = {"CXX": "no-such-compiler", "CUDA_HOME": "/nowhere"}
SAYS = "no C++ compiler 'no-such-compiler' on PATH (install one: apt-get install g++, or set CXX)"


@pytest.mark.parametrize("job", ["compile-bench", pytest.param("custom-ops", marks=pytest.mark.slow)])
def test_a_lens_that_is_nothing_without_a_compiler_says_so_in_one_line(job, tmp_path):
    failed = run_job(job, tmp_path, **NO_COMPILER, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert failed.returncode == 2, failed.stderr
    assert failed.stderr.startswith(f"{job}: ")
    assert SAYS in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1


# What a quick run on a CPU takes no C++ compiler for: it compiles with XLA alone.
NEEDS_NO_COMPILER = {"jax-baseline"}


@pytest.mark.slow
@pytest.mark.parametrize("job", ["dispatcher-trace", "jax-baseline", "rmsnorm-fused", "end-to-end"])
def test_the_others_are_measured_without_a_compiler_and_say_what_is_not(job, tmp_path):
    done = run_job(job, tmp_path / "out", **NO_COMPILER, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    absences = json.loads((tmp_path / "out" / "results.json").read_text())["absences"]
    assert any(SAYS in absence["why"] for absence in absences) == (job not in NEEDS_NO_COMPILER), absences
