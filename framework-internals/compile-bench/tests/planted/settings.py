"""Calls that change the state of torch, and tensors made in odd ways."""

import torch
from torch import nn


class Marked(torch.Tensor):
    pass


class Settings(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.noise = None

    def forward(self, x):
        state = torch.get_rng_state()  # breaks
        x = self.linear(x) + torch.randn(8)
        torch.set_rng_state(state)  # breaks
        x = self.tagged(x)
        gain = nn.Parameter(torch.ones(8))  # breaks
        return self.disabled(x * gain)

    def tagged(self, x):
        return x.as_subclass(Marked).as_subclass(torch.Tensor) * torch.get_num_threads()  # breaks

    @torch.compiler.disable
    def noisy(self, x):
        return x * 2

    def disabled(self, x):
        x = x + 1
        x = self.noisy(  # breaks
            x,
        )
        return self.linear(x)


def target():
    torch.manual_seed(10)
    return Settings(), (torch.randn(4, 8),)
