"""A training-time recorder: prints, logs and warns as people's models do. A line marked `breaks` is to be found."""

import logging
import sys
import warnings

import torch
from torch import nn

log = logging.getLogger("recorder")


class Recorder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        h = torch.tanh(self.embed(x))
        print("hidden", tuple(h.shape), file=sys.stderr)  # breaks
        h = self.mix(h).relu()
        log.info("mixed %d rows", len(h))  # breaks
        h = h * 0.5
        warnings.warn(  # breaks
            "the head is not calibrated",
            UserWarning,
            stacklevel=2,
        )
        return self.head(h)


def target():
    torch.manual_seed(1)
    return Recorder(), (torch.randn(8, 16),)
