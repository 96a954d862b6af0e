"""A context manager that reads the clock gives up the function that enters it: said once, where the clock is read."""

import contextlib
import time

import torch
from torch import nn

SECONDS = {}


@contextlib.contextmanager
def metered(name):
    begin = time.perf_counter()  # breaks
    yield
    SECONDS[name] = time.perf_counter() - begin  # breaks


class Metered(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)

    def forward(self, x):
        with metered("encoder"):
            x = self.encoder(x).relu()
        with metered("decoder"):
            x = self.decoder(x)
        return x / x.norm().item()  # breaks


def target():
    torch.manual_seed(10)
    return Metered(), (torch.randn(4, 4),)
