"""What nobody says a word about: functions that run eagerly, and the recompile limit."""

import torch
from torch import nn

from compile_bench.targets.target import Target


class Quiet(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # limit
        return self.linear(x) * self.calls

    def encode(self, x):
        return self.linear(x).relu() * 2


def step(model, args):
    def run():
        loss = model(*args).sum() + model.encode(*args).sum()  # method
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    return run


def target():
    torch.manual_seed(11)
    x = torch.randn(4, 8)
    return Target(Quiet(), (x,), make_step=step, schedule=((x,),) * 10)


def masked(x, mask=None):  # silent
    if mask is None:
        return x
    return (x * mask).sin()


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mask = None

    def forward(self, x):
        for _ in range(2):
            x = self.linear(x)
            torch._dynamo.graph_break()  # breaks
            x = masked(x, self.mask)
        self.mask = torch.ones(8)
        return x


def cached():
    torch.manual_seed(12)
    return Cached(), (torch.randn(4, 8),)
