"""One loop on many devices: where its arrays lie says how it is spread, and XLA puts in the collectives.

Two axes: ``data`` copies the weights and divides the batch; ``fsdp`` divides the batch as well, and the weights and the
optimizer's state with it (ZeRO, Rajbhandari et al. 2020), gathered where a layer needs them.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from benchkit import UserError
from jax_baseline.gpt.model import Block
from jax_baseline.gpt.train import TrainState

DATA, FSDP = "data", "fsdp"

_COLLECTIVES = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-start)?\("
)


def make_mesh(data: int = 1, fsdp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh of ``data`` × ``fsdp`` devices.

    Args:
        data: copies of the weights.
        fsdp: shares that each copy is divided into.
        devices: to take the first ones of; by default all of the default back end, over all processes.

    Raises:
        UserError: if there are not so many.
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
    """Return how a batch lies: every device has its rows; ``stacked`` batches have an axis of steps before them."""
    rows = (DATA, FSDP)
    return NamedSharding(mesh, PartitionSpec(None, rows) if stacked else PartitionSpec(rows))


def state_sharding(state: TrainState, mesh: Mesh) -> TrainState:
    """Return how a state lies: each array divided along its first axis that ``fsdp`` divides, or copied.

    The axis of layers of stacked blocks is left whole: a scan takes one layer at a time.
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
    """Return arrays that every process holds whole, spread over the devices of all of them."""
    return jax.tree.map(lambda leaf, sharding: spread_array(np.asarray(leaf), sharding), state, shardings)


def spread_array(array: NDArray, sharding: NamedSharding) -> jax.Array:
    """Return one array, each process giving the part that its devices hold."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def to_mesh(tokens: tuple[NDArray, ...], mesh: Mesh) -> tuple[jax.Array, ...]:
    """Return a batch, or several stacked along a first axis, with its rows divided over the devices of a mesh."""
    return tuple(spread_array(part.astype(np.int32), batch_sharding(mesh, stacked=part.ndim == 3)) for part in tokens)


def count_collectives(text: str) -> dict[str, int]:
    """Return the collective instructions of optimised HLO by kind.

    One may be run several times (in a loop's body), and one may carry many arrays.
    """
    return dict(collections.Counter(_COLLECTIVES.findall(text)))


def require_divisible(batch_size: int, accumulation: int, mesh: Mesh) -> None:
    """Check that every device gets the same number of rows.

    Raises:
        UserError: if not.
    """
    parts = math.prod(mesh.shape.values()) * accumulation
    if batch_size % parts:
        raise UserError(
            f"batch_size must be a multiple of devices · accumulation = {parts}, got {batch_size}; "
            f"{-(-batch_size // parts) * parts} would do"
        )
