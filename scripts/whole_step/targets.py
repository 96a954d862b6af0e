"""The training step as targets of ``compile-bench tune``, which measures the table of lowerings.

``compile-bench tune whole_step.targets:tiny --table shared/src/lowering/table.json``
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from compile_bench.targets.target import Step, Target
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.data import batch, load_corpus
from torch_baseline.model import GPT
from torch_baseline.optim import make_optimizer
from torch_baseline.train import make_train_step
from whole_step.variants import every_operator


def tiny() -> Target:
    """The step of the end-to-end report on a CPU: 4 blocks, 128 wide, 4 × 128 tokens, float32."""
    return _step("tiny", GPTConfig.preset("tiny"), batch_size=4)


def wide() -> Target:
    """Four blocks, 512 wide, 512 tokens, float32."""
    return _step("tiny", GPTConfig(n_layer=4, n_head=8, n_embd=512, block_size=256), batch_size=2)


def gpt2_124m() -> Target:
    """The step of the end-to-end report on a GPU, with 4 of its 12 blocks: 8 × 1024 tokens, bfloat16 autocast."""
    return _step("gpt2-124m", replace(GPTConfig.preset("gpt2-124m"), n_layer=4), batch_size=8)


def gpt2_124m_large_batch() -> Target:
    """The same with 32 × 1024 tokens and 2 blocks."""
    return _step("gpt2-124m", replace(GPTConfig.preset("gpt2-124m"), n_layer=2), batch_size=32)


def llama_block() -> Target:
    """Two blocks, 4096 wide, 4 × 2048 tokens, bfloat16 autocast; the vocabulary is that of bytes."""
    return _step("gpt2-124m", GPTConfig(n_layer=2, n_head=32, n_embd=4096, block_size=2048), batch_size=4)


def _step(preset: str, shape: GPTConfig, batch_size: int) -> Target:
    config = replace(TrainConfig.preset(preset), batch_size=batch_size, accumulation=1)
    tokens = batch(load_corpus().train, config.seed, 0, batch_size, shape.block_size)

    def make_step(model: torch.nn.Module, args: tuple[Any, ...]) -> Step:
        step = make_train_step(model, make_optimizer(model, config), config)
        return lambda: step(*args)

    return Target(
        GPT(shape, seed=config.seed, **every_operator()),
        tuple(torch.from_numpy(part).contiguous() for part in tokens),
        autocast={"bfloat16": torch.bfloat16, "float16": torch.float16}.get(config.dtype),
        make_step=make_step,
    )
