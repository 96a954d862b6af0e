"""Attention on every instruction set that this processor has, one by one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from custom_ops.builds.loading import load
from custom_ops.builds.operator_library import LEVEL_VARIABLE, attention_levels

PROCESS = Path(__file__).with_name("cpu_level_process.py")


def run(level: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, LEVEL_VARIABLE: level, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("level", attention_levels())
def test_attention_is_right_on_every_instruction_set(level: str) -> None:
    known, best = list(attention_levels()), load().instructions
    if best is not None and known.index(level) > known.index(best):
        pytest.skip("this processor lacks the instruction set")
    answer = run(level, str(PROCESS))
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_an_unknown_instruction_set_is_refused_with_those_that_are_here() -> None:
    answer = run("mmx", "-c", "import custom_ops; custom_ops.load()")
    assert "CUSTOM_OPS_CPU: expected one of baseline" in answer.stderr
    assert "got 'mmx'; name one of them, or unset it" in answer.stderr


def test_a_library_that_is_loaded_without_python_refuses_it_at_the_first_call() -> None:
    library = load().file
    answer = run(
        "mmx",
        "-c",
        f"import torch\ntorch.ops.load_library({str(library)!r})\ntorch.ops.custom_ops_kernels.scale(torch.ones(2))",
    )
    assert "RuntimeError: CUSTOM_OPS_CPU: expected one of baseline" in answer.stderr
