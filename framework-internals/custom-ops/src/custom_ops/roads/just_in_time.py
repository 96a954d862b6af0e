"""Road A: pybind11, compiled at the first call on the user's machine, through ``torch.utils.cpp_extension.load``."""

from __future__ import annotations

import functools
from typing import cast

import native_build
from custom_ops.roads.module import NAME, SOURCES, VectorAddModule


def missing() -> str | None:
    """Why this road is closed here, with the remedy; None where it is open (for the CPU at least)."""
    if not SOURCES.is_dir():
        return f"the sources are not beside the package, in {SOURCES} (install it from a checkout: pip install -e)"
    return native_build.missing_cxx()


@functools.cache
def load() -> VectorAddModule:
    """Build the module if need be, for CUDA too where that is possible, and import it.

    Returns:
        The module; within one process always the same.

    Raises:
        native_build.BuildError: If there is no C++ compiler, or it fails.
    """
    cuda = native_build.missing_cuda() is None
    files = ["binding.cpp", "cpu.cpp", *(["cuda.cu"] if cuda else [])]
    module = native_build.load_extension(
        NAME,
        [SOURCES / file for file in files],
        cuda=cuda,
        # -fopenmp is for the compiler only: see setup.py of the other road.
        cflags=("-fopenmp", *(["-DCUSTOM_OPS_WITH_CUDA"] if cuda else [])),
    )
    return cast(VectorAddModule, module)
