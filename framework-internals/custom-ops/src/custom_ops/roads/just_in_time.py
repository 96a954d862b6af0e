"""pybind11, compiled at the first call on the user's machine by ``torch.utils.cpp_extension.load``."""

from __future__ import annotations

import functools
from typing import cast

import native_build
from custom_ops.roads.module import NAME, SOURCES, VectorAddModule


def missing() -> str | None:
    """Say why the module cannot be compiled here, with the remedy; None if it can, at least for the CPU."""
    if not SOURCES.is_dir():
        return f"the sources are not in {SOURCES} (install the package editable from its checkout)"
    return native_build.missing_cxx()


@functools.cache
def load() -> VectorAddModule:
    """Build the module if needed, with CUDA if possible, and import it.

    Returns:
        The module, always the same one within a process.

    Raises:
        native_build.BuildError: If there is no C++ compiler, or it fails.
    """
    cuda = native_build.missing_cuda() is None
    files = ["binding.cpp", "cpu.cpp", *(["cuda.cu"] if cuda else [])]
    module = native_build.load_extension(
        NAME,
        [SOURCES / file for file in files],
        cuda=cuda,
        # -fopenmp is for the compiler, not the linker: see csrc/vector_add/setup.py.
        cflags=("-fopenmp", *(["-DCUSTOM_OPS_WITH_CUDA"] if cuda else [])),
    )
    return cast(VectorAddModule, module)
