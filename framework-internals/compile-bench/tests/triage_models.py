"""The small model of two files that triage's tests write, and what several of them need."""

from compile_bench.capture.trace import Break
from compile_bench.fixes.trial import trials
from compile_bench.triage.findings import Finding

MODEL = """\
import torch
from torch import nn
from triage_helper import scaled


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x):
        x = self.a(x)
        if x.mean() > 0:
            x = x + 0.5
        x = scaled(x)
        print("seen", end="")
        return self.b(x)


def target():
    torch.manual_seed(0)
    return Small(), (torch.randn(4, 8),)


def nothing():
    return 3


class Raising(nn.Module):
    def forward(self, x):
        if self.training:
            raise ValueError("no training today")
        return x @ torch.ones(3)


def unfit():
    return Raising(), (torch.randn(4, 8),)


def hangs():
    import time

    time.sleep(600)
"""

HELPER = """\
def scaled(x):
    return (
        x
        / x.abs().max().item()
    )
"""


class InThisProcess:
    """In the place of a harness; a proof leaves Inductor out."""

    beside = 1

    def __init__(self, folder):
        self.folder = folder

    def toolchain_seconds(self):
        return 0.0

    def ask_all(self, questions):
        return [question() for question in questions]

    def trace(self, function, case, **arguments):
        return function(case, **arguments)

    def ask(self, function, case, *, path, kinds, seeds, proposal, timed):
        return trials(case, kinds=kinds, seeds=seeds, proposals=[proposal], path=path)[0][0]


def finding_at(place, **fields):
    """A finding that says nothing but where it is, and what the fields say."""
    unsaid = {"source": "", "category": "", "reason": "", "case": "", "advice": "", "kinds": ("training",)}
    return Finding("graph break", place, **{**unsaid, **fields})


BREAK = Break("model.py", 7, "forward", "print(x)", "side effect", "", (), "side effect", whole_frame=False)
