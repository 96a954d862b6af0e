"""The loop around the step: batches, validation, and a stop at the first number that is not finite."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from benchkit.device import Device
from jax_baseline.model import Attention, Params, loss, xla_attention
from jax_baseline.optim import compute_dtype
from jax_baseline.train import initial_state, make_train_step, require_jax_device
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.data import Bytes, batch, load_corpus, require_length, unigram_entropy_bits, validation_batches

_BITS_PER_NAT = 1 / math.log(2)


class NonFiniteError(RuntimeError):
    """A loss or gradient norm became infinite or not a number."""


@dataclass(frozen=True)
class StepLog:
    """One step.

    Attributes:
        step: steps done, this one included.
        loss: before the update, nats per byte.
        gradient_norm: before clipping.
        tokens_per_second: of this step; the first holds the compilation.
    """

    step: int
    loss: float
    gradient_norm: float
    tokens_per_second: float


@dataclass(frozen=True)
class Summary:
    """What came of a run.

    Attributes:
        steps: done.
        bits: validation loss after the last step, bits per byte.
        unigram_bits: entropy of the held-out bytes' frequencies, the best without knowledge of order.
        first_step_seconds: compilation included.
        params: the trained weights.
    """

    steps: int
    bits: float
    unigram_bits: float
    first_step_seconds: float
    params: Params


def run(
    model: GPTConfig,
    config: TrainConfig,
    *,
    device: Device = "cpu",
    attention: Attention = xla_attention,
    report: Callable[[StepLog], None] = lambda log: None,
) -> Summary:
    """Train on the batches, and with the schedule, that ``torch_baseline`` would.

    Args:
        model: the shape.
        config: steps, batch, precision, accumulation, optimizer, data; what this loop does not have yet (averaged
            weights, checkpoints, early stopping, several processes) must be left at its default.
        device: where to run.
        attention: see :func:`jax_baseline.model.forward`.
        report: called after every step.

    Raises:
        UserError: for data that cannot be used, or a device that JAX does not see.
        ValueError: for a setting that this loop does not have.
        NonFiniteError: naming the step.
    """
    _require_supported(config)
    require_jax_device(device)
    corpus = load_corpus(config.data)
    require_length(corpus, model.block_size)
    with jax.enable_x64(config.dtype == "float64"), jax.default_device(jax.devices(device)[0]):
        state = initial_state(model, config)
        step = make_train_step(model, config, attention=attention)
        first = math.nan
        for index in range(config.steps):
            start = time.perf_counter()
            tokens = batch(corpus.train, config.seed, index, config.batch_size, model.block_size)
            state, metrics = step(state, *(part.astype(np.int32) for part in tokens))
            found, norm = float(metrics.loss), float(metrics.gradient_norm)
            seconds = time.perf_counter() - start
            first = seconds if index == 0 else first
            if not (math.isfinite(found) and math.isfinite(norm)):
                raise NonFiniteError(f"step {index + 1}: the loss is {found}, the gradient norm {norm}")
            report(StepLog(index + 1, found, norm, config.batch_size * model.block_size / seconds))
        bits = validate(state.params, corpus.validation, model, config, attention=attention) * _BITS_PER_NAT
    return Summary(config.steps, bits, unigram_entropy_bits(corpus.validation), first, state.params)


def validate(
    params: Params, data: Bytes, model: GPTConfig, config: TrainConfig, *, attention: Attention = xla_attention
) -> float:
    """Return the mean loss on held-out data, nats per byte.

    Args:
        params: the weights.
        data: held-out bytes.
        model: the shape.
        config: ``batch_size``, ``eval_batches`` and ``dtype`` are used.
        attention: see :func:`jax_baseline.model.forward`.
    """
    dtype = compute_dtype(config)
    evaluate = jax.jit(lambda params, x, y: loss(params, x, y, model, dtype=dtype, attention=attention))
    batches = validation_batches(data, config.batch_size, model.block_size, config.eval_batches)
    losses = [float(evaluate(params, x.astype(np.int32), y.astype(np.int32))) for x, y in batches]
    return float(np.mean(losses))


def _require_supported(config: TrainConfig) -> None:
    absent = {"ema_decay": 0.0, "patience": 0, "parallel": "none", "out": None}
    for name, default in absent.items():
        if getattr(config, name) != default:
            raise ValueError(f"this loop has no {name} yet: leave it at {default!r}, got {getattr(config, name)!r}")
