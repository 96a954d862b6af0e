"""The devices that JAX uses in a process, which torch may use too."""

from __future__ import annotations

import os

from benchkit import UserError
from benchkit.device import Device

# Else JAX reserves three quarters of a GPU's memory.
_SHARED_GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def process_environment(device: Device) -> dict[str, str]:
    """Return the environment variables of a process in which JAX uses a device."""
    return {**_SHARED_GPU, "JAX_PLATFORMS": "cpu"} if device == "cpu" else dict(_SHARED_GPU)


def share_the_gpu() -> None:
    """Keep JAX from reserving most of a GPU's memory, which torch needs too. Call it before JAX is used."""
    for name, value in _SHARED_GPU.items():
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
