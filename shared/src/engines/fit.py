"""What an engine takes of its device's memory, and the size of a step at which several fit at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from benchkit.device import Device
from benchkit.processes import memory
from benchkit.results import SMALLER, Json
from engines.spec import EngineSpec, bench_config
from torch_baseline.config import GPTConfig, TrainConfig

# What a process takes before it has a model: a GPU's context and libraries; imports and a compiler's own memory.
_PROCESS: Mapping[Device, Mapping[str, int]] = {
    "cuda": {"torch": 800 << 20, "jax": 700 << 20},
    "cpu": {"torch": 1 << 30, "jax": 1 << 30},
}

# What an allocator holds: a multiple of what is expected to be in use, and what it leaves between its buffers. XLA
# keeps more of a step than torch, and leaves up to 128 MiB behind each large buffer.
_HELD = {"torch": 1.1, "jax": 1.25}
_BETWEEN: Mapping[Device, Mapping[str, int]] = {"cuda": {"torch": 0, "jax": 512 << 20}, "cpu": {"torch": 0, "jax": 0}}

# The same where all blocks are one loop, whose gradients XLA keeps twice.
_HELD_BY_A_SCAN = 1.5

# The largest part of a GPU that JAX reserves, which is what it does by itself.
_LARGEST_RESERVATION = 0.75

# Bytes for each attention score that XLA's own attention keeps over the step.
_SCORE = 6

# The shortest sequence that a step is made smaller to.
_SHORTEST = 128

# A model and the settings of its training.
Shapes = tuple[GPTConfig, TrainConfig]


def engine_bytes(spec: EngineSpec, model: GPTConfig, training: TrainConfig, device: Device) -> float:
    """Return about the most bytes that the process of an engine takes on one device."""
    return _PROCESS[device][spec.framework] + held_bytes(spec, model, training, device)


def held_bytes(spec: EngineSpec, model: GPTConfig, training: TrainConfig, device: Device) -> float:
    """Return about the most bytes that the allocator of an engine holds on one device."""
    from torch_baseline.throughput import activation_bytes, state_bytes

    active = activation_bytes(model, training, compiled=spec.compiled or spec.framework == "jax")
    if spec.framework == "jax" and spec.attention == "xla":
        active += _SCORE * training.batch_size * model.n_layer * model.n_head * model.block_size**2
    held = _HELD_BY_A_SCAN if spec.scan else _HELD[spec.framework]
    used = state_bytes(model, training.dtype) / spec.fsdp + active
    return held * used + _BETWEEN[device][spec.framework]


def jax_memory(reserved: float | None = None) -> dict[str, str]:
    """Return the environment of a process in which JAX takes so many bytes of each GPU at once, and no more.

    By itself JAX reserves three quarters of a GPU. Without a reservation (None) XLA takes regions, each twice the last,
    and keeps them all: 24 GiB where it uses 10.
    """
    if reserved is None:
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    import torch

    _, total = torch.cuda.mem_get_info()
    return {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "XLA_CLIENT_MEM_FRACTION": f"{min(reserved / total, _LARGEST_RESERVATION):.4f}",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "",  # the old name of the same; JAX refuses to have both
    }


def fitted(
    engines: Mapping[str, EngineSpec],
    model: GPTConfig,
    training: TrainConfig,
    *,
    device: Device,
    available: float,
    references: Sequence[str] = (),
) -> Shapes:
    """Return the largest step at which the references and any one of the other engines fit at once.

    The batch is halved first, then the number of blocks, then the length of a sequence.

    Args:
        engines: Engines by name; the first is a reference, as in :func:`engines.measure.measure_engines`.
        model: Shape of the model that is wanted.
        training: Settings with the batch that is wanted.
        device: Device of the engines.
        available: Bytes that are free there.
        references: Further engines that are alive all the time.
    """
    lasting = {next(iter(engines)), *references}

    def needs(shapes: Shapes) -> float:
        taken = {name: engine_bytes(spec, *shapes, device) for name, spec in engines.items()}
        others = [size for name, size in taken.items() if name not in lasting]
        return sum(taken[name] for name in lasting) + max(others, default=0)

    return memory.largest_that_fits(_sizes(model, training), needs, available)


def _sizes(model: GPTConfig, training: TrainConfig) -> Iterator[Shapes]:
    for batch in memory.halved(training.batch_size):
        yield model, (training := replace(training, batch_size=batch))
    for layers in memory.halved(model.n_layer):
        yield (model := replace(model, n_layer=layers)), training
    for length in memory.halved(model.block_size, _SHORTEST):
        yield replace(model, block_size=length), training


def fit_settings(
    settings: Mapping[str, Json],
    engines: Mapping[str, EngineSpec],
    *,
    device: Device,
    available: float,
    kept: float = 0,
    references: Sequence[str] = (),
) -> dict[str, Json]:
    """Return what :func:`fitted` changes in settings for :func:`engines.spec.bench_config`; empty if they fit.

    Args:
        settings: ``preset``, ``batch_size``, ``dtype`` and ``layers``.
        engines: See :func:`fitted`.
        device: See :func:`fitted`.
        available: See :func:`fitted`.
        kept: Bytes of these that the process takes which starts the engines.
        references: See :func:`fitted`.

    Returns:
        ``batch_size``, ``layers``, ``block_size``, and a sentence on them under :data:`benchkit.results.SMALLER`.
    """
    wanted = bench_config(
        settings["preset"], batch_size=settings["batch_size"], dtype=settings["dtype"], layers=settings["layers"]
    )
    chosen = fitted(engines, *wanted, device=device, available=available - kept, references=references)
    if chosen == wanted:
        return {}
    sizes = " instead of ".join(
        f"{training.batch_size} × {model.block_size} tokens (blocks: {model.n_layer})"
        for model, training in (chosen, wanted)
    )
    model, training = chosen
    return {
        "batch_size": training.batch_size,
        "layers": model.n_layer,
        "block_size": model.block_size,
        SMALLER: [f"the step takes {sizes}, since {memory.gib(available)} were free"],
    }
