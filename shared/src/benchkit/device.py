"""Which device a measurement runs on."""

from __future__ import annotations

import sys
import warnings
from typing import Literal

from benchkit.errors import UserError

Device = Literal["cpu", "cuda"]


def resolve_device(requested: str) -> Device:
    """Turn a ``--device`` value into the device to use.

    Args:
        requested: ``"auto"`` (CUDA if torch sees a GPU, else the CPU), ``"cpu"`` or ``"cuda"``.

    Returns:
        ``"cpu"`` or ``"cuda"``.

    Raises:
        UserError: For any other word, and for ``"cuda"`` if torch sees no GPU: an explicit request never falls back.
    """
    if requested not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device takes auto, cpu or cuda, got {requested!r}")
    if requested == "cpu":
        return "cpu"
    import torch

    with warnings.catch_warnings(record=True) as driver:  # torch warns of a driver that is too old for it
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return "cuda"
    complaint = next((str(warning.message).strip().splitlines()[0] for warning in driver), None)
    if requested == "auto":
        if complaint is not None:
            print(f"the CPU is used, because torch cannot use the GPU: {complaint}", file=sys.stderr)
        return "cpu"
    why = complaint or ("this torch is a CPU build" if torch.version.cuda is None else "torch sees no CUDA GPU")
    raise UserError(f"--device cuda was asked for, but {why} (torch {torch.__version__}); use --device cpu")
