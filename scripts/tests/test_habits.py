"""What a contributor's tools are told: the workflow, the pre-commit hooks and the Makefile agree with the scripts."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_ci_runs_the_one_script_on_every_supported_python():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.search(r"^ +- run: \.ci/run$", workflow, re.MULTILINE)
    tested = re.findall(r"\d+\.\d+", re.search(r"python: \[(.+)\]", workflow)[1])
    required = tomllib.loads((ROOT / "shared" / "pyproject.toml").read_text())["project"]["requires-python"]
    low, high = (int(minor) for minor in re.findall(r"3\.(\d+)", required))
    assert tested == [f"3.{minor}" for minor in range(low, high)]
    for path in re.findall(r"^ +((?:\S+/)?(?:constraints\.txt|pyproject\.toml))$", workflow, re.MULTILINE):
        assert list(ROOT.glob(path)), path
    named = re.findall(r"\S+/tests/\S+\.py", workflow)
    assert "scripts/tests/test_wheels.py" in named  # slow, so that .ci/run leaves them out
    assert all((ROOT / path).is_file() for path in named)


def test_the_hooks_run_the_pinned_tools_that_the_check_runs():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    entries = re.findall(r"entry: \./scripts/python\.sh -m (\w+)", hooks)
    assert entries == ["ruff", "ruff", "mypy"]
    script = (ROOT / "scripts" / "test.sh").read_text()
    pinned = (ROOT / "constraints.txt").read_text()
    for tool in set(entries):
        assert f"-m {tool}" in script
        assert re.search(rf"^{tool}==", pinned, re.MULTILINE)


def test_make_help_lists_every_target():
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE)[1].split()
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == phony
    assert all(len(line.split()) > 2 for line in done.stdout.splitlines())


VERBS = sorted(path.name for path in (ROOT / "scripts").glob("*.sh"))


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_says_what_it_does_instead_of_doing_it(verb, option, tmp_path):
    """In a folder where nothing else is, so that whatever it began would fail or leave something behind."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / verb, tmp_path / "scripts")
    done = subprocess.run([tmp_path / "scripts" / verb, option], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"./scripts/{verb}" in done.stdout
    assert "#" not in done.stdout
    assert [path.name for path in tmp_path.rglob("*")] == ["scripts", verb]


@pytest.mark.parametrize("verb", ["setup.sh", "site.sh"])
def test_a_verb_without_arguments_refuses_them(verb):
    done = subprocess.run([ROOT / "scripts" / verb, "--fast"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert ": it takes no arguments" in done.stderr
    assert done.stderr.endswith(", got --fast; --help says what it does\n")
