"""Two Hugging Face models whose norms, GELU and attention have two lowerings: which one makes the compiled step faster?

compile-bench tune examples/lowerings_in_hugging_face.py:llama --device cpu --seconds 2
compile-bench tune examples/lowerings_in_hugging_face.py:gpt2 --device cpu --seconds 2
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import custom_ops
from compile_bench.targets.target import Target
from rmsnorm_fused import rms_norm

TOKENS = (2, 256)


class Norm(nn.Module):
    """LlamaRMSNorm with two lowerings, a shared weight and the same rounding."""

    def __init__(self, norm: LlamaRMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its last dimension."""
        return rms_norm(x, self.weight, eps=self.eps, casting="llama")


class MLP(nn.Module):
    """GPT2MLP whose bias and GELU are one operator."""

    def __init__(self, mlp: GPT2MLP) -> None:
        super().__init__()
        self.up, self.down = mlp.c_fc, mlp.c_proj

    def forward(self, x: Tensor) -> Tensor:
        """Return down(gelu(x · up + bias))."""
        return self.down(custom_ops.bias_gelu(x @ self.up.weight, self.up.bias))


class Loss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict each token from those before it."""
        return self.model(tokens, labels=tokens).loss


def attention(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_mask: Any, scaling: float, **_options: Any) -> Any:
    """Causal attention, in the layout that transformers asks for."""
    return custom_ops.flash_attention(q, k, v, True, scale=scaling)[0].transpose(1, 2), None


AttentionInterface.register("custom_ops", attention)


def replaced(model: nn.Module, kind: type[nn.Module], by: type[nn.Module]) -> Target:
    """Replace every module of a kind, and make a training step on random tokens."""
    for name, module in list(model.named_modules()):
        if isinstance(module, kind):
            model.set_submodule(name, by(module))
    generator = torch.Generator().manual_seed(0)
    return Target(Loss(model), (torch.randint(0, 512, TOKENS, generator=generator),))


def llama() -> Target:
    """Four blocks, 256 wide; grouped keys and values."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, attn_implementation="custom_ops",
    )  # fmt: skip
    return replaced(LlamaForCausalLM(shape), LlamaRMSNorm, Norm)


def gpt2() -> Target:
    """Four blocks, 256 wide; LayerNorm stays torch's."""
    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=512, n_embd=256, n_layer=4, n_head=4, n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="custom_ops",
    )  # fmt: skip
    return replaced(GPT2LMHeadModel(shape), GPT2MLP, MLP)
