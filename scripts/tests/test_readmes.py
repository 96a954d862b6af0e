"""The commands and snippets of the root README and of shared/README, run as they stand."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import lenses
import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]


def section(path: Path, heading: str, language: str) -> str:
    """The first fenced block of a language after a heading."""
    text = path.read_text().partition(heading)[2]
    return re.search(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]


def commands() -> list[str]:
    lines = section(ROOT / "README.md", "## Your own code", "bash").splitlines()
    return [line.partition("  # ")[0].partition("   #")[0].strip() for line in lines if line]


# Ten seconds or more each; the other commands keep their place in a run that leaves slow tests out.
SLOW = re.compile("triage|parity|torch_baseline train")


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=[pytest.mark.slow] if SLOW.search(command) else []) for command in commands()],
)
def test_a_command_of_the_root_readme_runs(command, run_command):
    done = run_command(command.replace("--steps 200", "--steps 2"))  # the README's 200 steps have a test
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize(
    "package", [*(manifest.entry_point.partition(".")[0] for manifest in lenses.manifests().values()), "torch_baseline"]
)
def test_a_command_without_arguments_lists_what_it_can(package):
    if importlib.util.find_spec(f"{package}.cli") is None:
        pytest.skip("the lens has no command")
    answer = CliRunner().invoke(importlib.import_module(f"{package}.cli").app, [])
    assert "Commands" in answer.output
    assert "Missing command" not in answer.output


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_file_and_target_that_a_page_names_is_there(page):
    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE)) <= targets
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    for script in set(re.findall(r"\./(scripts/\S+\.sh)", text)):
        assert os.access(ROOT / script, os.X_OK), script


def test_the_snippet_of_the_shared_readme_runs(capsys):
    exec(section(ROOT / "shared" / "README.md", "# shared", "python"), {})
    join, ratio = capsys.readouterr().out.splitlines()
    assert "s (" in join
    assert "× (" in ratio


@pytest.mark.parametrize(
    "page",
    sorted(
        path.relative_to(ROOT).as_posix()
        for pattern in ("README.md", "*/README.md", "*/*/README.md")
        for path in ROOT.glob(pattern)
    ),
)
def test_a_readme_is_one_screen(page):
    if page in ("framework-internals/README.md", "examples/README.md"):
        pytest.skip("a generated index; a page of worked examples")
    assert len((ROOT / page).read_text().splitlines()) <= 60


# A figure with a unit. Limits that are chosen (a budget, a time limit) stand beside one of these words.
_MEASURED = re.compile(
    r"\d[\d.,]*(?: to [\d.,]+)? ?(?:ms|µs|ns|s|seconds|minutes|×|[GT]B/s|tokens/s|[GT]FLOP/s)(?![\w-])"
)
_CHOSEN = ("budget", "--quick", "longer than", "have 12 minutes")
_SCALED = re.compile(r"\b(?:two|three|four|five|six|seven|eight|ten|twenty)(?: to \w+)? times as (?:fast|slow)")


def test_guides_have_no_measured_figures_since_those_grow_old():
    """What was measured stands in reports, notes and the outputs of examples."""
    guides = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "framework-internals").glob("*/README.md")]
    for guide in guides:
        prose = re.sub(r"^```.*?^```$", "", guide.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for line in prose.splitlines():
            figures = _MEASURED.findall(re.sub(r"`[^`]*`", "", line)) + _SCALED.findall(line)
            assert not figures or any(word in line for word in _CHOSEN), f"{guide.name}: {line.strip()}: {figures}"
