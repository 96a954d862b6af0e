"""The version matrix over a machine that is made up, and what it reads from pip, pytest and git."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import version_matrix

from benchkit import UserError
from benchkit.environment import capture
from benchkit.report import render
from benchkit.results import load
from native_build import TORCH_VERSIONS
from tested_versions import machine
from tested_versions.machine import Build, ThisMachine, find_interpreter, find_torch, read_tests
from tested_versions.matrix import Outcome, Unavailable, run
from tested_versions.plan import JAXES, PYTHONS, SELECTION, TORCHES, combinations, constraints
from tested_versions.report import REPORT

ROOT = Path(__file__).resolve().parents[2]
WANTED = combinations(("3.11", "3.12"), ("2.10", "2.13"), ("0.10",))


class FakeTrial:
    def __init__(self, combination) -> None:
        self.combination = combination
        self.versions = {"python": f"{combination.python}.7", "torch": f"{combination.torch}.0+cpu", "jax": "0.10.2"}
        self.closed = False

    def run(self, package: str) -> Outcome:
        if package == "compile-bench" and self.combination.torch == "2.10":
            return Outcome(3, 1, 0, ["tests/test_x.py::test_y - <b>moved</b> | `z`"])
        return Outcome(5, 0, 2)

    def close(self) -> None:
        self.closed = True


class FakeMachine:
    """Has no Python 3.12; is killed before the combination that ``dies_at`` names."""

    def __init__(self, dies_at=None) -> None:
        self.dies_at = dies_at
        self.trials: list[FakeTrial] = []

    def prepare(self, combination):
        if combination == self.dies_at:
            raise KeyboardInterrupt
        if combination.python == "3.12":
            raise Unavailable("no Python 3.12 here")
        self.trials.append(FakeTrial(combination))
        return self.trials[-1]


@pytest.fixture
def environment():
    return dataclasses.replace(capture("cpu", root=ROOT), commit="0123456789", dirty=False)


def test_every_combination_is_a_row_and_says_why_where_it_could_not_be_tried(tmp_path, environment):
    fake = FakeMachine()
    results = run(fake, WANTED, tmp_path, environment, fresh=False)
    assert results == load(tmp_path / "results.json")
    assert results.complete
    assert [record.labels for record in results.records] == [each.labels for each in WANTED]
    assert all(trial.closed for trial in fake.trials)
    text = render(results, REPORT)
    assert "**2 of 4 combinations could be tried on this machine; 1 of those passed" in text
    assert "on a CPU. All rows come from commit `0123456789`.**" in text
    assert "| 2.10 | **1 failed** | not available |\n| 2.13 | " in text
    row = "| 3.11.7 | 2.10.0+cpu | 0.10.2 | `0123456789` | 5 passed, 2 skipped | 5 passed, 2 skipped | **1 failed**, "
    assert f"{row}3 passed |" in text
    assert "| 2.10 | 3.12 | 0.10 | no Python 3.12 here |\n| 2.13 | 3.12 | 0.10 | no Python 3.12 here |" in text
    assert "- Python 3.11, torch 2.10, jax 0.10, compile-bench: `` tests/test_x.py::test_y - <b>moved" in text


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, environment):
    with pytest.raises(KeyboardInterrupt):
        run(FakeMachine(dies_at=WANTED[1]), WANTED, tmp_path, environment, fresh=False)
    kept = load(tmp_path / "results.json")
    assert [record.labels for record in kept.records] == [WANTED[0].labels]
    assert not kept.complete
    assert "> This run was interrupted" in render(kept, REPORT)
    again = FakeMachine()
    results = run(again, WANTED, tmp_path, environment, fresh=False)
    assert [trial.combination for trial in again.trials] == [WANTED[1]]
    assert len(results.records) == 4


@pytest.mark.parametrize("change", ["fresh", "commit", "dirty", "damaged", "more"])
def test_what_is_of_another_state_of_the_sources_is_tried_anew(change, tmp_path, environment):
    first = dataclasses.replace(environment, dirty=change == "dirty")
    run(FakeMachine(), WANTED[:1], tmp_path, first, fresh=False)
    if change == "damaged":
        (tmp_path / "results.json").write_text("{")
    now = dataclasses.replace(environment, commit="abcdef" if change == "commit" else "0123456789")
    fake = FakeMachine()
    results = run(fake, WANTED[1:2] if change == "more" else WANTED[:1], tmp_path, now, fresh=change == "fresh")
    assert len(fake.trials) == 1
    assert len(results.records) == (2 if change == "more" else 1)


def test_what_could_not_be_had_is_asked_for_again(tmp_path, environment):
    """An index that was out of reach may be back."""
    run(FakeMachine(), WANTED, tmp_path, environment, fresh=False)
    monday = FakeMachine()
    monday.prepare = FakeTrial
    results = run(monday, WANTED, tmp_path, environment, fresh=False)
    assert [record.data["why"] for record in results.records] == [""] * 4


def test_what_is_not_asked_for_stays_with_its_commit(tmp_path, environment):
    run(FakeMachine(), WANTED[:1], tmp_path, environment, fresh=False)
    later = dataclasses.replace(environment, commit="abcdef")
    results = run(FakeMachine(), WANTED[1:2], tmp_path, later, fresh=True)
    assert [record.data["commit"] for record in results.records] == ["0123456789", "abcdef"]
    assert results.complete
    text = render(results, REPORT)
    assert "| 2.10.0+cpu | 0.10.2 | `0123456789` |" in text
    assert "| 2.13.0+cpu | 0.10.2 | `abcdef` |" in text
    assert "on a CPU. The rows come from 2 commits: no commit was run whole.**" in text
    assert "| `0123456789` | 3.11 | 1 |\n| `abcdef` | 3.11 | 1 |" in text


def test_an_interpreter_that_is_not_there_and_a_torch_that_is_not_there_are_told_apart(monkeypatch, tmp_path):
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert find_interpreter(here) is not None
    assert find_interpreter("3.99") is None
    with pytest.raises(Unavailable, match=r"no Python 3\.99 here"):
        ThisMachine(ROOT, tmp_path).prepare(combinations(("3.99",), ("2.13",), ("0.10",))[0])
    monkeypatch.setattr(machine, "find_torch", lambda *asked, **more: "no build of torch 2.10")
    with pytest.raises(Unavailable, match=r"no build of torch 2\.10"):
        ThisMachine(ROOT, tmp_path).prepare(combinations((here,), ("2.10",), ("0.10",))[0])
    assert not list(tmp_path.iterdir())


def pip_says(monkeypatch, answers):
    """Have pip resolve to versions with requirements, by whether the index of CPU builds is asked."""

    def output(command):
        found = answers.get("--index-url" in command)
        return json.dumps({"install": [{"metadata": found}]}) if found else ""

    monkeypatch.setattr(machine, "_output", output)


CUDA = {"version": "2.15.0", "requires_dist": ["sympy", "nvidia-cudnn-cu13==9", 'cuda-toolkit[cublas]==13; x == "y"']}
CPU = {"version": "2.15.0+cpu", "requires_dist": ["sympy"]}


def test_an_interpreter_needs_no_pip_of_its_own(monkeypatch):
    asked = []
    monkeypatch.setattr(machine, "_output", lambda command: asked.append(command) or "")
    find_torch(Path("/usr/bin/python3.13"), "2.15", cuda=False)
    assert {tuple(command[:5]) for command in asked} == {
        (sys.executable, "-m", "pip", "--python", "/usr/bin/python3.13")
    }


def test_a_build_with_cuda_is_taken_only_where_it_is_asked_for(monkeypatch):
    pip_says(monkeypatch, {False: CUDA})
    found = find_torch(Path("python"), "2.15", cuda=False)
    assert found == (
        "the only build of torch 2.15 in the index is for CUDA (2.15.0, which needs 2 packages of CUDA's libraries); "
        "--cuda installs it"
    )
    assert find_torch(Path("python"), "2.15", cuda=True) == Build("2.15.0")
    pip_says(monkeypatch, {False: CUDA, True: CPU})
    assert find_torch(Path("python"), "2.15", cuda=False) == Build("2.15.0+cpu", ("--index-url", machine.CPU_INDEX))
    pip_says(monkeypatch, {False: CPU})
    assert find_torch(Path("python"), "2.15", cuda=False) == Build("2.15.0+cpu")
    pip_says(monkeypatch, {})
    assert "no build of torch 2.15 for this Python" in find_torch(Path("python"), "2.15", cuda=False)


LISTED = "=========== short test summary info ==========="


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (0, "..s\n3 passed, 1 skipped in 2.00s", Outcome(3, 0, 1)),
        (0, "..\n2 passed in 61.20s (0:01:01)\nnanobind: leaked 4 instances!", Outcome(2, 0, 0)),
        (
            1,
            f"F\nERROR   torch:x.py:1 logged\n{LISTED}\nFAILED a.py::test_b - assert 1\n1 failed, 2 passed in 1s",
            Outcome(2, 1, 0, ["a.py::test_b - assert 1"]),
        ),
        (2, f"{LISTED}\nERROR a.py - ImportError: x\n1 error in 0.1s", Outcome(0, 1, 0, ["a.py - ImportError: x"])),
        (4, "ERROR: file not found", Outcome(0, 1, 0, ["ERROR: file not found"])),
        (-9, "", Outcome(0, 1, 0, ["no output of pytest"])),
        (5, "3 deselected in 0.1s", Outcome(0, 1, 0, ["3 deselected in 0.1s"])),
    ],
)
def test_what_pytest_said(status, output, expected):
    assert read_tests(status, output) == expected


def test_a_jax_that_is_not_there_for_this_python_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "find_torch", lambda *asked, **more: Build("2.13.0+cpu"))
    monkeypatch.setattr(machine, "find_interpreter", lambda version: Path(sys.executable))
    pip_says(monkeypatch, {})
    with pytest.raises(Unavailable, match=r"no jax 0\.11 for this Python"):
        ThisMachine(ROOT, tmp_path).prepare(combinations(("3.11",), ("2.13",), ("0.11",))[0])


def test_an_installation_that_fails_says_with_what_and_leaves_nothing(monkeypatch, tmp_path):
    def fails(command, **options):
        said = "WARNING: slow\n  error: subprocess-exited-with-error\n      ERROR: No matching distribution for torch\n"
        return subprocess.CompletedProcess(command, 1, "", said)

    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    monkeypatch.setattr(machine, "find_torch", lambda *asked, **more: Build("2.13.0+cpu"))
    monkeypatch.setattr(machine, "find_interpreter", lambda version: Path(sys.executable))
    monkeypatch.setattr(machine, "_resolved", lambda interpreter, requirement, options: {})
    monkeypatch.setattr(machine.subprocess, "run", fails)
    with pytest.raises(Unavailable, match=r"installed: No matching distribution for torch$"):
        ThisMachine(ROOT, tmp_path / "cache").prepare(combinations((here,), ("2.13",), ("0.10",))[0])
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_the_plan_fits_the_repository():
    assert (TORCHES[0], TORCHES[-1]) == TORCH_VERSIONS
    for manifest in ROOT.glob("framework-internals/*/pyproject.toml"):
        text = manifest.read_text()
        assert f'requires-python = ">={PYTHONS[0]},<3.{int(PYTHONS[-1].partition(".")[2]) + 1}"' in text
        assert manifest.parent.name in SELECTION
    metadata = (ROOT / "framework-internals" / "jax-baseline" / "pyproject.toml").read_text()
    assert f'"jax>={JAXES[0]},<0.{int(JAXES[-1].partition(".")[2]) + 1}"' in metadata
    assert all((ROOT / path).exists() for paths in SELECTION.values() for path in paths)
    kept = constraints((ROOT / "constraints.txt").read_text())
    assert "pytest==" in kept
    assert "torch==" not in kept
    assert "jaxtyping==" in kept


def test_a_version_outside_the_matrix_is_refused():
    assert version_matrix.chosen("--torch", ["2.13"], TORCHES) == ("2.13",)
    assert version_matrix.chosen("--torch", None, TORCHES) == TORCHES
    with pytest.raises(UserError, match=r"--torch takes one of 2\.10, .*; got 2\.9"):
        version_matrix.chosen("--torch", ["2.9"], TORCHES)
