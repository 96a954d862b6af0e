"""What a run says of where it ran."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from benchkit import environment

HERE = Path(__file__).parent


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.delenv("BENCHKIT_COMMIT", raising=False)
    identity = {
        "GIT_AUTHOR_NAME": "t",
        "GIT_AUTHOR_EMAIL": "t@t",
        "GIT_COMMITTER_NAME": "t",
        "GIT_COMMITTER_EMAIL": "t@t",
    }

    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", tmp_path, *arguments], check=True, capture_output=True, env={**os.environ, **identity}
        )

    git("init")
    (tmp_path / "constraints.txt").write_text("")
    (tmp_path / "code.py").write_text("1")
    report = tmp_path / "framework-internals" / "lens" / "reports" / "cpu" / "report.md"
    report.parent.mkdir(parents=True)
    report.write_text("old")
    git("add", ".")
    git("commit", "-m", "first")
    return tmp_path


def test_the_commit_and_whether_the_code_differs_from_it(repository):
    found = environment.capture("cpu", root=repository)
    assert len(found.commit) == 40
    assert found.dirty is False
    (repository / "framework-internals" / "lens" / "reports" / "cpu" / "report.md").write_text("new")
    assert environment.capture("cpu", root=repository).dirty is False  # a report is what a run writes
    (repository / "code.py").write_text("2")
    assert environment.capture("cpu", root=repository).dirty is True


def test_an_exported_tree_takes_its_commit_from_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHKIT_COMMIT", "abc123")
    found = environment.capture("cpu", root=tmp_path)
    assert (found.commit, found.dirty) == ("abc123", None)


def test_outside_a_checkout_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.delenv("BENCHKIT_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    found = environment.capture("cpu", root=tmp_path)
    assert (found.commit, found.dirty) == (None, None)


def test_the_command_line_names_no_folder_of_this_machine(repository, monkeypatch):
    script = repository / "code.py"
    monkeypatch.setattr("sys.argv", [str(script), "--out", "/somewhere/else/entirely", "--quick"])
    assert environment.capture("cpu", root=repository).command == "python code.py --out entirely --quick"


def test_a_long_argument_and_a_program_that_hangs_end_no_run(repository, monkeypatch):
    """Neither is what a run is about: a field is left out."""
    monkeypatch.setattr("sys.argv", ["x", "a" * 5000])
    assert environment.capture("cpu", root=repository).command.endswith("a" * 5000)

    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, 30)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert environment.capture("cpu", root=repository).commit is None


def test_it_survives_the_way_through_json_and_names_the_machine():
    found = environment.capture("cpu", root=HERE)
    assert environment.Environment.from_json(dataclasses.asdict(found)) == found
    assert found.machine == "cpu"
    assert found.cores >= 1
    assert found.packages["numpy"]
    gpu = environment.Gpu("NVIDIA H200", "9.0", 132, 1, 1, "13.0")
    assert dataclasses.replace(found, gpu=gpu).machine == "nvidia-h200"


@pytest.mark.gpu
def test_the_gpu_is_described():
    found = environment.capture("cuda", root=HERE).gpu
    assert found.multiprocessors > 0
    assert found.l2_cache > 0
    assert found.driver


def test_a_part_of_a_run_says_where_it_comes_from():
    found = dataclasses.replace(
        environment.capture("cpu", root=Path(__file__).parent), commit="0123456789abcdef", dirty=True
    )
    assert found.source == {"date": found.date, "command": found.command, "commit": found.commit, "dirty": True}
    assert environment.commit_label(found.commit, found.dirty) == "`0123456789ab`, with uncommitted changes"
    assert environment.commit_label("0123456", None) == "`0123456`"
    assert environment.commit_label(None, None) == "an unknown commit (no git checkout)"
