"""Building and loading C++ and CUDA operators just in time, and reading what a CUDA kernel uses."""

from native_build.extension import BuildError, load_extension
from native_build.kernel_resources import KernelResources, compile_cuda
from native_build.toolchain import find_nvcc, missing_cuda, missing_cxx

__all__ = [
    "BuildError",
    "KernelResources",
    "compile_cuda",
    "find_nvcc",
    "load_extension",
    "missing_cuda",
    "missing_cxx",
]
