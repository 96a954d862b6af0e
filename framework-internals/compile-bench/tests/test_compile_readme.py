"""The README's commands and snippets do what it says."""

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compile_bench.cli import app

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_targets_of_the_readme_can_be_checked(tmp_path):
    path = tmp_path / "readme_targets.py"
    path.write_text(SNIPPETS[0] + SNIPPETS[1])
    result = CliRunner().invoke(app, ["check", f"{path}:detailed", "--device", "cpu"])
    assert result.exit_code == 0, result.output


def test_the_library_snippet_prints_the_planted_breaks(capsys):
    exec(compile(SNIPPETS[2], "README.md", "exec"), {})
    assert "data-dependent control flow Data-dependent branching" in capsys.readouterr().out


@pytest.mark.parametrize("name", re.findall(r"compile-bench (\w+) ", README))
def test_the_commands_exist(name):
    if name in ("triage", "run", "check"):
        assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0
    else:
        assert name == "exits" or name in README


def test_the_sample_output_is_what_triage_counts():
    assert "3 breaks, 6 recompilations in 3 calls" in README
    assert sys.modules["compile_bench.cli"] is not None
