"""Road B: the same sources, built ahead of time into a wheel (`pip wheel --no-build-isolation .`).

On its own on purpose: this is all that a package of one extension needs. Build isolation is off because the extension
must be compiled against the very torch that it will run with, not against a fresh download of another.
"""

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

with_cuda = torch.version.cuda is not None and CUDA_HOME is not None
# -fopenmp is for the compiler only: without a runtime of its own at link time, the extension runs on torch's threads.
# -g0 answers the -g of Python's own flags: the file is a third of the size without symbols for a debugger.
cxx_flags = ["-O3", "-g0", "-fopenmp"]

if with_cuda:
    extension = CUDAExtension(
        "custom_ops_vector_add",
        ["binding.cpp", "cpu.cpp", "cuda.cu"],
        extra_compile_args={"cxx": [*cxx_flags, "-DCUSTOM_OPS_WITH_CUDA"], "nvcc": ["-O3"]},
    )
else:
    extension = CppExtension("custom_ops_vector_add", ["binding.cpp", "cpu.cpp"], extra_compile_args={"cxx": cxx_flags})

setup(
    name="custom-ops-vector-add",
    version="0.1.0",
    description="vector_add for PyTorch through pybind11",
    python_requires=">=3.11,<3.14",
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
    py_modules=[],
)
