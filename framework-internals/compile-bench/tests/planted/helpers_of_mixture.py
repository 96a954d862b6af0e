"""Imported by mixture.py: a break in another file of the user's."""

import numpy as np
import torch


def load_of(gates):
    counts = np.random.default_rng(0).permutation(4)  # breaks
    return gates + 0.0 * float(counts[0])  # breaks


def routed(x, gates, experts):
    chosen = gates.argmax(-1)
    out = torch.zeros_like(x)
    for index, expert in enumerate(experts):
        rows = (chosen == index).nonzero().squeeze(-1)  # breaks
        if rows.numel() > 0:
            out[rows] = expert(x[rows])
    return out
