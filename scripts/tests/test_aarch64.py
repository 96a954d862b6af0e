"""The CPU kernels of all packages compiled for arm64 by a cross compiler, and compared with plain loops in an emulator.

Here too, for the instruction sets of this processor's family: the same programs have to agree on both.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from custom_ops.builds import operator_library
from native_build import INCLUDE_DIR, TORCH_VERSIONS, instruction_levels
from native_build.toolchain import cxx_compiler

ROOT = Path(__file__).resolve().parents[2]
LENSES = ROOT / "framework-internals"
KERNELS = sorted((LENSES / "custom-ops" / "csrc").rglob("cpu.cpp"))
STABLE = [
    *(path for path in sorted((LENSES / "custom-ops" / "csrc" / "stable").rglob("*.cpp")) if path.name != "jax.cpp"),
    LENSES / "rmsnorm-fused" / "csrc" / "stable.cpp",
]
PROGRAMS = {
    "simd": [ROOT / "shared" / "tests" / "native_build" / "simd.cpp"],
    "custom-ops": [LENSES / "custom-ops" / "tests" / "compared_kernels.cpp", *KERNELS],
    "rmsnorm-fused": [LENSES / "rmsnorm-fused" / "tests" / "compared_kernels.cpp"],
}
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# GCC 12 takes its own headers' undefined vectors for a mistake (GCC bug 105593).
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
FLAGS = ("-std=c++17", "-O2", "-fopenmp-simd", "-fno-trapping-math", f"-I{INCLUDE_DIR}", *WARNINGS)
LACKS_INSTRUCTIONS = -4  # SIGILL

needs_cross = pytest.mark.skipif(
    shutil.which(CROSS) is None or shutil.which(EMULATOR) is None,
    reason=f"no {CROSS} and {EMULATOR} (apt-get install g++-aarch64-linux-gnu qemu-user)",
)
pytestmark = pytest.mark.slow


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


@needs_cross
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_kernels_agree_with_plain_loops_on_arm64(name: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    compiled = run(CROSS, *FLAGS, *instruction_levels("aarch64")["neon"], "-static", *PROGRAMS[name], "-o", program)
    assert (compiled.stderr, compiled.returncode) == ("", 0)
    answer = run(EMULATOR, program)
    assert (answer.stdout, answer.returncode) == ("", 0)


@needs_cross
@pytest.mark.parametrize("source", STABLE, ids=lambda path: path.parent.name + "/" + path.name)
def test_the_operators_compile_for_arm64(source: Path) -> None:
    major, minor = TORCH_VERSIONS[0].split(".")
    target = f"-DTORCH_TARGET_VERSION={(int(major) << 56) | (int(minor) << 48):#x}ULL"
    headers = [*include_paths(), sysconfig.get_paths()["include"]]
    compiled = run(CROSS, *FLAGS, "-fsyntax-only", target, *(f"-isystem{path}" for path in headers), source)
    assert (compiled.stderr, compiled.returncode) == ("", 0)


@needs_cross
def test_the_levels_of_the_library_are_those_that_are_compiled(tmp_path: Path) -> None:
    """What cpu_levels.cpp declares is what the units define: otherwise the library does not link."""
    objects = []
    for index, source in enumerate([*KERNELS, operator_library.CSRC / "stable" / "cpu_levels.cpp"]):
        objects.append(tmp_path / f"{index}.o")
        level = () if source.parent.name in ("vector_add", "stable") else ("-DCUSTOM_OPS_LEVEL=neon",)
        compiled = run(CROSS, *FLAGS, "-O1", "-fPIC", *level, "-c", source, "-o", objects[-1])
        assert (compiled.stderr, compiled.returncode) == ("", 0)
    linked = run(CROSS, "-shared", "-Wl,--no-undefined", *objects, "-o", tmp_path / "library.so")
    assert (linked.stderr, linked.returncode) == ("", 0)


@pytest.mark.parametrize("level", instruction_levels())
@pytest.mark.parametrize("name", ["custom-ops", "rmsnorm-fused"])
def test_the_kernels_agree_with_plain_loops_here(name: str, level: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    compiled = run(cxx_compiler(), *FLAGS, *instruction_levels()[level], *PROGRAMS[name], "-o", program)
    assert (compiled.stderr, compiled.returncode) == ("", 0)
    answer = run(program)
    if answer.returncode == LACKS_INSTRUCTIONS:
        pytest.skip(f"this {platform.machine()} processor lacks the instruction set")
    assert (answer.stdout, answer.returncode) == ("", 0)
