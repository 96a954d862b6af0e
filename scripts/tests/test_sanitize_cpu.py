"""The CPU kernels under sanitizers, with each C++ compiler that is here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "sanitize_cpu.sh"


def test_its_help_says_what_it_does() -> None:
    answer = subprocess.run([str(SCRIPT), "--help"], capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("The CPU kernels under AddressSanitizer")


def test_an_unknown_instruction_set_is_refused_with_those_that_are_here() -> None:
    answer = subprocess.run([str(SCRIPT), "mmx"], capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert answer.stderr.startswith("sanitize_cpu.sh: expected baseline")


LEVELS = ("baseline", "avx2", "avx512", "avx512_bf16", "emulated_amx")
CLANG = next(filter(shutil.which, ("clang++", "clang++-16", "clang++-15")), "clang++")


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("compiler", ["g++", CLANG], ids=["gcc", "clang"])
def test_no_sanitizer_finds_anything(compiler: str, level: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    environment = {**os.environ, "CXX": compiler}
    answer = subprocess.run([str(SCRIPT), level], env=environment, capture_output=True, text=True, check=False)
    if answer.stderr.startswith("sanitize_cpu.sh: expected"):
        pytest.skip("this processor lacks the instruction set")
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-4000:]
    assert "sanitize-cpu: nothing found" in answer.stdout
