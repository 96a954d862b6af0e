"""What a machine can refuse a run: one clear line each, no traceback, and what was measured is kept."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from benchkit.command import one_line_errors
from benchkit.errors import first_line, machine_fault
from benchkit.results import load


def started(lens: Path, stdout: int | IO[str] = subprocess.DEVNULL, **environment: str) -> subprocess.Popen[str]:
    """The lens in a process of its own, for what no fork shows or for a signal."""
    command = [sys.executable, lens / "run.py", "--device", "cpu"]
    return subprocess.Popen(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def one_line(failed: subprocess.CompletedProcess[str]) -> str:
    assert failed.returncode == 2, failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1, failed.stderr
    assert failed.stdout == ""
    return failed.stderr.strip()


def test_a_write_that_the_system_cuts_short_is_one_line_and_the_records_before_it_are_kept(lens, own, run):
    failed = run(lens, "--device", "cpu", largest_file=30_000, BYTES_A_RECORD="20000")
    assert "results.partial.json cannot be written: File too large; raise the limit" in one_line(failed)
    directory = own
    assert [path.name for path in directory.iterdir()] == ["results.partial.json"]
    assert len(load(directory / "results.partial.json").records) == 1


def test_a_figure_that_cannot_be_written_costs_no_results_and_is_drawn_later(lens, own, run):
    failed = run(lens, "--device", "cpu", largest_file=8_000)
    assert "times.svg cannot be written: File too large" in one_line(failed)
    directory = own
    assert load(directory / "results.json").complete
    assert [path for path in directory.rglob("*") if path.is_file()] == [directory / "results.json"]
    assert run(lens, "--render-only").returncode == 0
    assert (directory / "figures" / "times.svg").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_standard_output_on_a_full_disk_is_one_line_and_costs_nothing(lens, own):
    with Path("/dev/full").open("w") as full, started(lens, full) as failed:
        _, errors = failed.communicate()
    assert failed.returncode == 2
    assert errors == "a-lens: No space left on device; make room there, or name a folder on another disk\n"
    assert (own / "report.md").exists()


def test_a_second_run_into_the_same_folder_is_refused_and_harms_nothing(lens, own, run, tmp_path):
    go = tmp_path / "go"
    first = started(lens, WAIT_FOR=str(go))
    assert first.stderr is not None
    assert first.stderr.readline() == "waiting\n"
    refused = run(lens, "--device", "cpu", "--quick", "--out", str(own))
    go.touch()
    first.communicate()
    assert "another run writes" in one_line(refused)
    assert "--out" in refused.stderr
    assert first.returncode == 0
    assert len(load(own / "results.json").select("time")) == 2


def test_a_run_that_is_told_to_end_keeps_what_it_measured_as_if_interrupted(lens, tmp_path):
    process = started(lens, WAIT_FOR=str(tmp_path / "never"))
    assert process.stderr is not None
    assert process.stderr.readline() == "waiting\n"
    process.terminate()
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.startswith("a-lens: interrupted; 2 records are kept in ")


def test_what_a_killed_run_measured_stays_until_a_later_one_is_complete(lens, own, run):
    directory = own
    assert run(lens, "--device", "cpu", KILL_AT="2").returncode == -signal.SIGKILL
    assert run(lens, "--device", "cpu", KILL_AT="1").returncode == -signal.SIGKILL  # killed again, with nothing new
    assert [record.labels["n"] for record in load(directory / "results.before.partial.json").records] == [1]
    assert run(lens, "--device", "cpu").returncode == 0
    assert not list(directory.glob("*.partial.json"))


def test_a_run_that_is_killed_at_any_moment_leaves_a_document_that_can_be_read_and_can_be_started_again(lens, own, run):
    directory = own
    half_written = directory / "figures" / ".times.svg.0123abcd.writing"
    half_written.parent.mkdir(parents=True)
    half_written.touch()
    for moment in range(3):  # importing, measuring, drawing: wherever it happens to be
        with started(lens) as process:
            time.sleep(0.2 * (1 + moment))
            process.kill()
        for path in directory.glob("results*.json"):
            load(path)
    done = run(lens, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in directory.rglob("*")} == {"figures", "report.md", "results.json", "times.svg"}


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "'/somewhere': No space left on device; make room there"),
        (errno.EROFS, "'/somewhere': Read-only file system; name a folder on"),
        (errno.EACCES, "'/somewhere': Permission denied; change its permissions"),
        (errno.ENOMEM, "'/somewhere': Cannot allocate memory; close programs"),
    ],
)
def test_what_the_machine_refuses_is_named_with_place_and_remedy(number, says):
    assert str(machine_fault(OSError(number, os.strerror(number), "/somewhere"))).startswith(says)


def test_a_temporary_folder_that_cannot_be_found_names_the_variable():
    missing = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    assert str(machine_fault(missing)) == (
        "No usable temporary directory found in ['/tmp']: make room in one of them, or name another folder in TMPDIR"
    )


def test_a_file_where_a_folder_should_be_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("in the way")
    with pytest.raises(FileExistsError) as caught:
        file.mkdir(exist_ok=True)
    assert str(machine_fault(caught.value)) == (
        f"'{file}': File exists; remove the file that stands where a folder should be, or name another folder"
    )


def test_a_path_that_a_program_got_wrong_keeps_its_traceback():
    assert machine_fault(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/nowhere")) is None


def test_a_character_that_the_terminal_lacks_is_an_escape(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    with one_line_errors("program"):
        print("5 × 3")
    terminal.seek(0)
    assert terminal.read() == "5 \\xd7 3\n"


@pytest.mark.parametrize(("has_jax", "at_exit"), [(True, ""), (False, "at exit\n")])
def test_an_interrupted_process_ends_before_jax_destroys_what_its_compilers_use(has_jax, at_exit):
    """At exit jaxlib 0.11 destroys the devices that its compilations, which go on, have to name: SIGSEGV, not 130."""
    program = f"""
import atexit, sys
from benchkit.command import one_line_errors
if {has_jax}:
    sys.modules["jaxlib"] = sys
atexit.register(print, "at exit")
with one_line_errors("program"):
    print("printed")
    raise SystemExit(130)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, f"printed\n{at_exit}", "")


def test_an_error_whose_first_line_only_announces_is_told_with_the_next():
    assert first_line(RuntimeError("backend='b' raised:\n\n  ValueError: too small.\nmore")) == (
        "RuntimeError: backend='b' raised: ValueError: too small"
    )
    assert first_line(ValueError("it does not fit.\nmore")) == "ValueError: it does not fit"
    assert first_line(ValueError("sizes:")) == "ValueError: sizes:"


def test_an_error_that_has_no_text_is_told_by_its_type():
    class Silent(Exception):
        def __str__(self):
            raise KeyError

    assert first_line(Silent()) == "Silent"
