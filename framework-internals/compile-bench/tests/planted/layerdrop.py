"""Layers dropped at random: breaks that only training has."""

import random
import time

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.linear(x).relu())


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.3:  # breaks in training
                continue
            x = layer(x)
        return x


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Dropping()
        self.head = nn.Linear(16, 3)
        self.seconds = 0.0

    def forward(self, x):
        begin = time.perf_counter()  # breaks
        x = self.inner(x)
        self.seconds = time.perf_counter() - begin  # breaks
        if self.training and random.random() > 2.0:  # breaks in training
            x = x + 1
        return self.head(x)


def target():
    torch.manual_seed(5)
    return Timed(), (torch.randn(4, 16),)
