"""The devices that JAX uses in a process, which torch may use too."""

from __future__ import annotations

import os
from collections.abc import Mapping

from benchkit import UserError
from benchkit.device import Device
from benchkit.processes.memory import free
from engines.fit import jax_memory

# What the process of the lens takes of a GPU, where it compares both frameworks, while others are measured.
TAKEN_BY_PARITY: Mapping[Device, int] = {"cuda": 1 << 30, "cpu": 0}

# The part of a GPU's free memory that JAX reserves where it is alone; its libraries take theirs from the rest.
_RESERVED = 0.85


def process_environment(device: Device, *, alone: bool = False) -> dict[str, str]:
    """Return the environment variables of a process in which JAX uses a device.

    Args:
        device: Device that JAX uses.
        alone: Whether no other process takes memory of a GPU meanwhile. JAX then reserves what is free, see
            :func:`engines.fit.jax_memory`.
    """
    if device == "cpu":
        return {**jax_memory(), "JAX_PLATFORMS": "cpu"}
    return jax_memory(_RESERVED * free(device) if alone else None)


def share_the_gpu() -> None:
    """Keep JAX from reserving most of a GPU's memory, which torch needs too. Call it before JAX is used."""
    for name, value in jax_memory().items():
        os.environ.setdefault(name, value)


def require_jax_device(device: Device) -> None:
    """Check that JAX can use the device, and make the first GPU the current one of torch.

    Raises:
        UserError: If JAX has no such device.
    """
    import jax

    try:
        jax.devices(device)
    except RuntimeError as error:
        raise UserError(
            f"JAX sees no device {device!r} (it has {jax.default_backend()}); for a GPU install jax[cuda13], or use "
            "--device cpu"
        ) from error
    if device == "cuda":
        import torch

        # JAX initialises the GPUs in order, which leaves the last one current. torch's "cuda" is the current GPU.
        torch.cuda.set_device(0)
