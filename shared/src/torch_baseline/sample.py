"""Writing with a trained model, byte by byte."""

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
        checkpoint: from :func:`torch_baseline.checkpoint.load`.
        averaged: take the moving average of the weights where there is one.
    """
    model = GPT(GPTConfig(**checkpoint.model_config))
    weights = checkpoint.ema if averaged and checkpoint.ema else checkpoint.model
    model.load_numpy({name: weight.numpy() for name, weight in weights.items()})
    return model.eval()


@torch.no_grad()
def sample_bytes(model: GPT, prompt: bytes, count: int, *, temperature: float, seed: int) -> Iterator[int]:
    """Continue a text.

    Args:
        model: trained on bytes.
        prompt: at least one byte; the last ``block_size`` bytes are what the model sees.
        count: bytes to write.
        temperature: that logits are divided by; 0 takes the likeliest byte.
        seed: of the draws.

    Yields:
        One byte at a time.

    Raises:
        ValueError: for an empty prompt or a negative temperature.
    """
    if not prompt:
        raise ValueError("the prompt must hold at least one byte")
    if temperature < 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        window_BT = torch.tensor([text[-model.config.block_size :]], device=device)
        # A vocabulary padded beyond the bytes has logits for tokens that no text holds.
        logits_V = model(window_BT)[0, -1, :BYTES].float().cpu()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            token = int(torch.multinomial((logits_V / temperature).softmax(0), 1, generator=generator))
        text.append(token)
        yield token
