"""Random modules with planted causes of graph breaks: their description, their text, and the lines that break."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

MARK = "  # breaks"

# Statements over ``x``, by name of the catalogue's entry; the marked line breaks.
CAUSES = {
    "print": f'print(end=""){MARK}',
    "logging": f'LOG.warning("seen"){MARK}',
    "item": f"x = x * x.norm().item(){MARK}",
    "float": f"x = x / float(x.abs().sum() + 1){MARK}",
    "tolist": f"x = x + sum(x.flatten().tolist()){MARK}",
    "branch-on-value": f"if x.sum() > 0:{MARK}\n    x = x + 1",
    "chosen": f"x = x + 1 if x.mean() > 0 else x - 1{MARK}",
    "boolean-mask": f"x = x + x[x > 0].sum(){MARK}",
    "clock": f"x = x + 0 * time.perf_counter(){MARK}",
    "graph-break-call": f"torch._dynamo.graph_break(){MARK}",
    "none": "x = torch.where(x > 0, x, x.sin())",
}

# Where a statement stands: what surrounds it in ``forward``, or a function of its own and the call of it.
AROUND = {
    "plain": "{}",
    "loop": "for _ in range(2):\n{}",
    "try": "try:\n{}\nexcept KeyError:\n    x = x + 9",
    "finally": "try:\n{}\nfinally:\n    x = x + 0",
    "with": "with contextlib.nullcontext():\n{}",
    "flag": "if self.flag:\n{}",
}
CALLS = {
    "helper": "x = part_{0}(x)",
    "comprehension": "x = sum([part_{0}(x + k) for k in range(2)])",
    "method": "x = self.part_{0}(x)",
    "closure": "x = inner_{0}(x)",
}


@dataclass(frozen=True)
class Program:
    """A random module.

    Attributes:
        parts: Cause and place of each part, in the order of ``forward``.
        train: Whether a training step is traced, or a forward pass.
        fix: Whether the fixes are tried, too.
    """

    parts: tuple[tuple[str, str], ...]
    train: bool
    fix: bool = False

    @property
    def text(self) -> str:
        """The file; ``target`` returns the module and its arguments."""
        helpers, methods, body = [], [], []
        for index, (cause, place) in enumerate(self.parts):
            snippet = CAUSES[cause]
            if place in AROUND:
                around = AROUND[place]
                body.append(around.format(snippet if around == "{}" else _indented(snippet)))
            else:
                own = _indented(f"{snippet}\nreturn x")
                if place == "method":
                    methods.append(f"def part_{index}(self, x):\n{own}")
                elif place == "closure":
                    body.append(f"scale_{index} = 2.0\ndef inner_{index}(x):\n    x = x * scale_{index}\n{own}")
                else:
                    helpers.append(f"def part_{index}(x):\n{own}")
                body.append(CALLS[place].format(index))
            body.append("x = self.layer(x).tanh()")
        forward = "def forward(self, x):\n" + _indented("\n".join([*body, "return x"]))
        return "\n\n\n".join(
            [_HEAD, *helpers, _CLASS + "".join(f"\n\n{_indented(each)}" for each in (*methods, forward)), _TAIL]
        )

    @property
    def lines(self) -> set[int]:
        """The lines that break."""
        return {number for number, line in enumerate(self.text.splitlines(), 1) if line.endswith(MARK)}


def programs() -> SearchStrategy[Program]:
    """Modules with up to five parts."""
    from hypothesis import strategies as st

    part = st.tuples(st.sampled_from(sorted(CAUSES)), st.sampled_from(sorted([*AROUND, *CALLS])))
    fix = st.sampled_from([True, False, False, False])
    return st.builds(Program, st.lists(part, max_size=5).map(tuple), st.booleans(), fix)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else line for line in text.split("\n"))


_HEAD = """\
import contextlib
import logging
import time

import torch

LOG = logging.getLogger("random programs")
LOG.addHandler(logging.NullHandler())
LOG.propagate = False"""
_CLASS = """\
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.flag = True"""
_TAIL = """\
def target():
    torch.manual_seed(0)
    return Model(), (torch.randn(2, 3),)
"""
