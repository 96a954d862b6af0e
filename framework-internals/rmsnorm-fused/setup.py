"""What pyproject.toml cannot say: a wheel that carries the prebuilt library is for one platform, though for any Python."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

PACKAGE = Path(__file__).resolve().parent / "src" / "rmsnorm_fused"


class PlatformWheel(bdist_wheel):
    """Tags the wheel py3-none-<platform> where there is a library in the package, py3-none-any where there is none."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if any(PACKAGE.glob("*.so")):
            self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(cmdclass={"bdist_wheel": PlatformWheel})
