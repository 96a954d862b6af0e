"""The script that runs every operator under compute-sanitizer, with a stand-in for that program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "sanitize.py"

# Names the calls it is given instead of running them, for which there is no GPU, and reports under one tool.
STAND_IN = f"""#!{sys.executable}
import os, sys
print("stand-in:", *sys.argv[1:5], *(os.path.basename(argument) for argument in sys.argv[8:]))
sys.exit(sys.argv[2] == "racecheck")
"""


def run(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)


@pytest.fixture
def sanitizer(tmp_path: Path) -> str:
    program = tmp_path / "compute-sanitizer"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    return str(tmp_path)


def test_every_tool_runs_and_the_one_that_reports_is_named(sanitizer: str) -> None:
    answer = run(sanitizer)
    assert [line for line in answer.stdout.splitlines() if line.startswith("stand-in")] == [
        f"stand-in: --tool {tool} --error-exitcode 1 sanitized_calls.py{' --no-products' * (tool == 'initcheck')}"
        for tool in ("memcheck", "initcheck", "racecheck")
    ]
    assert answer.stdout.endswith("sanitize.py: reports or an error in racecheck\n")
    assert answer.returncode == 1


def test_one_tool_that_reports_nothing(sanitizer: str) -> None:
    answer = run(sanitizer, "--tool", "memcheck", "--only", "decode", "--short")
    assert answer.returncode == 0, answer.stderr
    assert "sanitized_calls.py decode --short" in answer.stdout
    assert answer.stdout.endswith("sanitize.py: nothing reported\n")


def test_an_unknown_tool_and_a_missing_program_are_one_line(tmp_path: Path, sanitizer: str) -> None:
    answer = run(sanitizer, "--tool", "valgrind")
    assert answer.stderr == "sanitize.py: --tool: expected memcheck, initcheck, racecheck, got 'valgrind'\n"
    answer = run(str(tmp_path / "empty"))
    assert answer.stderr.startswith("sanitize.py: no compute-sanitizer on PATH")
    assert answer.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--no-products", "--short"]], ids=["all", "without products, short"])
def test_the_calls_are_valid_on_a_cpu(options: list[str]) -> None:
    command = [sys.executable, str(SCRIPT.with_name("sanitized_calls.py")), "--device", "cpu", *options]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "decode: every call returned" in answer.stdout
