"""The kernels as one prebuilt library for machines without a compiler: its path, and how it is compiled."""

from __future__ import annotations

import os
from pathlib import Path

from native_build import ARCHITECTURES, TORCH_VERSIONS, BuildError, Unit, build_library, find_nvcc, instruction_levels

VARIABLE = "RMSNORM_FUSED_LIBRARY"
FILE_NAME = "rms_norm_prebuilt.so"
HERE = Path(__file__).resolve().parents[1]  # the package's folder, where a wheel carries the library
CSRC = HERE.parents[1] / "csrc"  # in a checkout alone


def library_path() -> Path:
    """The path of the library: the one that the environment variable names, or one in the package's folder."""
    return Path(os.environ[VARIABLE]) if is_asked_for() else HERE / FILE_NAME


def is_asked_for() -> bool:
    """Whether the environment variable names a library, which is then used even if there is a compiler."""
    return bool(os.environ.get(VARIABLE))


def build(folder: Path = HERE, *, cuda: bool = True, architectures: tuple[str, ...] = ARCHITECTURES) -> Path:
    """Compile the library.

    Args:
        folder: Output folder; by default the one where the package looks for the library.
        cuda: Whether to include the CUDA kernels; needs nvcc, but no GPU.
        architectures: Target architectures of the CUDA kernels.

    Returns:
        The path of the library.

    Raises:
        BuildError: If a tool or the sources are missing, or a source does not compile.
    """
    if not CSRC.is_dir():
        raise BuildError(f"the C++ sources are not in {CSRC} (install the package editable from its checkout)")
    if cuda and find_nvcc() is None:
        raise BuildError("no nvcc (install the CUDA toolkit, set CUDA_HOME to its folder, or use --no-cuda)")
    units = [Unit(path) for path in sorted(CSRC.glob("*.cu"))] if cuda else []
    units += [
        Unit(CSRC / "rms_norm_cpu.cpp", ("-fopenmp-simd", f"-DRMS_NORM_CPU_LEVEL={level}", *flags))
        for level, flags in instruction_levels().items()
    ]
    units.append(Unit(CSRC / "stable.cpp", ("-DRMS_NORM_CUDA",) if cuda else ()))
    output = folder / FILE_NAME
    build_library(
        "rmsnorm_fused", units, output, torch_versions=TORCH_VERSIONS, architectures=architectures if cuda else ()
    )
    return output
