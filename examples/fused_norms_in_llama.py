"""rmsnorm-fused in a Hugging Face Llama: replaces every norm, compares the logits, times a training step.

python examples/fused_norms_in_llama.py [cpu|cuda]
"""

import copy
import sys

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchkit import compare, numbers
from rmsnorm_fused import rms_norm


class FusedNorm(nn.Module):
    """LlamaRMSNorm on one kernel, with a shared weight and the same rounding."""

    def __init__(self, norm: LlamaRMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its last dimension."""
        return rms_norm(x, self.weight, eps=self.eps, casting="llama")


def with_fused_norms(model: nn.Module) -> nn.Module:
    """The model itself, every LlamaRMSNorm in it replaced."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):
            model.set_submodule(name, FusedNorm(module))
    return model


device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
torch.manual_seed(0)
shape = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
model = LlamaForCausalLM(shape).to(device)
fused = with_fused_norms(copy.deepcopy(model))
tokens = torch.randint(0, 512, (2, 128), device=device)

with torch.no_grad():
    difference = (model(tokens).logits - fused(tokens).logits).abs().max().item()
print(f"largest difference of a logit: {numbers.error_size(difference)}")


def step(of: nn.Module) -> Tensor:
    """Forward and backward."""
    of.zero_grad()
    loss = of(tokens, labels=tokens).loss
    loss.backward()
    return loss


timings = compare(
    {"theirs": lambda: step(model), "fused": lambda: step(fused)}, device=device, clock="wall-clock", seconds=1.0
)
print(f"a step with fused norms is {numbers.quantity(timings.speedup('fused', over='theirs'))} as fast")
