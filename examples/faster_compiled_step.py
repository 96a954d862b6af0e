"""A compiled step with the lowerings that are faster in it: measured once, and taken from then on.

compile-bench tune examples/faster_compiled_step.py:make --device cpu --seconds 2
"""

import torch
from torch import Tensor, nn

import custom_ops
from compile_bench.targets.target import Target
from rmsnorm_fused import RMSNorm


class Block(nn.Module):
    """Any model that calls operators with two lowerings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x + down · gelu(up · norm(x) + bias)."""
        return x + self.down(custom_ops.bias_gelu(self.up(self.norm(x)), self.bias))


def make() -> Target:
    """What the command measures."""
    torch.manual_seed(0)
    return Target(nn.Sequential(Block(128), Block(128)), (torch.randn(512, 128),))


def train(model: nn.Module) -> nn.Module:
    """What your program does: on the machine that measured, nothing more than this."""
    return torch.compile(model)
