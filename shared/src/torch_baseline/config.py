"""The shape of the model (:class:`GPTConfig`) and the settings of its training (:class:`TrainConfig`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Precision = Literal["float64", "float32", "bfloat16", "float16"]
Preset = Literal["tiny", "gpt2-124m"]

LARGEST_SEED = 2**64 - 1  # of torch's generators


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT.

    Attributes:
        vocab_size: Number of tokens. Bytes need 256; further tokens of a larger vocabulary are unused.
        n_layer: Number of transformer blocks.
        n_head: Number of attention heads. ``n_embd / n_head`` must be even, because rotary positions rotate pairs.
        n_embd: Width of the model.
        block_size: Largest number of positions in a sequence.
        norm_eps: Value added to the mean square in RMSNorm.
        rope_base: Base of the rotary frequencies, base^(-2i/D).
        tie_embeddings: Whether the embedding table also computes the logits.
        low_precision_residual: Whether the residual stream has the dtype of the matrix products. With bfloat16 this
            halves the memory traffic between the products and rounds the stream at every addition. Norms are computed
            in float32 in both cases.
    """

    vocab_size: int = 256
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 128
    norm_eps: float = 1e-5
    rope_base: float = 10_000.0
    tie_embeddings: bool = True
    low_precision_residual: bool = False

    def __post_init__(self) -> None:
        _require_positive(self, "vocab_size", "n_layer", "n_head", "n_embd", "block_size", "norm_eps", "rope_base")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd must be a multiple of n_head, got n_embd={self.n_embd} and n_head={self.n_head}; "
                f"n_embd={-(-self.n_embd // self.n_head) * self.n_head} would do"
            )
        if self.head_size % 2:
            raise ValueError(
                "rotary positions need an even head size, got "
                f"n_embd / n_head = {self.n_embd} / {self.n_head} = {self.head_size}"
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def mlp_size(self) -> int:
        """Width between the two matrices of the MLP: four times the model's."""
        return 4 * self.n_embd

    @classmethod
    def preset(cls, name: str) -> GPTConfig:
        """Return a named shape.

        Args:
            name: ``"tiny"`` learns in seconds on two CPU cores. ``"gpt2-124m"`` is the shape of the smallest GPT-2
                (vocabulary padded to a multiple of 128), for a GPU.

        Raises:
            ValueError: For any other name.
        """
        if name == "tiny":
            return cls()
        if name == "gpt2-124m":
            return cls(vocab_size=50_304, n_layer=12, n_head=12, n_embd=768, block_size=1024)
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(get_args(Preset))}")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run.

    Attributes:
        steps: Number of optimizer steps.
        batch_size: Sequences per step, over all micro-batches and processes.
        accumulation: Micro-batches per step; more of them need less memory and compute the same.
        lr: Highest learning rate, reached after the warm-up.
        min_lr: Learning rate at the end of the cosine.
        warmup: Steps of linear warm-up.
        beta1: AdamW's decay of the gradient average.
        beta2: AdamW's decay of the squared-gradient average.
        adam_eps: AdamW's epsilon.
        weight_decay: Weight decay of matrices (two dimensions or more); other parameters have none.
        clip: Largest gradient norm; 0 disables clipping.
        dtype: ``float64`` and ``float32`` compute in that dtype. ``bfloat16`` and ``float16`` use autocast over float32
            weights, ``float16`` with a gradient scaler.
        seed: Seed of the initial weights, the batches and torch's generators; below 2^64, as torch asks for.
        ema_decay: Decay of the moving average of the weights; 0 disables it.
        eval_interval: Steps between validations; 0 validates after the last step only.
        eval_batches: Largest number of validation batches, each of ``batch_size`` sequences.
        checkpoint_interval: Steps between checkpoints; 0 saves after the last step only.
        patience: Number of validations without improvement after which training stops; 0 never stops early.
        deterministic: Whether torch refuses algorithms whose result varies from run to run.
        compile: Whether the model is passed through torch.compile.
        parallel: ``none``, ``ddp`` or ``fsdp``; the latter two need torchrun.
        data: File to train on; None for the text in ``pydoc_data.topics``, which is part of every CPython.
        out: Folder for checkpoints, metrics and metadata; None to write nothing.
    """

    steps: int = 200
    batch_size: int = 16
    accumulation: int = 1
    lr: float = 3e-3
    min_lr: float = 3e-4
    warmup: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: Precision = "float32"
    seed: int = 0
    ema_decay: float = 0.0
    eval_interval: int = 50
    eval_batches: int = 16
    checkpoint_interval: int = 100
    patience: int = 0
    deterministic: bool = False
    compile: bool = False
    parallel: Literal["none", "ddp", "fsdp"] = "none"
    data: Path | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "steps", "batch_size", "accumulation", "lr", "adam_eps", "eval_batches")
        _require_not_negative(
            self, "min_lr", "warmup", "weight_decay", "clip", "seed", "eval_interval", "checkpoint_interval", "patience"
        )
        if self.seed > LARGEST_SEED:
            raise ValueError(f"seed must be below 2^64, got {self.seed}")
        for name in ("beta1", "beta2", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr must not exceed lr, got min_lr={self.min_lr} and lr={self.lr}")
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"batch_size must be a multiple of accumulation, got batch_size={self.batch_size} "
                f"and accumulation={self.accumulation}"
            )
        if self.dtype not in get_args(Precision):
            raise ValueError(f"dtype must be one of {', '.join(get_args(Precision))}, got {self.dtype!r}")
        if self.parallel not in ("none", "ddp", "fsdp"):
            raise ValueError(f"parallel must be none, ddp or fsdp, got {self.parallel!r}")
        if self.parallel == "fsdp" and self.dtype == "float16":
            raise ValueError(
                "float16 does not work with FSDP (the gradient scaler is not sharded); use bfloat16, or ddp"
            )

    @classmethod
    def preset(cls, name: str) -> TrainConfig:
        """Return the training settings for the model preset of that name.

        Raises:
            ValueError: For an unknown name.
        """
        if name == "tiny":
            return cls(ema_decay=0.95)
        if name == "gpt2-124m":
            return cls(batch_size=32, lr=6e-4, min_lr=6e-5, dtype="bfloat16", ema_decay=0.99, compile=True)
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(get_args(Preset))}")

    def as_plain(self) -> dict[str, int | float | bool | str | None]:
        """Return the fields as JSON types."""
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> TrainConfig:
        """Return the settings whose fields :meth:`as_plain` returned."""
        paths = {name: None if plain[name] is None else Path(plain[name]) for name in ("data", "out")}
        return cls(**{**plain, **paths})


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {getattr(config, name)}")


def _require_not_negative(config: object, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= 0:
            raise ValueError(f"{name} must not be negative, got {getattr(config, name)}")
