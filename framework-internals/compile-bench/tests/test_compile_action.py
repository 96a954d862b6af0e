"""The GitHub Action: its shell steps, run as GitHub runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[1]
ACTION = yaml.safe_load((FOLDER / "action.yml").read_text())


def run_step(step, folder, **inputs):
    """Run a step as GitHub does: expressions only in ``env``, the script by bash with these flags."""
    assert step["shell"] == "bash"
    assert "${{" not in step["run"], "an input in a script is code"
    values = {name: entry.get("default", "") for name, entry in ACTION["inputs"].items()} | inputs
    known = {f"inputs.{name}": value for name, value in values.items()} | {"github.action_path": str(FOLDER)}
    own = {
        name: re.sub(r"\$\{\{ (\S+) \}\}", lambda found: known[found[1]], text) for name, text in step["env"].items()
    }
    script = folder / "step.sh"
    script.write_text(step["run"])
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "GITHUB_STEP_SUMMARY": str(folder / "summary.md"), **own}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def recorder(tmp_path):
    """A Python that prints its arguments, one a line, and fails."""
    python = tmp_path / "recorder"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit 3\n")
    python.chmod(0o755)
    return str(python)


def test_the_action_is_composite_and_installs_what_it_runs(recorder, tmp_path):
    assert ACTION["runs"]["using"] == "composite"
    assert {name for name, entry in ACTION["inputs"].items() if entry.get("required")} == {"targets"}
    install, check = ACTION["runs"]["steps"]
    assert install["if"] == "inputs.install == 'true'"
    answer = run_step(install, tmp_path, python=recorder)
    folders = [Path(line) for line in answer.stdout.splitlines()[-2:]]
    assert all((folder / "pyproject.toml").is_file() for folder in folders), folders
    assert answer.returncode == run_step(check, tmp_path, python=recorder).returncode == 3


def test_the_action_has_only_keys_that_github_knows():
    """The schema of a composite action, as GitHub's documentation of metadata syntax has it."""
    assert set(ACTION) <= {"name", "author", "description", "inputs", "outputs", "runs", "branding"}
    assert all(isinstance(ACTION[key], str) for key in ("name", "description"))
    for name, entry in ACTION["inputs"].items():
        assert set(entry) <= {"description", "required", "default", "deprecationMessage"}, name
        assert isinstance(entry["description"], str)
        assert isinstance(entry.get("required", False), bool)
        assert isinstance(entry.get("default", ""), str), "an input is text: true would be a boolean"
    assert set(ACTION["runs"]) == {"using", "steps"}
    known = {"name", "id", "if", "shell", "run", "env", "working-directory", "uses", "with", "continue-on-error"}
    used = {"github.action_path"}
    for step in ACTION["runs"]["steps"]:
        assert set(step) <= known
        assert "shell" in step, "a composite step that runs a script must name its shell"
        assert all(isinstance(text, str) for text in step["env"].values())
        used |= set(re.findall(r"\$\{\{ (\S+) \}\}", " ".join(step["env"].values())))
    assert used == {"github.action_path", *(f"inputs.{name}" for name in ACTION["inputs"] if name != "install")}


def test_targets_are_lines_and_options_words(recorder, tmp_path):
    targets = "  a b.py:one\n\n$(touch injected).py:two  \n"
    answer = run_step(
        ACTION["runs"]["steps"][1], tmp_path, python=recorder, targets=targets, options="--infer\n--limit 9\n"
    )
    summary = str(tmp_path / "summary.md")
    expected = ["-m", "compile_bench", "check", "--infer", "--limit", "9", "--summary", summary, "--"]
    assert answer.stdout.splitlines() == [*expected, "a b.py:one", "$(touch injected).py:two"]
    assert not (tmp_path / "injected").exists()


@pytest.mark.slow
def test_the_summary_of_the_job_has_the_results(tmp_path):
    (tmp_path / "targets.py").write_text(
        "import torch\n"
        "def clean():\n    return (lambda x: x.sin()), (torch.ones(3),)\n"
        "def broken():\n    return (lambda x: x.sin() if x.sum() > 0 else x), (torch.ones(3),)\n"
    )
    targets = "targets.py:clean\ntargets.py:broken\n"
    answer = run_step(
        ACTION["runs"]["steps"][1], tmp_path, python=sys.executable, targets=targets, options="--infer --device cpu"
    )
    assert answer.returncode == 1, answer.stderr
    text = (tmp_path / "summary.md").read_text()
    assert "| `targets.py:clean` | within budget | 0 graph breaks, 0 recompilations |" in text
    assert "| `targets.py:broken` | over budget | 1 graph break" in text
    assert "targets.py:5: Data-dependent branching" in text
