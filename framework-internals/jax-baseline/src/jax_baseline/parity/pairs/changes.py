"""How two changes of one piece of state differ, in words."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_CLOSE = 1e-6  # of the change that a sentence has to explain


def momentum_of(model: torch.nn.Module, name: str) -> float | None:
    """The ``momentum`` of the module that a buffer belongs to: torch's part of the new in a running statistic."""
    found = getattr(model.get_submodule(name.rpartition(".")[0]), "momentum", None)
    return found if isinstance(found, float) else None


def is_unread_counter(model: torch.nn.Module, name: str) -> bool:
    """Whether a buffer is the count of a BatchNorm's batches, which torch reads only if there is no momentum."""
    return name.rpartition(".")[2] == "num_batches_tracked" and momentum_of(model, name) is not None


def difference_of_changes(ours: NDArray, theirs: NDArray, old: NDArray, momentum: float | None) -> str:
    """Say what JAX's new value is beside torch's; empty if neither of two explanations fits.

    ``old`` is the value before, the same in both.
    """
    if ours.shape != theirs.shape:
        return ""
    if (factor := _factor(ours - old, theirs - old)) is not None:
        return f"JAX's changes {factor:.6g} times as far"
    if momentum is None:
        return ""
    kept = (1 - momentum) * old
    factor = _factor(ours - kept, theirs - kept)
    count = 0.0 if factor is None or factor >= 1 else 1 / (1 - factor)
    if count >= 2 and abs(count - round(count)) < _CLOSE * count:
        return f"JAX's has the variance over n = {round(count)}, torch's that over n − 1"
    return ""


def _factor(ours: NDArray, theirs: NDArray) -> float | None:
    """The number by which one array is the other, if there is one."""
    factor = float((ours * theirs).sum() / max(float((theirs * theirs).sum()), 1e-300))
    return factor if np.linalg.norm(ours - factor * theirs) <= _CLOSE * np.linalg.norm(ours) else None
