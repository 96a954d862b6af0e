"""Advice on whole programs, from Dynamo's own trace of them."""

from dataclasses import replace

import pytest
import torch

from compile_bench import Case
from compile_bench.cli.triaging import describe_report
from compile_bench.fixes.fixer import Fixer
from compile_bench.measure.survey import survey
from compile_bench.triage.findings import TriageReport, findings_of, without_refuted

from .printed import printed_text
from .triage_models import InThisProcess

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

HEAD = "import torch\nfrom torch import nn\n\n\n"

# Hooks of two layers, with a counter that is in the text of a key alone.
HOOKED = """\
kept = {}


@torch.compiler.disable
def keep(name, value):
    kept[name] = value.mean().item()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x


def make():
    torch.manual_seed(0)
    net = Net()
    for n, block in enumerate(net.blocks):
        block.register_forward_hook(lambda module, inputs, output, n=n: keep(f"block{n}", output.detach()))
    return net, (torch.randn(2, 8),)
"""

# A ring buffer that is written at a position from a tensor.
RING = """\
class Block(nn.Module):
    def forward(self, x, ring, where):
        begin = where[0]
        ring[:, begin : begin + x.shape[1]] = x.cos()
        return x + ring.mean(1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        rings = [(torch.zeros(2, 9, 4), torch.tensor([3])) for _ in self.blocks]
        for block, (ring, where) in zip(self.blocks, rings):
            x = block(x, ring, where)
        return x


def make():
    return Net(), (torch.ones(2, 3, 4),)
"""

# An attribute that one function counts and another one divides by.
COUNTED = """\
class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.total = 0, torch.zeros(())

    def take(self, y):
        self.seen += 1
        self.total = self.total + y.detach().mean()

    def forward(self, x):
        self.take(x)
        torch._dynamo.graph_break()
        return x * 2, self.total / self.seen


def make():
    return Mean(), (torch.ones(2, 3),)
"""

# Experts that get as many rows as a router chose.
ROUTED = """\
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3)

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        counts = torch.bincount(chosen, minlength=3)
        rows = counts.tolist()
        parts = torch.split(x[chosen.argsort()], rows)
        return torch.cat([part * (n + 1) for n, part in enumerate(parts)])


def make():
    torch.manual_seed(0)
    return Experts(), (torch.randn(16, 8),)
"""


@pytest.fixture
def triaged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(name, text):
        (tmp_path / f"{name}.py").write_text(HEAD + text)
        case = Case(f"{tmp_path / name}.py:make", "cpu", train=False)
        found = survey(case, seeds=(0,))
        findings = findings_of([found])
        fixer = Fixer(InThisProcess(tmp_path), case, [found], tmp_path)
        fixes = fixer.fix([(each.file, each.line) for each in findings])
        findings = [without_refuted(each, fixes.refuted.get((each.file, each.line), ())) for each in findings]
        return findings, printed_text(
            describe_report,
            replace(TriageReport.of_surveys(name, (found,)), findings=tuple(findings), recompiles=found.recompiles),
            {},
        )

    yield run
    torch.compiler.reset()


def test_hooks_that_keep_values_get_no_advice_that_triage_refuted(triaged):
    findings, printed = triaged("hooked", HOOKED)
    assert {each.advice for each in findings} == {""}
    assert "do: no safe change known; PyTorch describes this break: https://" in printed
    assert "compiled again, n is no longer 0" in printed.partition("follows from it")[2]
    assert "as a tensor" not in printed
    assert "detach" not in printed.replace("output.detach()", "")


def test_a_slice_written_at_a_value_is_one_cause(triaged):
    findings, printed = triaged("ring", RING)
    own = [each for each in findings if not each.follows_from]
    assert [(each.source, each.case) for each in own] == [
        ("ring[:, begin : begin + x.shape[1]] = x.cos()", "slice-by-value")
    ]
    assert "index_copy(dim, start + torch.arange(length), values)" in own[0].advice
    assert "for _ in self.blocks]" not in printed


def test_an_attribute_read_in_two_functions_gets_one_advice(triaged):
    _, printed = triaged("counted", COUNTED)
    assert printed.count("register_buffer(…, persistent=False)") == 1
    assert "self.seen = self.seen + …" in printed
    assert "annealed-attribute" not in printed


def test_counts_of_a_router_are_not_asked_for_before_the_call(triaged):
    findings, printed = triaged("routed", ROUTED)
    assert {each.case for each in findings} == {"bincount", "item-captured"}
    assert "Pass the sizes" not in printed


def test_what_is_advised_for_the_ring_is_one_graph():
    def written(x, ring, where):
        return x + ring.index_copy(1, where[0] + torch.arange(x.shape[1]), x.cos()).mean(1, keepdim=True)

    def sliced(x, ring, where):
        begin = where[0]
        ring[:, begin : begin + x.shape[1]] = x.cos()
        return x + ring.mean(1, keepdim=True)

    torch.compiler.reset()
    compiled = torch.compile(written, backend="eager", fullgraph=True)
    for begin in (0, 3, 6):
        x, where = torch.randn(2, 3, 4), torch.tensor([begin])
        torch.testing.assert_close(
            compiled(x, torch.zeros(2, 9, 4), where), sliced(x, torch.zeros(2, 9, 4), where), rtol=0, atol=0
        )
