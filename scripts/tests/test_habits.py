"""What a contributor's tools are told: the workflow, the pre-commit hooks and the Makefile agree with the scripts."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

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
