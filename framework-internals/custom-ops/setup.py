"""Builds the wheel with the library of all operators, for any Python from 3.11 on.

Build it without isolation, `pip wheel --no-build-isolation --no-deps framework-internals/custom-ops`: the library is
compiled with the headers of the installed torch (and of jax, for the operators under jax.ffi). It works with every
version of torch that src/custom_ops/builds/operator_library.py names, whichever of them is installed here.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[1] / "shared" / "src"
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info")


class CopyShared(build_py):
    """Puts a copy of the shared packages into a wheel, which then needs torch and NumPy alone."""

    def run(self) -> None:  # noqa: D102
        super().run()
        if not self.editable_mode:
            copy = Path(self.build_lib, "custom_ops", "_shared")
            shutil.rmtree(copy, ignore_errors=True)  # an earlier build's
            shutil.copytree(SHARED, copy, ignore=LEFT_OUT)


class BuildLibrary(build_ext):
    """Builds the library for a wheel. An editable install builds nothing; the first call compiles the library."""

    def run(self) -> None:  # noqa: D102
        if not (self.inplace or self.editable_mode):
            super().run()

    def get_outputs(self) -> list[str]:  # noqa: D102
        return [] if self.inplace or self.editable_mode else super().get_outputs()

    def build_extension(self, ext: Extension) -> None:  # noqa: D102
        _load_recipe().build(Path(self.get_ext_fullpath(ext.name)))


def _load_recipe():  # type: ignore[no-untyped-def]
    """Load operator_library.py by its path; importing its package would look for the library that is being built."""
    sys.path.insert(0, str(SHARED))  # this checkout's native_build, even if another one is installed
    path = HERE / "src" / "custom_ops" / "builds" / "operator_library.py"
    spec = importlib.util.spec_from_file_location("custom_ops_operator_library", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup(
    ext_modules=[Extension("custom_ops._C", [], py_limited_api=True)],
    cmdclass={"build_ext": BuildLibrary, "build_py": CopyShared},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
