"""Breaks where Dynamo cannot resume: loops, try, with; and behind decorators and closures."""

import contextlib
import functools

import torch
from torch import nn


def traced(name):
    def decorate(function):
        @functools.wraps(function)
        def inner(*args):
            result = function(*args)
            print(name, end="", flush=True)  # breaks
            return result

        return inner

    return decorate


@contextlib.contextmanager
def scope(name):
    yield name


class Guarded(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        x = self.looped(x)
        x = self.tried(x)
        x = self.scoped(x)
        return self.wrapped(x)

    def looped(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 1e6:  # breaks
                x = x * 0.1
        return x

    def tried(self, x):
        try:
            y = x.sin()
            torch._dynamo.graph_break()  # breaks
            return y.cos()
        finally:
            self.seen = True

    def scoped(self, x):
        def nested(values):
            with scope("inner"):
                return values * int(values.argmax())  # breaks

        return nested(x)

    @traced("")
    def wrapped(self, x):
        return self.last(x)


def target():
    torch.manual_seed(6)
    return Guarded(), (torch.randn(3, 8),)
