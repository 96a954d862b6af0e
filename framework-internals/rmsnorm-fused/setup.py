"""Tags a wheel with the prebuilt library for one platform and any Python."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

LIBRARY = Path(__file__).resolve().parent / "src" / "rmsnorm_fused" / "rms_norm_prebuilt.so"


class PlatformWheel(bdist_wheel):
    """Tags the wheel py3-none-<platform> if it contains the library, else py3-none-any."""

    def finalize_options(self) -> None:  # noqa: D102
        super().finalize_options()
        self.root_is_pure = not LIBRARY.exists()

    def get_tag(self) -> tuple[str, str, str]:  # noqa: D102
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(cmdclass={"bdist_wheel": PlatformWheel})
