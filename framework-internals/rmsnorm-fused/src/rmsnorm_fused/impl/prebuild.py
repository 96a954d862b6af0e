"""The instruction set of the CPU kernels; the prebuilt library for machines without a compiler: its path, its build."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from benchkit import UserError
from benchkit.processes.resources import cannot_write
from benchkit.results import write_bytes_atomically
from native_build import (
    ARCHITECTURES,
    TORCH_VERSIONS,
    BuildError,
    Unit,
    build_library_once,
    find_nvcc,
    instruction_levels,
)

VARIABLE = "RMSNORM_FUSED_LIBRARY"
LEVEL_VARIABLE = "RMSNORM_FUSED_CPU"
FILE_NAME = "rms_norm_prebuilt.so"
HERE = Path(__file__).resolve().parents[1]  # the package's folder, where a wheel carries the library
CSRC = HERE.parents[1] / "csrc"  # in a checkout alone
THREADS = Unit(CSRC / "cpu" / "parallel.cpp")


def library_path() -> Path:
    """The path of the library: the one that the environment variable names, or one in the package's folder."""
    return Path(os.environ[VARIABLE]) if is_asked_for() else HERE / FILE_NAME


def is_asked_for() -> bool:
    """Whether the environment variable names a library, which is then used even if there is a compiler."""
    return bool(os.environ.get(VARIABLE))


def cpu_level() -> str:
    """The instruction set of the CPU kernels, a key of :func:`native_build.instruction_levels`.

    It is the one that torch found on this processor, instead of ``-march=native``: it is part of the build's key, so a
    cache on a shared file system never gives the instructions of one machine to another. ``RMSNORM_FUSED_CPU`` names a
    lower one.

    Raises:
        UserError: If the variable names a level that is unknown, or that this processor or torch does not have.
    """
    best = {"AVX512": "avx512", "AVX2": "avx2"}.get(torch.backends.cpu.get_cpu_capability(), "baseline")
    levels = list(instruction_levels())  # from the lowest on
    usable = levels[: levels.index(best) + 1] if best in levels else levels[:1]
    asked = os.environ.get(LEVEL_VARIABLE) or usable[-1]
    if asked not in usable:
        raise UserError(f"{LEVEL_VARIABLE}: expected one of {', '.join(usable)} on this machine, got {asked!r}")
    return asked


def cuda_units() -> list[Unit]:
    """The CUDA kernels, one unit a file."""
    return [Unit(path) for path in sorted((CSRC / "cuda").glob("*.cu"))]


def build(
    folder: Path = HERE,
    *,
    cuda: bool = True,
    architectures: tuple[str, ...] = ARCHITECTURES,
    levels: Sequence[str] = tuple(instruction_levels()),
) -> Path:
    """Compile the library, unless the user's cache has it; with CUDA this needs nvcc, but no GPU.

    Args:
        folder: Where the library is written.
        cuda: Whether it has CUDA kernels.
        architectures: For which GPUs these are, as :func:`native_build.build_library` takes them.
        levels: Instruction sets of the CPU kernels, of :func:`native_build.instruction_levels`. The lowest belongs to
            them, because every processor has to find one.

    Returns:
        The path of the library.

    Raises:
        BuildError: If a tool or the sources are missing, or a source does not compile.
        UserError: If the output cannot be written.
    """
    if not CSRC.is_dir():
        raise BuildError(f"the C++ sources are not in {CSRC} (install the package editable from its checkout)")
    if cuda and find_nvcc() is None:
        raise BuildError("no nvcc (install the CUDA toolkit, set CUDA_HOME to its folder, or use --no-cuda)")
    output = folder / FILE_NAME
    if (reason := cannot_write(folder)) is not None:  # instead of minutes later, when all is compiled
        raise BuildError(f"{output} cannot be written: {reason}; name another folder with --out")
    units = cuda_units() if cuda else []
    units += [
        Unit(CSRC / "cpu" / "rms_norm.cpp", ("-fopenmp-simd", f"-DRMS_NORM_CPU_LEVEL={level}", *flags))
        for level, flags in instruction_levels().items()
        if level in levels
    ]
    has = tuple(f"-DRMS_NORM_HAS_{level.upper()}" for level in levels)
    units += [THREADS, Unit(CSRC / "stable.cpp", (*has, "-DRMS_NORM_CUDA") if cuda else has)]
    built = build_library_once(
        "rmsnorm_fused", units, torch_versions=TORCH_VERSIONS, architectures=architectures if cuda else ()
    )
    write_bytes_atomically(output, built.read_bytes())
    return output
