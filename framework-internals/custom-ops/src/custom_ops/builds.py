"""Which build of the kernels serves ``torch.ops.custom_ops``, and why not another.

An installed wheel is taken before a compilation. What was chosen is never changed behind the caller's back: a wheel
that is installed but does not fit is an error, not a reason to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import native_build
from benchkit.progress import working
from custom_ops.roads import ahead_of_time, just_in_time
from custom_ops.roads.module import VectorAddModule

Road = Literal["ahead-of-time", "just-in-time"]


@dataclass(frozen=True)
class BuildInfo:
    """The build that serves the operators in this process.

    Attributes:
        road: how it was, or at the first call will be, built; None where no road is open.
        cuda: whether CUDA kernels are in it.
        file: the shared library; None before the first call has loaded it.
        not_served: what this build is without, and why with the remedy: the other road, or CUDA kernels.
    """

    road: Road | None
    cuda: bool
    file: Path | None
    not_served: Mapping[str, str]


def build_info() -> BuildInfo:
    """Say which build serves the operators, and why not another; builds nothing.

    Raises:
        native_build.BuildError: when a wheel is installed that does not fit this torch.
    """
    road, not_served = _choose()
    file = Path(extension().__file__) if extension.cache_info().currsize else None
    if road == "ahead-of-time":
        cuda = ahead_of_time.load().with_cuda
        if not cuda:
            not_served["CUDA kernels"] = "the installed wheel was built without them (build it where nvcc is)"
    else:
        reason = native_build.missing_cuda()
        cuda = road is not None and reason is None
        if reason is not None:
            not_served["CUDA kernels"] = reason
    return BuildInfo(road, cuda, file, not_served)


@functools.cache
def extension() -> VectorAddModule:
    """Load the build that serves the operators, compiling it first if it has to be.

    Raises:
        native_build.BuildError: when no road is open, or the one chosen fails.
    """
    road, not_served = _choose()
    if road == "ahead-of-time":
        return ahead_of_time.load()
    if road == "just-in-time":
        with working(f"loading the kernels (compiled once for torch {torch.__version__})"):
            return just_in_time.load()
    raise native_build.BuildError(
        "no build of custom_ops: " + "; ".join(f"{what}: {why}" for what, why in not_served.items())
    )


def _choose() -> tuple[Road | None, dict[str, str]]:
    if (no_wheel := ahead_of_time.missing()) is None:
        return "ahead-of-time", {"just-in-time": "an installed wheel is taken first (pip uninstall it to compile here)"}
    not_served = {"ahead-of-time": no_wheel}
    if (no_compiler := just_in_time.missing()) is None:
        return "just-in-time", not_served
    return None, {**not_served, "just-in-time": no_compiler}
