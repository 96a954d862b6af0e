"""Modules and tensor methods that Dynamo does not trace."""

import json
import threading

import torch
from torch import nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.linear = nn.Linear(6, 6)
        self.lock = threading.Lock()

    def forward(self, x):
        x = self.linear(x)
        x, _ = self.lstm(x)  # breaks
        with self.lock:  # breaks
            x = x + 1
        x = self.linear(x)
        x = x * json.loads("[0.5]")[0]  # breaks
        key = x.data_ptr() & 0  # breaks
        return self.linear(x) + key


def target():
    torch.manual_seed(9)
    return Recurrent(), (torch.randn(2, 5, 6),)
