"""Hooks, custom autograd functions, copies and saving."""

import copy
import io
import os

import torch
from torch import nn


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        print("", end="")  # breaks
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def watch(module, inputs, output):
    if output.abs().max() > 1e3:  # breaks
        raise RuntimeError("too large")


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.first.register_forward_hook(watch)
        self.second = nn.Linear(8, 8)
        self.average = nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        x = Scaled.apply(x, 2.0)
        x = x + copy.deepcopy(self.average)(x).detach()  # breaks
        torch.save(x.detach(), io.BytesIO())  # breaks
        x = x * os.getpid() / os.getpid()  # breaks
        return self.second(x)


def target():
    torch.manual_seed(7)
    return Hooked(), (torch.randn(4, 8),)
