"""Generating text with a trained model, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torch_baseline.checkpoint import Checkpoint
from torch_baseline.config import GPTConfig
from torch_baseline.model import GPT

BYTES = 256


def model_from_checkpoint(checkpoint: Checkpoint, *, averaged: bool = True) -> GPT:
    """Return the model of a checkpoint, on the CPU in float32.

    Args:
        checkpoint: A checkpoint from :func:`torch_baseline.checkpoint.load`.
        averaged: Whether to use the moving average of the weights, if there is one.
    """
    model = GPT(GPTConfig(**checkpoint.model_config))
    weights = checkpoint.ema if averaged and checkpoint.ema else checkpoint.model
    model.load_numpy({name: weight.numpy() for name, weight in weights.items()})
    return model.eval()


@torch.no_grad()
def sample_bytes(model: GPT, prompt: bytes, count: int, *, temperature: float, seed: int) -> Iterator[int]:
    """Continue a text.

    Args:
        model: A model that was trained on bytes.
        prompt: At least one byte; the model sees the last ``block_size`` bytes.
        count: Number of bytes to generate.
        temperature: Divisor of the logits; 0 takes the most likely byte.
        seed: Seed of the sampling.

    Yields:
        One byte at a time.

    Raises:
        ValueError: If the prompt is empty, or the temperature negative or NaN.
    """
    if not prompt:
        raise ValueError("the prompt must have at least one byte, got none")
    if not temperature >= 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        window_BT = torch.tensor([text[-model.config.block_size :]], device=device)
        # A padded vocabulary also has logits for tokens that are no bytes.
        logits_V = model(window_BT)[0, -1, :BYTES].float().cpu()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            # At most 0, however small the temperature: in float32 it may be 0, and 0 / 0 no number.
            scaled_V = (logits_V - logits_V.max()).double() / temperature
            token = int(torch.multinomial(scaled_V.softmax(0), 1, generator=generator))
        text.append(token)
        yield token
