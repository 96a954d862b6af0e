"""Programs with known breaks for the golden traces. The comments name what each line does to a graph."""

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # the same branch every time
        self.linear = torch.nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # a new constant
        x = self.linear(x)
        if x.sum() > 0:  # a branch on a value
            x = x + 1
        return self.scaled(x) * self.calls

    def scaled(self, x):
        x = x / x.abs().max().item()  # a value read
        print(end="")  # a side effect
        return x


def breaks():
    model = torch.compile(Model(), backend="eager")
    for rows in (4, 4, 5):
        model(torch.ones(rows, 8))


def loop():
    def repeat(x):
        for _ in range(2):
            if x.sum() > 0:  # a branch on a value, in a loop
                x = x + 1
        return x

    torch.compile(repeat, backend="eager")(torch.ones(4))


def limit():
    def grow(x):
        return x.sin()

    with torch._dynamo.config.patch(recompile_limit=2):
        compiled = torch.compile(grow, backend="eager", dynamic=False)
        for size in range(2, 6):
            compiled(torch.ones(size))


PROGRAMS = {"breaks": breaks, "loop": loop, "limit": limit}
