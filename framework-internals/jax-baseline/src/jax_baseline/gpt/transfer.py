"""Conversion of weights between torch and JAX.

The mapping is one value: a :class:`jax_baseline.gpt.model.Params` whose leaves name the torch parameter and its layout.
It converts anything with the structure of the parameters: weights, gradients, Adam's moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jax_baseline.gpt.model import Block, Params, unstack_blocks
from torch_baseline import checkpoint as checkpoints
from torch_baseline.config import GPTConfig
from torch_baseline.model import parameter_shapes

# Names of Adam's two moments in torch and in optax. Both keep the same means; other optimizers' conventions differ.
MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu"}


@dataclass(frozen=True)
class Source:
    """The torch parameter that one array of the JAX model corresponds to.

    Attributes:
        torch_name: Name of the parameter in ``torch_baseline``.
        torch_shape: Shape of the parameter in torch; a linear layer's weight is (out, in).
        transposed: Whether the JAX array is the transpose, (in, out).
    """

    torch_name: str
    torch_shape: tuple[int, ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the JAX array."""
        return self.torch_shape[::-1] if self.transposed else self.torch_shape


def weight_map(config: GPTConfig) -> Params:
    """Return the parameters with a :class:`Source` in place of every array."""
    shapes = parameter_shapes(config)

    def same(name: str) -> Source:
        return Source(name, shapes[name])

    def kernel(name: str) -> Source:
        return Source(name, shapes[name], transposed=True)

    def block(index: int) -> Block:
        prefix = f"blocks.{index}"
        return Block(
            attention_norm=same(f"{prefix}.attention_norm.weight"),
            qkv=kernel(f"{prefix}.attention.qkv.weight"),
            out=kernel(f"{prefix}.attention.out.weight"),
            mlp_norm=same(f"{prefix}.mlp_norm.weight"),
            up=kernel(f"{prefix}.mlp.up.weight"),
            bias=same(f"{prefix}.mlp.bias"),
            down=kernel(f"{prefix}.mlp.down.weight"),
        )

    return Params(
        embedding=same("embedding.weight"),
        blocks=tuple(block(index) for index in range(config.n_layer)),
        norm=same("norm.weight"),
        head=None if config.tie_embeddings else kernel("head.weight"),
    )


def from_torch(weights: Mapping[str, NDArray], config: GPTConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """Return JAX parameters with the values of torch's weights.

    Args:
        weights: NumPy arrays by the names of ``torch_baseline.model.parameter_shapes``.
        config: Shape of the model.
        dtype: Dtype of the new arrays.

    Returns:
        Parameters in new buffers, which a step may donate.

    Raises:
        ValueError: If a name is missing or unknown, if a shape differs, or for float64 without ``jax_enable_x64``.
    """
    sources = weight_map(config)
    expected = {source.torch_name for source in jax.tree.leaves(sources)}
    if expected != weights.keys():
        missing, unknown = sorted(expected - weights.keys()), sorted(weights.keys() - expected)
        raise ValueError(f"the weights do not fit the model: missing {missing}, unknown {unknown}; pass its GPTConfig")
    require_x64_for(dtype)

    def convert(source: Source) -> jax.Array:
        weight = weights[source.torch_name]
        if weight.shape != source.torch_shape:
            raise ValueError(f"{source.torch_name} must be {source.torch_shape}, got {weight.shape}")
        # Without a copy, JAX on a CPU shares the memory of the torch parameter, which torch may still update.
        return jnp.array(weight.T if source.transposed else weight, dtype, copy=True)

    return jax.tree.map(convert, sources)


def to_torch(params: Params, config: GPTConfig) -> dict[str, NDArray]:
    """Return NumPy copies under torch's names and in torch's layout; the inverse of :func:`from_torch`.

    Args:
        params: Parameters, or anything of their structure; blocks may be stacked.
        config: Shape of the model.

    Raises:
        ValueError: If the structure or a shape does not match ``config``.
    """
    params = unstack_blocks(params)
    sources, structure = jax.tree.flatten(weight_map(config))
    if structure != jax.tree.structure(params):
        raise ValueError(
            f"expected parameters of {config.n_layer} blocks with head: {not config.tie_embeddings}, got "
            f"{len(params.blocks)} blocks with head: {params.head is not None}; pass the GPTConfig they were made with"
        )
    weights = {}
    for source, array in zip(sources, jax.tree.leaves(params), strict=True):
        if array.shape != source.shape:
            raise ValueError(f"{source.torch_name} must be {source.shape} in JAX, got {array.shape}")
        # np.asarray(array) shares the buffer, which the next step may overwrite if it donates its state.
        weights[source.torch_name] = np.array(array.T if source.transposed else array)
    return weights


def open_torch_checkpoint(
    path: Path, dtype: DTypeLike = jnp.float32, *, averaged: bool = False
) -> tuple[GPTConfig, Params]:
    """Read the weights of a checkpoint, which either framework wrote.

    Args:
        path: ``last.pt`` or ``best.pt`` in the folder of a run.
        dtype: Dtype of the parameters.
        averaged: Take the averaged weights if the run kept an average.

    Returns:
        The shape of the model, and its parameters.

    Raises:
        UserError: If the file does not exist or is damaged.
    """
    saved = checkpoints.load(path)
    config = GPTConfig(**saved.model_config)
    weights = saved.ema if averaged and saved.ema else saved.model
    return config, from_torch({name: weight.numpy() for name, weight in weights.items()}, config, dtype)


def require_x64_for(dtype: DTypeLike) -> None:
    """Check that JAX does not replace this dtype by a narrower one.

    Raises:
        ValueError: For float64 in a process without JAX's 64-bit mode.
    """
    if jnp.dtype(dtype) == jnp.float64 and not jax.config.jax_enable_x64:
        raise ValueError(
            "float64 needs JAX's 64-bit mode, which is off in this process; call "
            'jax.config.update("jax_enable_x64", True) before the first array is made'
        )
