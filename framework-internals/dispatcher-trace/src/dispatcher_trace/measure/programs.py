"""Whole training steps. Their traced results must be bit-equal to the untraced ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.model import GPT
from torch_baseline.optim import make_optimizer

Program = Callable[[], list[Tensor]]


def gpt_step(device: str) -> Program:
    """One training step of the repository's GPT: forward, backward, clipping, AdamW; on a GPU with bf16 autocast.

    Returns:
        A function that makes the step and returns the loss and all parameters. The model exists before it is called.
    """
    config = GPTConfig(n_layer=2, n_embd=64, n_head=2, block_size=32)
    model = GPT(config, seed=0).to(device)
    optimizer = make_optimizer(model, TrainConfig())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (2, config.block_size + 1), generator=generator).to(device)

    def step() -> list[Tensor]:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), *(parameter.detach() for parameter in model.parameters())]

    return step


def cnn_step(device: str) -> Program:
    """One step of a small convolutional network with batch norm and SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 5)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, 16, 16, generator=generator).to(device)
    labels = torch.tensor([0, 1, 2, 3], device=device)

    def step() -> list[Tensor]:
        # Otherwise cuDNN may choose a backward whose order of summation differs from run to run.
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
        optimizer.step()
        return [loss.detach(), *(parameter.detach() for parameter in model.parameters())]

    return step


PROGRAMS: dict[str, Callable[[str], Program]] = {"GPT step": gpt_step, "CNN step": cnn_step}
