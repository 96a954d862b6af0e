"""Shapes that depend on values."""

import torch
from torch import nn


class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6)

    def forward(self, x, lengths):
        x = self.inner(x)
        positive = x[x > 0].sum()  # breaks
        kinds = torch.unique(lengths)  # breaks
        longest = int(lengths.max())  # breaks
        x = x[:longest] + positive + len(kinds)
        while x.abs().max() > 4:  # breaks
            x = x * 0.5
        return self.outer(x)


def target():
    torch.manual_seed(8)
    return Shapes(), (torch.randn(9, 6) * 4, torch.tensor([3, 7, 5]))
