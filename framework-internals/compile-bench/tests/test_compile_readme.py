"""The commands and snippets of the README and the guide do what these say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compile_bench.cli import app
from compile_bench.measure.lowerings.step import operators
from compile_bench.targets.case import Case

README = (Path(__file__).parents[1] / "README.md").read_text()
GUIDE = (Path(__file__).parents[3] / "docs" / "compile-bench.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", GUIDE + README, re.DOTALL)
COMMANDS = re.findall(r"^compile-bench ([\w-]+)", README, re.MULTILINE)


def test_the_targets_of_the_readme_can_be_checked(tmp_path):
    path = tmp_path / "readme_targets.py"
    path.write_text(SNIPPETS[0] + SNIPPETS[1])
    result = CliRunner().invoke(app, ["check", f"{path}:detailed", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert f"{path}:detailed: within budget: 0 graph breaks, 1 recompilation (at most 1 per guard)\n" in result.output


def test_the_adapter_of_the_guide_is_found(tmp_path):
    path = tmp_path / "readme_adapter.py"
    path.write_text(SNIPPETS[2])
    assert operators(Case(f"{path}:make")).names == ["gelu"]


def test_the_library_snippet_prints_the_planted_breaks(capsys):
    exec(compile(SNIPPETS[4], "README.md", "exec"), {})
    assert "data-dependent control flow Data-dependent branching" in capsys.readouterr().out


@pytest.mark.slow
def test_the_test_of_the_readme_keeps_its_budget(tmp_path):
    path = tmp_path / "test_readme.py"
    path.write_text(SNIPPETS[3])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "compile_bench.pytest_plugin", str(path)]
    answer = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_commands_exist(name):
    assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


def test_all_commands_are_shown():
    commands = {command.callback.__name__.replace("_", "-") for command in app.registered_commands}
    assert set(COMMANDS) == commands


def test_the_module_is_the_command():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "compile_bench", "--help"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "triage" in answer.stdout
