"""Build and load C++ and CUDA operators, just in time or ahead of time, and read the resources of CUDA kernels.

``include/native_build`` has the headers that kernels on a CPU share: vectors, 16-bit types, caches and large pages.
"""

from native_build.extension import BuildError, build_root, load_extension
from native_build.kernel_resources import KernelResources, compile_cuda
from native_build.stable_library import (
    ARCHITECTURES,
    TORCH_VERSIONS,
    LibraryError,
    LibraryRecord,
    Unit,
    build_library,
    build_library_once,
    cached_library,
    instruction_levels,
    load_library,
    load_module,
    read_record,
)
from native_build.toolchain import INCLUDE_DIR, find_nvcc, missing_cuda, missing_cxx, missing_gpu, missing_inductor

__all__ = [
    "ARCHITECTURES",
    "INCLUDE_DIR",
    "TORCH_VERSIONS",
    "BuildError",
    "KernelResources",
    "LibraryError",
    "LibraryRecord",
    "Unit",
    "build_library",
    "build_library_once",
    "build_root",
    "cached_library",
    "compile_cuda",
    "find_nvcc",
    "instruction_levels",
    "load_extension",
    "load_library",
    "load_module",
    "missing_cuda",
    "missing_cxx",
    "missing_gpu",
    "missing_inductor",
    "read_record",
]
