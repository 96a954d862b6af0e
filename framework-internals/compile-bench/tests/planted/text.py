"""Strings, sets, generators and exceptions around tensors."""

import sys
import traceback

import torch
from torch import nn


def rows(x):
    for row in x:
        yield row * 2


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.history = {}
        self.seen = set()

    def forward(self, x):
        x = self.linear(x)
        label = f"{x.sum()}"
        x = torch.stack(list(rows(x)))
        for name in {"sin", "cos"}:
            x = getattr(torch, name)(x)
        try:
            x = x + self.history["bias"]
        except KeyError:
            x = x + 1
        self.seen.add(label)
        sys.stdout.write("")  # breaks
        depth = len(traceback.format_stack()[:1])  # breaks
        best = sorted(x, key=lambda row: row.sum())[0]  # breaks
        return self.linear(best * depth)


def target():
    torch.manual_seed(13)
    return Text(), (torch.randn(3, 4),)
