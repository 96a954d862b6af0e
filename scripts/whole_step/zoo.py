"""Models of compile-bench's zoo with this repository's norms and bias + GELU, as targets of ``compile-bench tune``.

``compile-bench tune whole_step.zoo:bert --device cpu`` measures one of them. GELU is the tanh form in all of them,
because the operator has no other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

import custom_ops
from compile_bench.targets.loading import load_target
from compile_bench.targets.target import Target
from rmsnorm_fused import rms_norm

# Names of a projection and of the activation behind it, in BERT and Longformer, ViT, Wav2Vec2, GPT-2.
_PROJECTIONS = (
    ("dense", "intermediate_act_fn"),
    ("fc1", "activation_fn"),
    ("intermediate_dense", "intermediate_act_fn"),
    ("c_fc", "act"),
)


class Norm(nn.Module):
    """RMSNorm of transformers with two lowerings, a shared weight and the same rounding."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its last dimension."""
        return rms_norm(x, self.weight, eps=self.eps, casting="llama")


class Product(nn.Module):
    """A projection without its bias."""

    def __init__(self, projection: Any) -> None:
        super().__init__()
        self.weight, self.transposed = projection.weight, isinstance(projection, nn.Linear)

    def forward(self, x: Tensor) -> Tensor:
        """Return x · weight, whose layout is (in, out), or (out, in) if it is transposed."""
        return x @ (self.weight.t() if self.transposed else self.weight)


class BiasGelu(nn.Module):
    """The activation behind :class:`Product`, with the bias that it left out."""

    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Return gelu(x + bias)."""
        return custom_ops.bias_gelu(x, self.bias)


def with_operators(name: str) -> Target:
    """Make a target of the zoo, sized for a CPU, and replace its RMSNorms and its pairs of bias and GELU."""
    target = load_target(name, "cpu")
    replaced = 0
    for module in list(target.model.modules()):
        for child_name, child in list(module.named_children()):
            if hasattr(child, "variance_epsilon"):
                setattr(module, child_name, Norm(child))
                replaced += 1
        for projection, activation in _PROJECTIONS:
            if "GELU" in type(getattr(module, activation, None)).__name__ and hasattr(module, projection):
                bias = getattr(module, projection).bias
                setattr(module, projection, Product(getattr(module, projection)))
                setattr(module, activation, BiasGelu(bias))
                replaced += 1
    if not replaced:
        raise ValueError(f"expected a target with an RMSNorm or a bias with GELU, got {name}; see compile-bench zoo")
    return target


gpt2, llama, qwen3, bert, vit, t5, mamba, wav2vec2, longformer = (
    partial(with_operators, name)
    for name in ("gpt2", "llama", "qwen3", "bert", "vit", "t5", "mamba", "wav2vec2", "longformer")
)
qwen3_moe = partial(with_operators, "qwen3-moe")
