"""Shardings of the state and the batch on a mesh of devices. XLA inserts the collectives that they need.

The mesh has two axes. ``data`` replicates the weights and splits the batch. ``fsdp`` splits the batch, the weights and
the optimizer state (ZeRO, Rajbhandari et al. 2020); XLA gathers the weights where a layer needs them.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from benchkit import UserError
from jax_baseline.gpt.model import Block
from jax_baseline.gpt.train import TrainState

DATA, FSDP = "data", "fsdp"

_COLLECTIVES = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-start)?\("
)


def make_mesh(data: int, fsdp: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh of ``data`` × ``fsdp`` devices.

    The first of the devices are taken; the default is those of JAX's default backend, over all processes.

    Raises:
        UserError: If there are too few devices.
    """
    devices = jax.devices() if devices is None else devices
    wanted = data * fsdp
    if len(devices) < wanted:
        raise UserError(
            f"a mesh of {data} × {fsdp} needs {wanted} devices, there are {len(devices)} "
            f"({devices[0].platform}); on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
        )
    return Mesh(np.array(devices[:wanted]).reshape(data, fsdp), (DATA, FSDP))


def batch_sharding(mesh: Mesh, *, stacked: bool = False) -> NamedSharding:
    """Return the sharding of a batch: rows are split over all devices. ``stacked`` batches have a leading step axis."""
    rows = (DATA, FSDP)
    return NamedSharding(mesh, PartitionSpec(None, rows) if stacked else PartitionSpec(rows))


def state_sharding(state: TrainState, mesh: Mesh) -> TrainState:
    """Return the sharding of a state: each array is split along its first axis that ``fsdp`` divides, else replicated.

    The layer axis of stacked blocks is not split, because a scan takes one layer at a time.
    """
    stacked = isinstance(state.params.blocks, Block)

    def place(path: tuple[object, ...], leaf: jax.Array) -> NamedSharding:
        layers = stacked and any(getattr(key, "name", None) == "blocks" for key in path)
        shares = mesh.shape[FSDP]
        for axis in range(1 if layers else 0, leaf.ndim):
            if shares > 1 and leaf.shape[axis] % shares == 0:
                return NamedSharding(mesh, PartitionSpec(*[None] * axis, FSDP))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, state)


def spread(state: TrainState, shardings: TrainState) -> TrainState:
    """Return the state sharded over the devices of all processes. Each process passes the whole arrays."""
    return jax.tree.map(lambda leaf, sharding: spread_array(np.asarray(leaf), sharding), state, shardings)


def spread_array(array: NDArray, sharding: NamedSharding) -> jax.Array:
    """Return one array with this sharding. Each process provides the parts of its own devices."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def to_mesh(tokens: tuple[NDArray, ...], mesh: Mesh) -> tuple[jax.Array, ...]:
    """Return a batch, or several batches stacked along a first axis, with the rows split over the mesh."""
    return tuple(spread_array(part.astype(np.int32), batch_sharding(mesh, stacked=part.ndim == 3)) for part in tokens)


def gathered(tree: Any) -> Any:
    """Return arrays that are spread over several processes as whole ones. All processes must call it."""
    return multihost_utils.process_allgather(tree, tiled=True) if jax.process_count() > 1 else tree


def count_collectives(text: str) -> dict[str, int]:
    """Return the number of collective instructions in optimised HLO by kind.

    An instruction in the body of a loop counts once, and so does one that combines many arrays.
    """
    return dict(collections.Counter(_COLLECTIVES.findall(text)))


def require_divisible(batch_size: int, accumulation: int, mesh: Mesh) -> None:
    """Check that every device gets the same number of rows.

    Raises:
        UserError: If the batch size is not a multiple of devices · accumulation.
    """
    parts = math.prod(mesh.shape.values()) * accumulation
    if batch_size % parts:
        raise UserError(
            f"batch_size must be a multiple of devices · accumulation = {parts}, got {batch_size}; "
            f"{-(-batch_size // parts) * parts} would do"
        )
