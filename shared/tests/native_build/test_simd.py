"""include/native_build/simd.h against plain loops, on every instruction set that this processor has."""

import subprocess
from pathlib import Path

import pytest

from native_build import INCLUDE_DIR, instruction_levels
from native_build.toolchain import cxx_compiler, missing_cxx

HERE = Path(__file__).parent
LEVELS = instruction_levels()
WIDEST_EVERYWHERE = "avx2" if "avx2" in LEVELS else next(iter(LEVELS))  # compiling for each takes as long


@pytest.mark.skipif(missing_cxx() is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "level",
    [pytest.param(level, marks=() if level == WIDEST_EVERYWHERE else pytest.mark.slow) for level in LEVELS],
)
def test_vectors_agree_with_plain_loops(level: str, tmp_path: Path) -> None:
    program = tmp_path / "simd"
    # GCC 12 takes its own headers' undefined vectors for a mistake (GCC bug 105593).
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
    flags = ("-std=c++17", "-O2", f"-I{INCLUDE_DIR}", *warnings, *LEVELS[level])
    subprocess.run([cxx_compiler(), *flags, str(HERE / "simd.cpp"), "-o", str(program)], check=True)
    answer = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    if answer.returncode == 77:
        pytest.skip("this processor lacks the instruction set")
    assert (answer.stdout, answer.returncode) == ("", 0)
