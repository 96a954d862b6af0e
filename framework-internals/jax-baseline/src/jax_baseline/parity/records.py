"""The records of the parity part, see :mod:`benchkit.typed_records`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchkit import Quantity
from benchkit.typed_records import TypedRecord


@dataclass(frozen=True)
class Deviation:
    """Largest deviations of one quantity over all steps.

    Attributes:
        control: Largest deviation of the permuted references from torch.
        ratio: Largest ratio of JAX's deviation to what the permuted references had reached by that step.
    """

    jax: Quantity
    control: Quantity
    ratio: Quantity


@dataclass(frozen=True)
class ParityRecord(TypedRecord, name="parity", labels=("dtype", "steps", "batch_size")):
    """A comparison of JAX with torch.

    Attributes:
        deviations: Deviations by quantity, a member of ``jax_baseline.parity.REPORTED``.
        times_control: Bound of JAX's deviation, in multiples of the permuted references' deviation.
        bounds: Bound of JAX's loss at each step.
        divergence: Where JAX first leaves its bounds. None if it does not.
    """

    dtype: str
    steps: int
    batch_size: int
    deviations: Mapping[str, Deviation]
    times_control: Quantity
    torch: tuple[float, ...]
    jax: tuple[float, ...]
    controls: tuple[tuple[float, ...], ...]
    bounds: tuple[float, ...]
    divergence: str | None


@dataclass(frozen=True)
class MistakeRecord(TypedRecord, name="planted mistake", labels=("mistake",)):
    """One planted mistake, or the correct step.

    Attributes:
        mistake: Name of the mistake. Empty for the correct step.
        times: Deviation over the bound where the mistake was caught.
        step: Step at which it was caught. None if it was not.
        where: Quantity or parameter that showed it first. Empty if it was not caught.
    """

    mistake: str
    times: Quantity
    step: int | None
    where: str


@dataclass(frozen=True)
class MeshRecord(TypedRecord, name="mesh", labels=("data", "fsdp")):
    """Training steps on a mesh of emulated devices.

    Attributes:
        data: Number of replicas of the weights.
        fsdp: Number of devices that share one replica.
        state: Bytes of weights and optimizer state on one device.
        difference: Largest difference of a loss from one device.
        controls: Losses of one device with the rows of the batch in another order.
    """

    data: int
    fsdp: int
    state: Quantity
    difference: Quantity
    collectives: Mapping[str, int]
    losses: tuple[float, ...]
    controls: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ConvergedRecord(TypedRecord, name="converged", labels=("seed",)):
    """Validation losses of one seed after the last step, in bits per held-out byte."""

    seed: int
    torch: Quantity
    jax: Quantity


@dataclass(frozen=True)
class ConvergenceRecord(TypedRecord, name="convergence"):
    """The comparison of full training runs over all seeds.

    Attributes:
        difference: Mean of JAX's loss minus torch's.
        seed_noise: Standard deviation of torch's loss over the seeds.
        unigram: Entropy of single bytes.
        alike: Whether the frameworks reach the same loss.
    """

    difference: Quantity
    seed_noise: Quantity
    unigram: Quantity
    alike: bool
