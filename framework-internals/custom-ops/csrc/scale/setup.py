"""Example 2: TORCH_LIBRARY, a hand-written module, one wheel for every Python (`pip wheel --no-build-isolation .`).

The wheel's name says abi3, for any Python from 3.11 on. It does not say that the wheel works with one version of torch
only.
"""

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

from native_build import INCLUDE_DIR

with_cuda = torch.version.cuda is not None and CUDA_HOME is not None
cxx_flags = ["-O3", "-g0", "-fopenmp", *(["-DCUSTOM_OPS_CUDA"] if with_cuda else [])]
sources = ["library.cpp", "module.cpp", "cpu.cpp", *(["cuda.cu"] if with_cuda else [])]

setup(
    name="custom-ops-scale",
    version="0.1.0",
    description="scale for PyTorch through TORCH_LIBRARY",
    python_requires=">=3.11,<3.14",
    packages=["custom_ops_scale"],
    package_dir={"custom_ops_scale": "package"},
    ext_modules=[
        (CUDAExtension if with_cuda else CppExtension)(
            "custom_ops_scale._C",
            sources,
            extra_compile_args={"cxx": cxx_flags, "nvcc": ["-O3"]},
            include_dirs=[str(INCLUDE_DIR)],
            extra_link_args=["-l:libstdc++.so.6"],  # see csrc/vector_add/setup.py
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
