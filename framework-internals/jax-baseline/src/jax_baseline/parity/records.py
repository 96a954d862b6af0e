"""The records of the parity part, see :mod:`benchkit.typed_records`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchkit import Quantity
from benchkit.typed_records import TypedRecord


@dataclass(frozen=True)
class Deviation:
    """Largest deviations of one quantity over all steps."""

    jax: Quantity
    control: Quantity  # largest deviation of the permuted references from torch
    ratio: Quantity  # largest ratio of JAX's deviation to what the permuted references had reached by that step


@dataclass(frozen=True)
class ParityRecord(TypedRecord, name="parity", labels=("dtype", "steps", "batch_size")):
    """A comparison of JAX with torch."""

    dtype: str
    steps: int
    batch_size: int
    deviations: Mapping[str, Deviation]  # deviations by quantity, a member of ``jax_baseline.parity.REPORTED``
    times_control: Quantity  # bound of JAX's deviation, in multiples of the permuted references' deviation
    torch: tuple[float, ...]
    jax: tuple[float, ...]
    controls: tuple[tuple[float, ...], ...]
    bounds: tuple[float, ...]  # bound of JAX's loss at each step
    divergence: str | None  # where JAX first leaves its bounds. None if it does not


@dataclass(frozen=True)
class MistakeRecord(TypedRecord, name="planted mistake", labels=("mistake",)):
    """One planted mistake, or the correct step."""

    mistake: str  # name of the mistake. Empty for the correct step
    times: Quantity  # deviation over the bound where the mistake was caught
    step: int | None  # step at which it was caught. None if it was not
    where: str  # quantity or parameter that showed it first. Empty if it was not caught


@dataclass(frozen=True)
class MeshRecord(TypedRecord, name="mesh", labels=("data", "fsdp")):
    """Training steps on a mesh of emulated devices."""

    data: int  # number of replicas of the weights
    fsdp: int  # number of devices that share one replica
    state: Quantity  # bytes of weights and optimizer state on one device
    difference: Quantity  # largest difference of a loss from one device
    collectives: Mapping[str, int]
    losses: tuple[float, ...]
    controls: tuple[tuple[float, ...], ...]  # losses of one device with the rows of the batch in another order


@dataclass(frozen=True)
class ConvergedRecord(TypedRecord, name="converged", labels=("seed",)):
    """Validation losses of one seed after the last step, in bits per held-out byte."""

    seed: int
    torch: Quantity
    jax: Quantity


@dataclass(frozen=True)
class ConvergenceRecord(TypedRecord, name="convergence"):
    """The comparison of full training runs over all seeds."""

    difference: Quantity  # mean of JAX's loss minus torch's
    seed_noise: Quantity  # standard deviation of torch's loss over the seeds
    unigram: Quantity  # entropy of single bytes
    alike: bool  # whether the frameworks reach the same loss
