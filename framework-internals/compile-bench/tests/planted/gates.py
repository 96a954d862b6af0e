"""Branches on tensor values in every spelling."""

import torch
from torch import nn


class Gates(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 12)
        self.b = nn.Linear(12, 12)
        self.out = nn.Linear(12, 2)

    def forward(self, x):
        h = self.a(x)
        if h.mean() > 0:  # breaks
            h = h + 1.0
        h = self.b(h)
        scale = 2.0 if h.norm() > 3 else 0.5  # breaks
        h = h * scale
        if torch.isnan(h).any():  # breaks
            raise ValueError("not a number")
        return self.clipped(h)

    def clipped(self, h):
        if (h.abs() > 100.0).any():  # breaks
            return self.out(h.clamp(-100.0, 100.0))
        return self.out(h)


def target():
    torch.manual_seed(2)
    return Gates(), (torch.randn(6, 12),)
