"""Weights from torch to JAX and back: which parameter goes where, and which way round.

The map is one value, a :class:`jax_baseline.gpt.model.Params` whose leaves say where the weight comes from. Whatever
has the structure of the parameters travels by it: weights, gradients, Adam's moments.
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


@dataclass(frozen=True)
class Source:
    """Where one array of the JAX model comes from.

    Attributes:
        torch_name: of the parameter, in ``torch_baseline``.
        torch_shape: there; a matrix of a linear layer is (out, in).
        transposed: whether the JAX array is its transpose, (in, out).
    """

    torch_name: str
    torch_shape: tuple[int, ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the JAX array."""
        return self.torch_shape[::-1] if self.transposed else self.torch_shape


def weight_map(config: GPTConfig) -> Params:
    """Return the parameters with a :class:`Source` in the place of every array."""
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
    """Return JAX parameters that hold torch's weights.

    Args:
        weights: NumPy arrays by the names of ``torch_baseline.model.parameter_shapes``.
        config: the shape.
        dtype: of the arrays.

    Returns:
        Fresh buffers, so that a step may be given them to overwrite.

    Raises:
        ValueError: if a name is missing, unknown, or of another shape; or for float64 without ``jax_enable_x64``.
    """
    sources = weight_map(config)
    expected = {source.torch_name for source in jax.tree.leaves(sources)}
    if expected != weights.keys():
        missing, unknown = sorted(expected - weights.keys()), sorted(weights.keys() - expected)
        raise ValueError(f"the weights do not fit the model: missing {missing}, unknown {unknown}")
    require_x64_for(dtype)

    def convert(source: Source) -> jax.Array:
        weight = weights[source.torch_name]
        if weight.shape != source.torch_shape:
            raise ValueError(f"{source.torch_name} must be {source.torch_shape}, got {weight.shape}")
        # A copy, always: on a CPU JAX would otherwise share the memory of a torch parameter that is still trained.
        return jnp.array(weight.T if source.transposed else weight, dtype, copy=True)

    return jax.tree.map(convert, sources)


def to_torch(params: Params, config: GPTConfig) -> dict[str, NDArray]:
    """Return NumPy copies by torch's names, (out, in); the inverse of :func:`from_torch`.

    Args:
        params: the parameters, or anything of their structure; blocks may be stacked.
        config: the shape.

    Raises:
        ValueError: if the structure or a shape is not that of ``config``.
    """
    params = unstack_blocks(params)
    sources, structure = jax.tree.flatten(weight_map(config))
    if structure != jax.tree.structure(params):
        raise ValueError(f"expected parameters of {config.n_layer} blocks with head: {not config.tie_embeddings}")
    weights = {}
    for source, array in zip(sources, jax.tree.leaves(params), strict=True):
        if array.shape != source.shape:
            raise ValueError(f"{source.torch_name} must be {source.shape} in JAX, got {array.shape}")
        # A copy again: the buffer behind np.asarray(array) is given away by the next donating step.
        weights[source.torch_name] = np.array(array.T if source.transposed else array)
    return weights


def open_torch_checkpoint(path: Path, dtype: DTypeLike = jnp.float32) -> tuple[GPTConfig, Params]:
    """Read the weights of a checkpoint that ``torch_baseline`` wrote.

    Args:
        path: ``last.pt`` or ``best.pt`` in the folder of a run.
        dtype: of the arrays.

    Returns:
        The shape of the model, and its parameters.

    Raises:
        UserError: if there is no such file or it is damaged.
    """
    saved = checkpoints.load(path)
    config = GPTConfig(**saved.model_config)
    return config, from_torch({name: weight.numpy() for name, weight in saved.model.items()}, config, dtype)


def require_x64_for(dtype: DTypeLike) -> None:
    """Check that JAX would not turn this dtype into a narrower one.

    Raises:
        ValueError: for float64 in a process that has not enabled it.
    """
    if jnp.dtype(dtype) == jnp.float64 and not jax.config.jax_enable_x64:
        raise ValueError(
            "float64 needs JAX's 64-bit mode, which is off in this process; call "
            'jax.config.update("jax_enable_x64", True) before the first array is made'
        )
