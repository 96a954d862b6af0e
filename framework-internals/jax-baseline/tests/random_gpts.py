"""Random GPTs and training settings, one in two with a mistake planted in the JAX step."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from jax_baseline.parity.gpt.adapters import Setup
from jax_baseline.parity.gpt.planted_mistakes import MISTAKES
from torch_baseline.config import GPTConfig, TrainConfig

MISTAKE_NAMES = tuple(mistake.name for mistake in MISTAKES)


@dataclass(frozen=True)
class Comparison:
    """A comparison of both frameworks.

    Attributes:
        setup: Model and training.
        mistake: Name of the mistake in JAX's step; empty for none.
    """

    setup: Setup
    mistake: str


@st.composite
def comparisons(draw):
    heads, head_size = draw(st.sampled_from([(1, 4), (2, 8), (3, 6), (5, 2), (2, 16)]))
    accumulation = draw(st.sampled_from([1, 1, 2, 3]))
    mistake = draw(st.sampled_from(MISTAKE_NAMES)) if draw(st.booleans()) else ""
    model = GPTConfig(
        vocab_size=draw(st.sampled_from([256, 300])),
        n_layer=draw(st.integers(1, 2)),
        n_head=heads,
        n_embd=heads * head_size,
        block_size=draw(st.sampled_from([5, 8, 13, 32])),
        norm_eps=draw(st.sampled_from([1e-5, 1e-5, 1e-2, 1e-8])),
        rope_base=draw(st.sampled_from([10_000.0, 500.0])),
        tie_embeddings=not mistake and draw(st.booleans()),  # what ties the head is a mistake
    )
    training = TrainConfig(
        steps=draw(st.integers(3, 6)),
        batch_size=accumulation * draw(st.integers(1, 4)),
        accumulation=accumulation,
        lr=draw(st.sampled_from([1e-3, 3e-3])),
        min_lr=1e-4,
        warmup=draw(st.sampled_from([0, 2])),
        weight_decay=draw(st.sampled_from([0.1, 0.01])),
        clip=draw(st.sampled_from([0.5, 1.0])) if mistake else draw(st.sampled_from([0.0, 0.1, 1.0])),
        # In float64 rounding hides no mistake; equal pairs have to pass in every precision.
        dtype="float64" if mistake else draw(st.sampled_from(["float64", "float32", "float32", "bfloat16"])),
        seed=draw(st.integers(0, 10_000)),
    )
    return Comparison(Setup(model, training), mistake)
