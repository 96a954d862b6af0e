"""The version matrix: its plan, what nox runs, what is read of the outcomes, and the report."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchkit.environment import capture
from benchkit.report import render
from benchkit.results import dump
from native_build import TORCH_VERSIONS
from tested_versions.plan import JAXES, PACKAGES, PYTHONS, SELECTION, TORCHES, constraints
from tested_versions.records import Outcome, merged, read_tests
from tested_versions.report import declare

ROOT = Path(__file__).resolve().parents[2]
PASSED = '<testcase classname="a" name="test_p" />'
SKIPPED = '<testcase classname="a" name="test_s"><skipped message="no GPU" /></testcase>'
FAILED = '<testcase classname="a.test_x" name="test_y"><failure message="assert 1&#10;more">x</failure></testcase>'
BROKEN = '<testcase classname="" name="a.py"><error message="collection failure">x</error></testcase>'


def junit(path: Path, *cases: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def leave(
    folder: Path, python: str, torch: str, *, why: str = "", commit: str = "0123456789", failed: str = ""
) -> None:
    """What nox leaves of a combination with jax 0.10; ``failed`` names the package of which a test fails."""
    outcome = {"labels": {"python": python, "torch": torch, "jax": "0.10"}, "commit": commit, "dirty": False}
    home = folder / f"python{python}-torch{torch}-jax0.10"
    versions = {"python": f"{python}.7", "torch": f"{torch}.0+cpu", "jax": "0.10.2"}
    for package in SELECTION:
        junit(home / f"{package}.xml", PASSED, *([FAILED] if package == failed else [SKIPPED]))
    outcome |= {"why": why} if why else {"versions": versions, "seconds": 61.0}
    (home / "outcome.json").write_text(json.dumps(outcome))


@pytest.fixture
def environment():
    return dataclasses.replace(capture("cpu", root=ROOT), commit="0123456789", dirty=False)


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ([PASSED, PASSED, SKIPPED], Outcome(2, 0, 1)),
        ([PASSED, FAILED], Outcome(1, 1, 0, ["a.test_x::test_y - assert 1"])),
        ([BROKEN], Outcome(0, 1, 0, ["a.py - collection failure"])),
    ],
)
def test_the_outcomes_of_pytest(tmp_path, cases, expected):
    assert read_tests(junit(tmp_path / "tests.xml", *cases)) == expected


@pytest.mark.parametrize("text", [None, "", "<testsuites>"])
def test_a_pytest_that_was_killed_is_a_failure(tmp_path, text):
    path = tmp_path / "tests.xml"
    if text is not None:
        path.write_text(text)
    assert read_tests(path) == Outcome(0, 1, 0, ["pytest ended before it wrote its outcomes"])


def test_every_combination_is_a_row_and_says_why_where_it_could_not_be_tried(tmp_path, environment):
    leave(tmp_path, "3.11", "2.10", failed="compile-bench")
    leave(tmp_path, "3.11", "2.13")
    leave(tmp_path, "3.11", "2.15", why="it cannot be installed: ERROR: No matching distribution found for torch")
    missing = {
        "name": "versions-3.12(torch='2.13', jax='0.10')",
        "args": {"torch": "2.13", "jax": "0.10"},
        "result": "skipped",
        "reason": "Python interpreter 3.12 not found",
    }
    done = missing | {"name": "versions-3.11(torch='2.13', jax='0.10')", "reason": "it was tried at this commit"}
    (tmp_path / "nox.json").write_text(json.dumps({"sessions": [missing, done]}))
    text = render(merged(tmp_path / "none", tmp_path, environment), declare)
    assert "interrupted" not in text
    assert "**2 of 4 combinations could be tried on this machine; 1 of those passed" in text
    assert "on a CPU.**" in text
    assert "| 2.10 | **1 failed** | – |\n| 2.13 | 6 passed | not available |\n" in text
    row = "| 3.11.7 | 2.10.0+cpu | 0.10.2 | `0123456789` | 1 passed, 1 skipped | 1 passed, 1 skipped | **1 failed**, "
    assert f"{row}1 passed |" in text
    assert "- Python 3.12 with jax 0.10 and torch 2.13: no Python 3.12 here\n" in text
    reason = "it cannot be installed: ERROR: No matching distribution found for torch"
    assert f"- Python 3.11 with jax 0.10 and torch 2.15: {reason}\n" in text
    assert "- Python 3.11, torch 2.10, jax 0.10, compile-bench: `a.test_x::test_y - assert 1`" in text


def test_what_was_not_tried_now_stays_with_its_commit_in_the_order_of_versions(tmp_path, environment):
    first, second = tmp_path / "first", tmp_path / "second"
    leave(first, "3.11", "2.9")
    leave(first, "3.11", "2.13")
    kept = merged(tmp_path, first, environment)
    (tmp_path / "results.json").write_text(dump(kept))
    leave(second, "3.11", "2.10", commit="abcdef")
    leave(second, "3.11", "2.13", commit="abcdef")
    results = merged(tmp_path, second, environment)
    assert [record.labels["torch"] for record in results.records] == ["2.9", "2.10", "2.13"]
    assert [record.data["commit"] for record in results.records] == ["0123456789", "abcdef", "abcdef"]
    assert "No commit was run whole." in render(results, declare)
    (tmp_path / "results.json").write_text("{")
    assert len(merged(tmp_path, second, environment).records) == 2


def test_the_plan_fits_the_repository():
    assert (TORCHES[0], TORCHES[-1]) == TORCH_VERSIONS
    for manifest in ROOT.glob("framework-internals/*/pyproject.toml"):
        text = manifest.read_text()
        assert f'requires-python = ">={PYTHONS[0]},<3.{int(PYTHONS[-1].partition(".")[2]) + 1}"' in text
        assert manifest.parent.name in SELECTION
        assert any(package.partition("[")[0] == f"framework-internals/{manifest.parent.name}" for package in PACKAGES)
    metadata = (ROOT / "framework-internals" / "jax-baseline" / "pyproject.toml").read_text()
    assert f'"jax>={JAXES[0]},<0.{int(JAXES[-1].partition(".")[2]) + 1}"' in metadata
    assert all((ROOT / path).exists() for paths in SELECTION.values() for path in paths)
    kept = constraints((ROOT / "constraints.txt").read_text())
    assert "pytest==" in kept
    assert "torch==" not in kept
    assert "jaxtyping==" in kept


def test_nox_has_a_session_for_every_combination():
    pytest.importorskip("nox", reason="nox is not installed: `make versions` installs it")
    done = subprocess.run(
        [sys.executable, "-m", "nox", "--list", "--json"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    sessions = {(session["python"], *sorted(session["call_spec"].items())) for session in json.loads(done.stdout)}
    assert sessions == {(p, ("jax", j), ("torch", t)) for p in PYTHONS for t in TORCHES for j in JAXES}
