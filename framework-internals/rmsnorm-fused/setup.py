"""Builds the wheel with the prebuilt library, for any Python.

Build it without isolation, `pip wheel --no-build-isolation --no-deps framework-internals/rmsnorm-fused`: the library is
compiled with the headers of the installed torch. Without a C++ compiler the wheel has no library and fits any platform.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[1] / "shared" / "src"
# native_build says why there is none; an editable install, which builds nothing, must not need its requirements.
HAS_COMPILER = sys.platform == "linux" and shutil.which(os.environ.get("CXX", "c++")) is not None


class BuildPackage(build_py):
    """Puts the library and a copy of the shared packages into a wheel, which then needs torch and NumPy alone."""

    def run(self) -> None:  # noqa: D102
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib, "rmsnorm_fused")
        shutil.rmtree(package / "_shared", ignore_errors=True)  # an earlier build's
        shutil.copytree(SHARED, package / "_shared", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        sys.path.insert(0, str(SHARED))  # this checkout's native_build, even if another one is installed
        from native_build import find_nvcc, missing_cxx

        if HAS_COMPILER:
            _load_recipe().build(package, cuda=find_nvcc() is not None)
        else:
            print(f"the wheel has no C++ and CUDA C++ kernels: {missing_cxx()}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """Tags the wheel py3-none-<platform> if it contains the library, else py3-none-any."""

    def finalize_options(self) -> None:  # noqa: D102
        super().finalize_options()
        self.root_is_pure = not HAS_COMPILER

    def get_tag(self) -> tuple[str, str, str]:  # noqa: D102
        _, _, platform = super().get_tag()
        return "py3", "none", platform


def _load_recipe():  # type: ignore[no-untyped-def]
    """Load prebuild.py by its path; importing its package would look for the library that is being built."""
    path = HERE / "src" / "rmsnorm_fused" / "impl" / "prebuild.py"
    spec = importlib.util.spec_from_file_location("rmsnorm_fused_prebuild", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup(cmdclass={"bdist_wheel": PlatformWheel, "build_py": BuildPackage})
