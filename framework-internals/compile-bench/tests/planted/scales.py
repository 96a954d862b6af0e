"""Values of tensors that Python reads, also through calls that span lines."""

import torch
from torch import nn


def largest(
    values,
):
    return (
        values.abs()  # of either sign
        .max()
        .item()  # breaks
    )


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(10, 20)
        self.outer = nn.Linear(20, 10)

    def forward(self, x):
        x = self.inner(x)
        x = x / largest(
            x,
        )
        x = x * float(x.std())  # breaks
        parts = x.split(torch.tensor([8, 12]).tolist(), dim=1)  # breaks
        return self.outer(torch.cat([part.sin() for part in parts], dim=1))


def target():
    torch.manual_seed(3)
    return Scales(), (torch.randn(5, 10),)
