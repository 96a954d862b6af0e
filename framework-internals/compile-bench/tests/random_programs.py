"""Random modules and step functions with planted breaks and recompilations: their description, text and lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

MARK = "  # breaks"
AGAIN = "  # compiles again"
TOGETHER = "  # compiles again, with its like"

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

# State of the module by name of what changes it, and statements; the marked line makes the guard that fails.
STATES = {
    "int-attribute": "self.count_{0} = 1",
    "growing-list": "self.seen_{0} = []",
    "kv-cache": "self.cache_{0} = torch.zeros(1, 3)",
    "changed-global": "",
}
CHANGES = {
    "int-attribute": f"x = x * self.count_{{0}}{AGAIN}\nself.count_{{0}} += 1",
    "growing-list": f"self.seen_{{0}}.append(0){AGAIN}\nx = x + len(self.seen_{{0}})",
    # PyTorch names no line for the size of a tensor.
    "kv-cache": "self.cache_{0} = torch.cat([self.cache_{0}, x.detach()])\nx = x + self.cache_{0}.mean()",
    # The first one that fails makes all numbers that have changed dynamic, so the others' guards never fail.
    "changed-global": f"x = x * SCALE_{{0}}{TOGETHER}\nbump_{{0}}()",
}
_GLOBAL = "SCALE_{0} = 1.0\n\n\ndef bump_{0}():\n    global SCALE_{0}\n    SCALE_{0} += 1.0"

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
    "helper": "x = part_{0}(x, self)",
    "comprehension": "x = sum([part_{0}(x + k, self) for k in range(2)])",
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
        batches: Whether other batch sizes follow, with static shapes.
    """

    parts: tuple[tuple[str, str], ...]
    train: bool
    fix: bool = False
    batches: bool = False

    @property
    def text(self) -> str:
        """The file; ``target`` returns the module and its arguments."""
        helpers, methods, states, body = [], [], [], []
        for index, (cause, place) in enumerate(self.parts):
            snippet = CAUSES.get(cause) or CHANGES[cause].format(index)
            if cause in STATES:
                states.append(STATES[cause].format(index))
            if cause == "changed-global":
                helpers.append(_GLOBAL.format(index))
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
                    helpers.append(f"def part_{index}(x, self):\n{own}")
                body.append(CALLS[place].format(index))
            body.append("x = self.layer(x).tanh()")
        init = "def __init__(self):\n" + _indented("\n".join([_INIT, *filter(None, states)]))
        forward = "def forward(self, x):\n" + _indented("\n".join([*body, "return x"]))
        members = "".join(f"\n\n{_indented(each)}" for each in (init, *methods, forward))
        tail = _TAIL.format(schedule="[(torch.randn(n, 3),) for n in (4, 5)]" if self.batches else "()")
        return "\n\n\n".join([_HEAD, *helpers, f"class Model(torch.nn.Module):{members}", tail])

    @property
    def lines(self) -> set[int]:
        """The lines that break."""
        return self._marked(MARK)

    @property
    def guards(self) -> set[int]:
        """The lines that make guards which fail."""
        return self._marked(AGAIN)

    @property
    def shared_guards(self) -> set[int]:
        """The lines of which one makes a guard that fails."""
        return self._marked(TOGETHER)

    def _marked(self, mark: str) -> set[int]:
        return {number for number, line in enumerate(self.text.splitlines(), 1) if line.endswith(mark)}


# Statements of a training step; each stands in it once at most.
STEP_PARTS = {
    "backward": f"loss.backward(){MARK}",
    "optimizer": f"opt.step(){MARK}",
    "scheduler": f"plan.step(){MARK}",
    "zero-grad": f"opt.zero_grad(){MARK}",
    "print": f'print(end=""){MARK}',
    "item": f"losses.append(loss.item()){MARK}",
    "finite": f"if not torch.isfinite(loss):{MARK}\n    raise FloatingPointError",
    "accumulated": f"for part in data.split(2):\n    (net(part).square().mean() / 2).backward(){MARK}",
    "clipped": "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)",
    "clipped-by-element": "for kept in net.parameters():\n    if kept.grad is not None:\n"
    "        kept.grad.clamp_(-0.5, 0.5)",
    "counted": 'counts["step"] += 1',
    "rate": 'for group in opt.param_groups:\n    group["lr"] *= 0.99',
    "history": "history.append(loss.detach())",
    "average": "with torch.no_grad():\n    for kept, now in zip(average, net.parameters(), strict=True):\n"
    "        kept.lerp_(now, 0.1)",
}
STEP_AROUND = ("plain", "try", "with", "flag", "helper")
# How the step is written, and what is compiled: all of it, or the model by its own call of torch.compile.
STEP_FORMS = {
    "function": "def target():\n{}",
    "closure": "def make(net):\n    def step():\n{}\n\n    return step\n\n\ntarget = make(net)",
    "method": "class Trainer:\n    def step(self):\n{}\n\n\ntarget = Trainer().step",
    "object": "class Trainer:\n    def __call__(self):\n{}\n\n\ntarget = Trainer()",
    "own region": 'net = torch.compile(net, backend="aot_eager")\n\n\ndef target():\n{}',
}


@dataclass(frozen=True)
class StepProgram:
    """A random training step, written as a user writes it.

    Attributes:
        form: Name of one of :data:`STEP_FORMS`.
        parts: Statements behind the forward pass, and what surrounds each.
        optimizer: Class of ``torch.optim``.
        scheduler: The schedule of its rate.
    """

    form: str
    parts: tuple[tuple[str, str], ...]
    optimizer: str = "SGD"
    scheduler: str = "StepLR(opt, 10)"
    train: bool = True
    fix: bool = False
    guards: frozenset[int] = frozenset()
    shared_guards: frozenset[int] = frozenset()

    @property
    def text(self) -> str:
        """The file; ``target`` is the step."""
        helpers, body = [], ["loss = net(data).square().mean()"]
        for part, around in self.parts:
            statement = STEP_PARTS[part]
            if around == "helper":
                name = f"run_{part.replace('-', '_')}"
                helpers.append(f"def {name}(loss):\n{_indented(statement)}")
                body.append(f"{name}(loss)")
            else:
                template = AROUND[around].replace("self.flag", "FLAG").replace("x = x + 9", "pass")
                body.append(template.format(statement if template == "{}" else _indented(statement)))
        lines = _indented("\n".join([*body, "return loss.detach()"]))
        depth = {"closure": 2, "method": 2, "object": 2}.get(self.form, 1)
        for _ in range(depth - 1):
            lines = _indented(lines)
        head = _STEP_HEAD.format(optimizer=self.optimizer, scheduler=self.scheduler)
        return "\n\n\n".join([head, *helpers, STEP_FORMS[self.form].format(lines)]) + "\n"

    @property
    def lines(self) -> set[int]:
        """The lines that break; none where the model alone is compiled."""
        if self.form == "own region":
            return set()
        return {number for number, line in enumerate(self.text.splitlines(), 1) if line.endswith(MARK)}


def step_programs() -> SearchStrategy[StepProgram]:
    """Training steps with up to six statements."""
    from hypothesis import strategies as st

    part = st.tuples(st.sampled_from(sorted(STEP_PARTS)), st.sampled_from(STEP_AROUND))
    parts = st.lists(part, max_size=6, unique_by=lambda part: part[0]).map(tuple)
    return st.builds(
        StepProgram,
        st.sampled_from(sorted(STEP_FORMS)),
        parts,
        st.sampled_from(["SGD", "AdamW", "RMSprop", "Adagrad"]),
        st.sampled_from(["StepLR(opt, 10)", "LambdaLR(opt, lambda step: 0.9**step)", "LinearLR(opt)"]),
        st.booleans(),
    )


def programs() -> SearchStrategy[Program]:
    """Modules with up to five parts."""
    from hypothesis import strategies as st

    cause = st.sampled_from(sorted([*CAUSES, *CHANGES]))
    part = st.tuples(cause, st.sampled_from(sorted([*AROUND, *CALLS])))
    one_in_four = st.sampled_from([True, False, False, False])
    return st.builds(Program, st.lists(part, max_size=5).map(tuple), st.booleans(), one_in_four, one_in_four)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else line for line in text.split("\n"))


_HEAD = """\
import contextlib
import logging
import time

import torch

from compile_bench.targets.target import Target

LOG = logging.getLogger("random programs")
LOG.addHandler(logging.NullHandler())
LOG.propagate = False"""
_STEP_HEAD = """\
import contextlib

import torch

torch.manual_seed(0)
FLAG = True
net = torch.nn.Linear(3, 1)
average = [each.detach().clone() for each in net.parameters()]
opt = torch.optim.{optimizer}(net.parameters(), lr=0.1)
plan = torch.optim.lr_scheduler.{scheduler}
data = torch.randn(4, 3)
history, losses, counts = [], [], {{"step": 0}}"""
_INIT = """\
super().__init__()
self.layer = torch.nn.Linear(3, 3)
self.flag = True"""
_TAIL = """\
def target():
    torch.manual_seed(0)
    return Target(Model(), (torch.randn(2, 3),), schedule={schedule})
"""
