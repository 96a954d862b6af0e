"""Targets that compile themselves: their own regions are traced, with their own options, and nothing around them."""

import re
from pathlib import Path

import pytest
import torch

from benchkit import UserError
from compile_bench import Case
from compile_bench.capture.collector import Collector, settings
from compile_bench.capture.text import break_lines
from compile_bench.capture.trace import RECOMPILE_LIMIT
from compile_bench.measure.accuracy import compare_with_eager, widened
from compile_bench.measure.steps import eager, load_case
from compile_bench.measure.survey import survey, triage
from compile_bench.targets.loading import load_target
from compile_bench.targets.regional import OwnRegions, compile_case, noting_regions
from compile_bench.triage.findings import findings_of

# ``# breaks`` marks the lines inside of compiled regions that break. The others run eagerly, as they are written.
MODEL = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        print(end="")  # breaks
        return x.relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if x.sum() > 1e9:
                x = x / x.max().item()
        return x


x = torch.ones(2, 4)
"""

# Ways to compile the blocks, or something that holds only them.
WAYS = {
    "wrapped blocks": """
def target():
    net = Net()
    net.blocks = nn.ModuleList(torch.compile(block) for block in net.blocks)
    return net, (x,)
""",
    "block.compile()": """
def target():
    net = Net()
    for block in net.blocks:
        block.compile(dynamic=False)
    return net, (x,)
""",
    "block.forward of an instance": """
def target():
    net = Net()
    for block in net.blocks:
        block.forward = torch.compile(block.forward)
    return net, (x,)
""",
    "decorated class": """
Block.forward = torch.compile(dynamic=False)(Block.forward)

def target():
    return Net(), (x,)
""",
    "a method, called by an eager forward": """
class Calls(Net):
    def __init__(self):
        super().__init__()
        self.compiled = torch.compile(self.first)

    def first(self, x):
        return self.blocks[0](x)

    def before(self, x):
        return x.sin()

    def forward(self, x):
        x = self.before(x)
        return self.compiled(x)

def target():
    return Calls(), (x,)
""",
    "whole model": """
def target():
    return torch.compile(Block()), (x,)
""",
    "model.compile()": """
def target():
    block = Block()
    block.compile()
    return block, (x,)
""",
    "function": """
block = Block()

@torch.compile
def run(x):
    return block(x)

def target():
    return run, (x,)
""",
    "decorated step": """
block = Block()

@torch.compile
def target():
    return block(x).sum()
""",
    "step with a compiled module": """
block = torch.compile(Block())

def target():
    loss = block(x).square().mean()
    loss.backward()
    return loss.detach()
""",
    "step of an object": """
class Trainer:
    def __init__(self):
        self.model = Block()
        self.model.compile()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def step(self):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

trainer = Trainer()
target = trainer.step
""",
    "step that calls a compiled function": """
block = Block()

@torch.compile
def loss_of(x):
    return block(x).square().mean()

def target():
    loss = loss_of(x)
    loss.backward()
    return loss.detach()
""",
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def written(text, **options):
        path = tmp_path / "self_compiled.py"
        path.write_text(text)
        return Case(f"{path}:target", "cpu", **options)

    yield written
    torch.compiler.reset()


def marked(text):
    return {number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# breaks")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_regions_are_traced_as_the_code_compiles_them(write, way, train, capsys):
    case = write(MODEL + WAYS[way], train=train)
    found = survey(case, seeds=(0,))
    assert found.regions
    assert {each.line for each in found.breaks} == marked(MODEL)
    assert not any(each.whole_frame for each in found.breaks)
    assert found.failures == ()
    assert found.eager == ()


UNCOMPILED = {
    "compiled helper": """
@torch.compile
def double(x):
    return x * 2

class Calls(Block):
    def forward(self, x):
        return double(super().forward(x))

def target():
    return Calls(), (x,)
""",
    "another model of the file": """
other = torch.compile(Net())

def target():
    return Block(), (x,)
""",
    "disabled": """
def target():
    return torch.compile(Block(), disable=True), (x,)
""",
}


@pytest.mark.parametrize("way", UNCOMPILED)
def test_a_model_without_regions_of_its_own_is_compiled_as_a_whole(write, way, capsys):
    text = MODEL + UNCOMPILED[way]
    found = survey(write(text, train=False), seeds=(0,))
    assert not found.regions
    assert {each.line for each in found.breaks} == marked(MODEL)


SCALED = """
class Scale:
    def __init__(self, value):
        self.value = value

class Scaled(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = Scale(value)

    def forward(self, x):
        return self.linear(x).view(4, 2).repeat(self.scale.value, 1)[:4].view(2, 4)

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(n + 1) for n in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def plain():
    return Stack(), (x,)

def target():
    net = Stack()
    for block in net.blocks:
        block.compile(fullgraph=True)
    return net, (x,)
"""


@pytest.mark.parametrize("scope", ["own", "blocks"])
@settings({"recompile_limit": 3})  # PyTorch's 8 take twice as long
def test_the_recompile_limit_of_equal_blocks_is_found(write, scope):
    case = write(MODEL + SCALED, train=False)
    if scope == "blocks":
        case = Case(case.target.replace(":target", ":plain"), "cpu", train=False, scope="blocks")
    found = survey(case, seeds=(0,))
    (limit,) = found.breaks
    assert limit.category == RECOMPILE_LIMIT
    assert "self.scale.value" in limit.source
    assert [each.guard.partition(" == ")[0] for each in found.recompiles] == ["self.scale.value"]
    assert found.regions == ("5 × Scaled (fullgraph=True)" if scope == "own" else "")
    line = next(number for number, text in enumerate((MODEL + SCALED).splitlines(), 1) if "class Scaled" in text)
    (finding,) = findings_of([found])
    name = Path(limit.file).name
    assert re.fullmatch(
        rf"no longer compiled: Scaled\.forward \({name}:(\d+)\): recompile_limit = 3", finding.past_limit
    )
    assert line < limit.compiled[0].line <= limit.line
    (checked,) = break_lines([limit], Path(limit.file).parent)
    assert checked.endswith(f"; no longer compiled: forward ({name}:{limit.compiled[0].line}): recompile_limit = 3")


def test_copies_have_regions_and_weights_of_their_own(write):
    text = MODEL + "def target():\n    return torch.compile(nn.Linear(4, 4), backend='eager'), (x,)\n"
    target = load_case(write(text))
    assert isinstance(target.model, OwnRegions)
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.fill_(0.25)
    before = torch.get_rng_state()
    copied = target.copied()
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(copied(*target.args), target.model(*target.args))
    with torch.no_grad():
        next(copied.parameters()).zero_()
    assert next(target.model.parameters()).max() == 0.25
    assert next(widened(target).model.parameters()).dtype == torch.float64


def test_the_eager_model_compiles_nothing_and_the_compiled_one_does(write):
    case = write(MODEL + "def target():\n    return torch.compile(nn.Linear(4, 4), backend='aot_eager'), (x,)\n")
    with Collector() as collector:
        eager(case)
    assert collector.compilations == 0
    target = load_case(case)
    model = target.copied()
    with Collector() as collector:
        accuracy = compare_with_eager(target, compile_case(model, case), model, train=True)
    assert collector.compilations > 0
    assert accuracy.holds


def test_an_option_of_the_command_is_refused_where_the_code_has_its_own(write):
    case = write(MODEL + WAYS["block.compile()"], train=False, dynamic=True)
    with pytest.raises(UserError, match=r"compiles 2 × Block \(dynamic=False\) itself, got --dynamic: set the option"):
        survey(case, seeds=(0,))


def test_the_backend_of_a_region_is_used(write):
    text = """
def broken(graph, inputs):
    raise NotImplementedError("not this graph")

def target():
    return torch.compile(nn.Linear(4, 4), backend=broken), (x,)
"""
    found = triage(write(MODEL + text, train=False))
    assert found.failures == ("BackendCompilerFailed: backend='broken' raised: NotImplementedError: not this graph",)


def test_torch_compile_is_as_before_after_loading(write):
    before = torch.compile
    load_target(write(MODEL + WAYS["whole model"]).target, "cpu")
    assert torch.compile is before
    with noting_regions(), noting_regions():
        assert torch.compile is not before
    assert torch.compile is before
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2


SERIAL = """
class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept = None

    def forward(self, x):
        self.kept = self.linear(x) + (0 if self.kept is None else self.kept)
        return self.kept

def target():
    return Grows(), (x,)
"""


def test_what_the_eager_model_raises_in_a_later_step_is_no_fault_of_the_compiler(write):
    case = write(MODEL + SERIAL)
    found = survey(case, seeds=(0,))
    assert found.failures == ()
    assert "raises by itself, uncompiled, in step 2 of training: RuntimeError: Trying to backward" in found.notes[0]
    with pytest.raises(UserError, match="raises by itself, uncompiled, in step 2 of training"):
        triage(case)


SCHEDULED = """
def target():
    return Target(nn.Linear(4, 4), (x,), schedule=[(x[:2],), (x[:, :3],)])
"""


def test_what_the_eager_model_raises_in_the_schedule_is_no_fault_of_the_compiler(write):
    case = write("from compile_bench.targets.target import Target\n" + MODEL + SCHEDULED)
    with pytest.raises(UserError, match="raises by itself, uncompiled, in entry 2 of the schedule of training: R"):
        triage(case)
