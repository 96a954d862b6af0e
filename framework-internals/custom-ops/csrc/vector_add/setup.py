"""Example 1, ahead of time: the same sources, built into a wheel (`pip wheel --no-build-isolation .`).

This file is complete on purpose: a package with one extension needs nothing else. Build isolation is off because the
extension must be compiled against the installed torch, with which it will run, and not against another download.
"""

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

from native_build import INCLUDE_DIR

with_cuda = torch.version.cuda is not None and CUDA_HOME is not None
# -fopenmp is for the compiler only: without linking an OpenMP runtime, the extension uses torch's threads.
# -g0 overrides the -g of Python's own flags: without debug symbols, the file is a third of the size.
cxx_flags = ["-O3", "-g0", "-fopenmp"]
# Linked before the compiler's own: a toolchain that has libstdc++ only as an archive would put a second copy into the
# wheel, and the first error message with a number would crash (torch's streams with the copy's locale).
link_flags = ["-l:libstdc++.so.6"]

if with_cuda:
    extension = CUDAExtension(
        "custom_ops_vector_add",
        ["binding.cpp", "cpu.cpp", "cuda.cu"],
        extra_compile_args={"cxx": [*cxx_flags, "-DCUSTOM_OPS_WITH_CUDA"], "nvcc": ["-O3"]},
        include_dirs=[str(INCLUDE_DIR)],  # 16-bit types
        extra_link_args=link_flags,
    )
else:
    extension = CppExtension(
        "custom_ops_vector_add",
        ["binding.cpp", "cpu.cpp"],
        extra_compile_args={"cxx": cxx_flags},
        include_dirs=[str(INCLUDE_DIR)],  # 16-bit types
        extra_link_args=link_flags,
    )

setup(
    name="custom-ops-vector-add",
    version="0.1.0",
    description="vector_add for PyTorch through pybind11",
    python_requires=">=3.11,<3.14",
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
    py_modules=[],
)
