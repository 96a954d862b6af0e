"""Triage's fixes: found, tried, proved and timed, or refused."""

import itertools
import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from benchkit import Quantity, UserError
from benchkit.report.rendering import block_text
from compile_bench import Case, Harness
from compile_bench.capture.collector import settings, user_code_filter
from compile_bench.capture.trace import Break
from compile_bench.catalogue.source import Edit, Source
from compile_bench.cli.triaging import describe_report, write_patches
from compile_bench.fixes import fixer as fixer_module
from compile_bench.fixes import trial as proof
from compile_bench.fixes.fixer import Fixer
from compile_bench.fixes.observation import observe
from compile_bench.fixes.rewrites import candidates
from compile_bench.fixes.trial import reference, refusal
from compile_bench.fixes.types import Figures, Fix, Trial
from compile_bench.measure.records import place_of
from compile_bench.measure.survey import survey
from compile_bench.report.breaks import combined_section
from compile_bench.targets.loading import load_target
from compile_bench.targets.overlay import forget_user_modules, overlaid
from compile_bench.triage.findings import TriageReport
from compile_bench.triage.run import run_triage

from .printed import printed_text
from .triage_models import InThisProcess, finding_at

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns about what the models do


REVEALING = """\
import torch


class Revealing(torch.nn.Module):
    def forward(self, x):
        for index in range(2):
            try:
                print(end="")
                x = x * [2.0][index]
            except IndexError:
                x = x + 1
        print(end="")
        return x * x.norm().item()


def target():
    return Revealing(), (torch.ones(3),)
"""


def test_breaks_that_a_fix_brings_to_light_are_fixed_too(folder, capsys):
    """Without the try the model raises, so that only the fix of line 8 shows lines 12 and 13."""
    (folder / "triage_model.py").write_text(REVEALING)
    case = Case(f"{folder / 'triage_model.py'}:target", "cpu", train=False)
    found = survey(case, seeds=(0,))
    assert [each.line for each in found.breaks] == [8]
    assert found.untraced == {(str(folder / "triage_model.py"), "forward")}
    results = Fixer(InThisProcess(folder), case, [found], folder).fix([place_of(found.breaks[0])])
    assert [each.line for each in results.revealed] == [12, 13]
    assert {line: each.accepted for (_, line), each in results.fixes.items()} == {8: True, 12: True, 13: True}
    assert (results.combined.before.breaks, results.combined.after.breaks) == (3, 0)


def test_a_file_that_cannot_be_loaded_twice_refutes_no_change(folder, monkeypatch, capsys):
    """It may define operators, or fill a registry. The advice stays."""
    (folder / "triage_model.py").write_text("import os\n\nos.environ.pop('ONCE')\n" + TWICE)
    case = Case(f"{folder / 'triage_model.py'}:target", "cpu", train=False)
    monkeypatch.setenv("ONCE", "yes")
    (found, *_) = (seen := survey(case, seeds=(0,))).breaks
    forget_user_modules(user_code_filter())
    monkeypatch.setenv("ONCE", "yes")
    with pytest.raises(
        UserError, match=r"trying changes loads the target twice in a process, and the second time .*ONCE"
    ):
        Fixer(InThisProcess(folder), case, [seen], folder).fix([place_of(found)])


TWICE = """\
import torch


class Twice(torch.nn.Module):
    def forward(self, x):
        x = x.cos()
        print("seen", end="")
        x = x.sin() + 1
        print("seen", end="")
        return x * 2


def target():
    return Twice(), (torch.ones(3),)
"""


def test_a_line_that_is_there_twice_is_fixed_twice(folder, capsys):
    path = folder / "triage_model.py"
    path.write_text(TWICE)
    case = Case(f"{path}:target", "cpu", train=False)
    found = survey(case, seeds=(0,))
    fix_results = Fixer(InThisProcess(folder), case, [found], folder).fix([place_of(met) for met in found.breaks])
    assert {line: (each.before.breaks, each.after.breaks) for (_, line), each in fix_results.fixes.items()} == {
        7: (2, 1),
        9: (2, 1),
    }
    assert fix_results.combined.after.breaks == 0


@pytest.mark.slow
def test_of_two_changes_in_each_others_way_the_costlier_is_made(folder, capsys, monkeypatch):
    """Each is right by itself. The third one is in nobody's way, and is not lost with them."""
    path = folder / "triage_model.py"
    thrice = TWICE.replace("return x * 2", 'x = x * 2\n        print("seen", end="")\n        return x')
    path.write_text(thrice)
    proposed = fixer_module._candidates

    def wide(found):
        """The first print leaves, and all up to the second one is written once more."""
        (narrow,) = proposed(found)
        if found.line != 7:
            return [narrow]
        source = narrow.source
        first, second = source.statement(7), source.statement(9)
        text = f"{source.line(8).strip()}\n        {source.text(second)}"
        return [replace(narrow, edits=(Edit(source.start(first), source.end(second), text),))]

    monkeypatch.setattr(fixer_module, "_candidates", wide)
    case = Case(f"{path}:target", "cpu", train=False)
    found = survey(case, seeds=(0,))
    findings = {
        met.line: finding_at(met.place, source=met.source, kinds=("inference",), end_line=met.line)
        for met in found.breaks
    }
    fix_results = Fixer(InThisProcess(folder), case, [found], folder).fix(
        [(findings[line].file, line) for line in (9, 7, 11)]
    )
    fixes = {line: each for (_, line), each in fix_results.fixes.items()}
    assert {line: (each.accepted, bool(each.conflict)) for line, each in fixes.items()} == {
        9: (True, False),
        7: (True, True),
        11: (True, False),
    }
    assert fix_results.combined.title == "verified fixes without conflicts"
    assert (fix_results.combined.before.breaks, fix_results.combined.after.breaks) == (3, 1)
    report = TriageReport(
        "", findings=tuple(replace(findings[line], fix=fixes[line]) for line in fixes), combined=fix_results.combined
    )
    printed = printed_text(describe_report, report, write_patches(report, folder / "patches"))
    assert "  the combined fix leaves it out: two of the changes conflict" in printed
    assert "| verified fixes without conflicts | breaks |" in printed
    subprocess.run(["git", "apply", str(folder / "patches" / "all.patch")], cwd=folder, check=True)
    assert path.read_bytes() == fix_results.overlay[str(path)]
    assert path.read_text().splitlines()[6] == '        print("seen", end="")'


@pytest.mark.slow
def test_where_the_proof_refuses_a_change_the_next_one_is_tried(folder, capsys, monkeypatch):
    path = folder / "triage_model.py"
    path.write_text(TWICE)
    proposed, proofs = fixer_module._candidates, []

    def two_ways(found):
        """Of the first print, before its own change one that the proof refuses."""
        (fair,) = proposed(found)
        wrong = fair.source.replace(fair.source.statement(found.line), "x = x + 0 * x")
        return [replace(fair, edits=(wrong,)), fair] if found.line == 7 else [fair]

    class Counting(InThisProcess):
        def ask(self, function, *arguments, **words):
            if function.__name__ == "prove":
                proofs.append(words["proposal"].overlays[0][str(path)])
                if b"0 * x" in proofs[-1]:
                    return Trial("the changed model raised an error")
            return super().ask(function, *arguments, **words)

    monkeypatch.setattr(fixer_module, "_candidates", two_ways)
    case = Case(f"{path}:target", "cpu", train=False)
    found = survey(case, seeds=(0,))
    fix_results = Fixer(Counting(folder), case, [found], folder).fix([place_of(met) for met in found.breaks])
    assert {line: (each.accepted, each.conflict) for (_, line), each in fix_results.fixes.items()} == {
        7: (True, ""),
        9: (True, ""),
    }
    assert (fix_results.combined.before.breaks, fix_results.combined.after.breaks) == (2, 0)
    assert b"0 * x" not in fix_results.overlay[str(path)]
    assert len(proofs) == 4  # both, each by itself, both in the other way


@pytest.mark.slow
def test_a_fix_that_is_wrong_takes_no_other_with_it(folder, monkeypatch):
    """One is made so that it is right until Inductor compiles it: nothing but the proof can tell."""
    proposed = fixer_module._candidates

    def spoiled(found):
        if not found.source.startswith("print"):
            return proposed(found)
        (fair,) = proposed(found)
        wrong = "x = x + 0.1 * torch.compiler.is_compiling()"
        return [replace(fair, edits=(fair.source.replace(fair.source.statement(found.line), wrong),))]

    monkeypatch.setattr(fixer_module, "_candidates", spoiled)
    with Harness.open("cpu", limit=1800) as harness:
        report = run_triage(harness, Case(f"{folder / 'triage_model.py'}:target", "cpu"), kinds=(False,), cost=False)
    assert not report.absent
    fixes = {each.source: each.fix for each in report.findings}
    assert {source.split("(")[0]: each.accepted for source, each in fixes.items()} == {
        "if x.mean": True,
        "print": False,
        "/ x.abs": True,
    }
    assert "output is off by" in next(each.verdict for each in fixes.values() if not each.accepted)
    assert (report.combined.title, report.combined.cases) == (
        "all verified fixes",
        "item, branch-on-value",
    )
    assert (report.combined.before.breaks, report.combined.after.breaks) == (3, 1)


def test_what_compiling_alone_does_to_the_values_is_no_fault_of_a_change(folder, monkeypatch):
    def inexact(error):
        def compiled(model, case, *, random):
            def call(x):
                return model(x) * (1 + error)

            call._orig_mod = model
            return call

        monkeypatch.setattr(proof, "compiled", compiled)

    case, path = Case(f"{folder / 'triage_model.py'}:target", "cpu", train=False), folder / "reference.pt"
    inexact(1e-5)
    reference(case, path=path)
    assert refusal(case, path=path, with_inductor=True).out_of_bound
    reference(case, path=path, calibrated=True)
    assert refusal(case, path=path, with_inductor=True) is None
    inexact(1e-3)
    assert refusal(case, path=path, with_inductor=True).out_of_bound


@pytest.mark.parametrize("zeros_alone", [False, True])
def test_a_bound_that_would_let_anything_pass_is_none(folder, monkeypatch, zeros_alone):
    """Such as that of a norm of zeros: nothing is compared there, or nothing at all."""
    case, path = Case(f"{folder / 'triage_model.py'}:target", "cpu", train=False), folder / "reference.pt"

    def compiled(model, case, *, random):
        return lambda x: model(x) * (1.5 if not zeros_alone or not x.any() else 1.0)

    monkeypatch.setattr(proof, "compiled", compiled)
    reference(case, path=path, calibrated=True)
    found = refusal(case, path=path, with_inductor=False)
    if zeros_alone:
        assert found is None
        assert "arguments × 0" not in {variant.variation for variant in proof.read_reference(path).variants}
    else:
        assert found.why == "compiling the unchanged model changes output by 0.5, so nothing can be compared"


def test_a_model_that_raises_only_when_it_is_compiled_has_a_reference(folder, monkeypatch):
    case, path = Case(f"{folder / 'triage_model.py'}:target", "cpu", train=False), folder / "reference.pt"

    def raises(model, case, *, random):
        raise TypeError("sequence item 1: expected str instance, float found")

    monkeypatch.setattr(proof, "compiled", raises)
    reference(case, path=path, calibrated=True)
    assert refusal(case, path=path, with_inductor=False) is None


KEEPING = """
import torch
from torch import nn

class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.history = []

    def forward(self, x):
        x = self.embed(x)
        self.history.append(x.detach())
        return x @ self.history[0].t()

def target():
    torch.manual_seed(0)
    return Tracker(), (torch.randn(3, 4),)
"""


def test_what_a_model_keeps_from_call_to_call_is_no_fault_of_a_change(folder, monkeypatch):
    path, written = folder / "triage_model.py", folder / "reference.pt"
    path.write_text(KEEPING)
    case = Case(f"{path}:target", "cpu", train=False)
    reference(case, path=written)
    assert refusal(case, path=written, with_inductor=False) is None
    # Nor is it what compiling does: that would allow a change for anything.
    monkeypatch.setattr(proof, "compiled", lambda model, case, *, random: model)
    reference(case, path=written, calibrated=True)
    expected = proof.read_reference(written).variants
    assert expected
    assert all(variant.allowance["output"] < 1e-6 for variant in expected)


DRIFTING = """\
import torch

LAYER = torch.nn.Linear(4, 2)
OPTIMIZER = torch.optim.SGD(LAYER.parameters(), lr=0.5)
INPUT = torch.randn(3, 4)


def step():
    OPTIMIZER.zero_grad()
    loss = LAYER(INPUT).square().mean()
    loss.backward()
    OPTIMIZER.step()
    return loss.detach()
"""


def test_a_step_that_trains_is_compared_with_its_first_call(folder, monkeypatch):
    """Its state goes on from call to call, and there are no arguments to scale."""
    path = folder / "triage_model.py"
    path.write_text(DRIFTING)
    monkeypatch.setattr(proof, "compiled", lambda model, case, *, random: torch.compile(model, backend="eager"))
    case = Case(f"{path}:step", "cpu")
    torch.manual_seed(0)
    reference(case, path=folder / "reference.pt")
    forget_user_modules(user_code_filter())
    torch.manual_seed(0)
    assert refusal(case, path=folder / "reference.pt", with_inductor=False) is None


COUNTED = """\
import torch
from torch import nn


class Lit(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)
        self.seen = 0

    def forward(self, x):
        self.seen += len(x)
        h = self.net(x)
        print("loss", end="")
        return h.sin()


def target():
    torch.manual_seed(0)
    return Lit(), (torch.randn(4, 8),)
"""


@settings({"recompile_limit": 3})  # PyTorch's 8 take twice as long
def test_a_counter_is_seen_past_the_recompile_limit_and_its_fix_is_verified(folder, capsys):
    """Without the fix of line 12 the function runs eagerly, whatever else is fixed."""
    path = folder / "triage_model.py"
    path.write_text(COUNTED)
    case = Case(f"{path}:target", "cpu", train=False)
    found = survey(case, seeds=(0,))
    assert {each.line: each.category for each in found.breaks} == {12: "recompile limit", 14: "side effect"}
    results = Fixer(InThisProcess(folder), case, [found], folder).fix([place_of(each) for each in found.breaks])
    fixes = {line: fix for (_, line), fix in results.fixes.items()}
    assert (fixes[12].cases, fixes[12].accepted) == ("counter", True)
    assert (fixes[14].before.breaks, fixes[14].after.breaks) == (2, 1)  # the limit is among what is left
    assert (results.combined.before.breaks, results.combined.after.breaks) == (2, 0)
    changed = results.overlay[str(path)].decode()
    assert 'self.register_buffer("seen", torch.tensor(0), persistent=False)' in changed
    assert "self.seen = self.seen + len(x)" in changed


RESET = """\
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 1

    def forward(self, x):
        x = x * self.count
        self.count -= 2 - 3
        if x.shape[0] > 8:
            self.count = 0
        return x.sin()


def target():
    return Model(), (torch.ones(2),)
"""


@settings({"recompile_limit": 3})  # PyTorch's 8 take twice as long
def test_a_counter_that_the_backward_pass_needs_is_not_changed_in_place(folder, capsys):
    path = folder / "triage_model.py"
    path.write_text(RESET)
    case = Case(f"{path}:target", "cpu")
    (limit,) = (found := survey(case, seeds=(0,))).breaks
    results = Fixer(InThisProcess(folder), case, [found], folder).fix([place_of(limit)])
    assert results.combined.accepted
    assert "self.count = self.count - (2 - 3)" in results.overlay[str(path)].decode()
    assert "self.count = torch.as_tensor(0, device=self.count.device)" in results.overlay[str(path)].decode()
    with overlaid(results.overlay):
        forget_user_modules(user_code_filter())
        model = load_target(case.target, "cpu").model
    out = [model(torch.ones(n, requires_grad=True)) for n in (2, 9, 2)]
    sum(each.sum() for each in out).backward()
    assert [float(each[0]) for each in out] == [pytest.approx(torch.tensor(n).sin().item()) for n in (1.0, 2.0, 0.0)]


@pytest.fixture(scope="module")
def references():
    """What :func:`reference` has written, by the source of the unchanged model: many changes are of the same one."""
    return {}


@pytest.fixture
def refused(folder, tmp_path, references):
    """Compares two versions of a model without a code generator."""
    path, kept = folder / "triage_model.py", tmp_path / "reference.pt"
    case = Case(f"{path}:target", "cpu")

    def compared(source, changed):
        path.write_text(source)
        if source not in references:
            forget_user_modules(user_code_filter())
            reference(case, path=kept)
            references[source] = kept.read_bytes()
        kept.write_bytes(references[source])
        overlay = {str(path): changed.encode()}
        with overlaid(overlay):
            forget_user_modules(user_code_filter())
            return refusal(case, path=kept, with_inductor=False, overlay=overlay)

    return compared


@pytest.mark.parametrize(
    ("mark", "encoding", "said"), [("\ufeff", "utf-8", "begins with"), ("", "latin-1", "iso-8859-1")]
)
def test_a_file_of_another_encoding_has_no_fix_and_that_is_said(mark, encoding, said, folder):
    source = f"# -*- coding: {encoding} -*-\n{REVEALING}".replace("print(end", "print('ö', end")
    (folder / "triage_model.py").write_bytes((mark + source).encode(encoding))
    case = Case(f"{folder / 'triage_model.py'}:target", "cpu")
    report = run_triage(InThisProcess(folder), case, kinds=(False,), cost=False)
    assert report.findings
    assert any(line.startswith("fixes: ") and said in line for line in report.absent), report.absent


LISTED = """\
import torch

ROWS = []


class Listed(torch.nn.Linear):
    def forward(self, x):
        ROWS.append(len(x))
        print(end="")
        return super().forward(x)


def target():
    return Listed(4, 4), (torch.ones(2, 4),)
"""
OWN_BACKWARD = """\
import torch

MODEL = torch.nn.Linear(4, 1)


def target():
    loss = MODEL(torch.ones(2, 4)).square().mean()
    print(end="")
    loss.backward()
    return loss.detach()
"""


@pytest.mark.parametrize("source", [LISTED, OWN_BACKWARD])
def test_both_kinds_of_step_have_a_reference(source, folder, tmp_path):
    """The second is of the file loaded anew, whose globals the first has changed, and of a step that has gradients."""
    path, kept = folder / "triage_model.py", tmp_path / "reference.pt"
    path.write_text(source)
    case = Case(f"{path}:target", "cpu")
    assert proof.references(case, kinds=(True, False), path=kept)
    overlay = {str(path): source.replace("    print(end", "    ROWS and print(end").encode()}
    for own in (case, replace(case, train=False)):
        with overlaid(overlay if source == LISTED else {}):
            forget_user_modules(user_code_filter())
            assert refusal(own, path=proof._of_kind(kept, own), with_inductor=False) is None


def test_arguments_need_a_gradient_unless_the_model_refuses_that(refused):
    """The model has no weights: without a gradient of x nothing is kept for the backward pass."""
    buffer = RESET.replace("self.count = 1", 'self.register_buffer("count", torch.tensor(1))').replace(
        "self.count = 0", "self.count.zero_()"
    )
    assert refused(RESET, buffer.replace("self.count -= 2 - 3", "self.count = self.count + 1")) is None
    in_place = refused(RESET, buffer.replace("self.count -= 2 - 3", "self.count.add_(1)"))
    assert "modified by an inplace operation" in in_place.why
    cut = refused(RESET, RESET.replace("return x.sin()", "return x.sin().detach()"))
    assert cut.why == "output.requires_grad is False instead of True"
    numpy = RESET.replace("x.shape[0]", "x.numpy().shape[0]")
    assert refused(numpy, numpy) is None


BRANCHING = """\
import torch

LOG = []


class Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = [torch.ones(8), torch.ones(4, 8), torch.ones(8, dtype=torch.float64), 2.0]
        self.norms = []

    def forward(self, x, mask):
        if mask.any():
            x = x * self.tables[0]
        self.norms.append(x.norm().item() * self.tables[3])
        LOG.append(self.norms[-1])
        return x


def target():
    return Branching(), (torch.ones(8), torch.ones(4, dtype=torch.bool))
"""
BRANCH = "if mask.any():\n            x = x * self.tables[0]"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (BRANCHING.replace(BRANCH, "x = torch.where(mask.any(), x * self.tables[0], x)"), None),
        (
            BRANCHING.replace(BRANCH, "x = torch.where(mask.any(), x * self.tables[0], x[None])"),
            "the branch gives float32[8] or float32[1, 8], and torch.where gives float32[1, 8]",
        ),
        (BRANCHING.replace("x.norm().item()", "x.norm()"), "Branching.norms[…] is a tensor instead of a number"),
        (
            BRANCHING.replace("LOG.append(self.norms[-1])", "LOG.append(x.norm())"),
            "triage_model.LOG[…] is a tensor instead of a number",
        ),
    ],
)
def test_what_outputs_do_not_show_is_compared(refused, changed, why):
    refusal = refused(BRANCHING, changed)
    assert (refusal and refusal.why) == why


@pytest.mark.parametrize(
    ("table", "side"),
    [(1, "float32[4, 8]"), (2, "float64[8]")],
)
def test_a_branch_that_every_input_takes_keeps_its_other_side(refused, table, side):
    """The result has the shape and the dtype of the side that all inputs take."""
    model = BRANCHING.replace("self.tables[0]", f"self.tables[{table}]")
    branch = BRANCH.replace("[0]", f"[{table}]")
    changed = model.replace(branch, f"x = torch.where(mask.any(), x * self.tables[{table}], x)")
    assert refused(model, changed).why == f"the branch gives {side} or float32[8], and torch.where gives {side}"


CHOOSING = """\
import torch
from torch import nn


class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.extra = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.few, self.many = 2, 0.5

    def forward(self, x, mask, ids, score, steps=1):
        h = self.a(x)
        k = self.few if mask.any() else self.many
        if mask.all():
            h = h.detach()
        if mask.any():
            h = h + self.extra
        if score > 0:
            h = h * 2
        n = ids.max().item()
        n = n + 0.5 if steps > 1 else n
        if mask.sum() > 0:
            h = h / mask.sum()
        return h, n * h * k, h * (1.0 / x.abs().max().item())


def target():
    torch.manual_seed(0)
    mask = torch.tensor([True, False])
    return Choosing(), (torch.randn(2, 4), mask, torch.arange(3), torch.tensor([0.5])), {"steps": 1}
"""


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("0.5\n", "0.5\n", ""),
        (
            "k = self.few if mask.any() else self.many",
            "k = torch.where(mask.any(), self.few, self.many)",
            "the branch gives a number of type int or a number of type float, and torch.where gives float32[]",
        ),
        (
            "if mask.all():\n            h = h.detach()",
            "h = torch.where(mask.all(), h.detach(), h)",
            "one side of the branch needs a gradient, and the other does not",
        ),
        (  # such as weight decay, an optimizer does something with zeros
            "if mask.any():\n            h = h + self.extra",
            "h = torch.where(mask.any(), h + self.extra, h)",
            "extra is there in one of the two only (whole numbers and flags at their least)",
        ),
        (
            "if score > 0:\n            h = h * 2",
            "h = torch.where(score > 0, h * 2, h)",
            "torch.where chooses element by element, since the condition has the shape [1]",
        ),
        (
            "n + 0.5",
            "n + 0.25",
            "output 2 is off by 0.1; ",
        ),
        (
            "if mask.sum() > 0:\n            h = h / mask.sum()",
            "h = torch.where(mask.sum() > 0, h / mask.sum(), h)",
            "a.weight is off by nan; ",
        ),
        (
            "x.abs().max().item()",
            "x.abs().max().detach()",
            "the changed model raises nothing instead of ZeroDivisionError (arguments × 0)",
        ),
    ],
)
def test_what_other_arguments_show_is_compared(refused, old, new, why):
    refusal = refused(CHOOSING, CHOOSING.replace(old, new))
    assert (refusal.why if refusal else "")[: len(why) or None] == why


OF_INFERENCE = """\
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.table = torch.nn.Linear(4, 4), torch.ones(3, 1, 4)

    def forward(self, x):
        h = self.a(x)
        if self.training:
            return h
        if h.mean() > 1e6:
            h = h + self.table
        return h


def target():
    return Model(), (torch.randn(2, 4),)
"""


def test_a_line_that_inference_alone_runs_is_compared_in_inference(folder):
    path = folder / "triage_model.py"
    path.write_text(OF_INFERENCE)
    case = Case(f"{path}:target", "cpu")
    surveys = [survey(replace(case, train=train), seeds=(0,)) for train in (True, False)]
    (fix,) = Fixer(InThisProcess(folder), case, surveys, folder).fix([(str(path), 13)]).fixes.values()
    assert (fix.cases, fix.accepted) == ("branch-on-value", False)
    assert "the branch gives float32[3, 2, 4] or float32[2, 4]" in fix.verdict


STATEFUL = """\
import torch
from torch import nn


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.average = nn.Parameter(torch.ones(8), requires_grad=False)
        self.calls, self.history = 0, []

    def forward(self, x, given):
        h = self.lin(x)
        self.seen.add_(1)
        self.average.data.mul_(0.9)
        self.cache = h.detach() * 2
        self.calls += 1
        self.history.append(h.detach().mean())
        given["aux"] = h.detach() * 5
        given["mask"].mul_(3)
        return {"hidden": h * 1e8, "shares": h.softmax(-1), "top": h.argmax(-1) + 4, "other": h * 6, "kind": "a"}


def target():
    from compile_bench.targets.target import Target

    torch.manual_seed(0)
    model, x = Stateful(), torch.randn(4, 8)
    return Target(model, (x, {"mask": torch.ones(3)}), loss=lambda out: out["hidden"].sum() + out["shares"].sum())
"""


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("add_(1)", "add_(2)", "Stateful.seen is 2 instead of 1"),
        ("mul_(0.9)", "mul_(0.5)", "Stateful.average is off by 0.44"),
        ("detach() * 2", "detach() * 3", "Stateful.cache is off by 0.5"),
        ("calls += 1", "calls += 2", "Stateful.calls is 2 instead of 1"),
        ("self.history.append(", "print(end=str(", "Stateful.history, its length is not changed instead of 1"),
        ("detach() * 5", "detach()", "argument 1 after the call['aux'] is off by 0.8"),
        ("mul_(3)", "mul_(2)", "argument 1 after the call['mask'] is off by 0.33"),
        ("h.softmax", "x.softmax", "output 2 is off by"),  # small beside another output
        ("+ 4", "+ 5", "output 3 is int64[4] "),
        ("h * 6", "h.detach() * 6", "output 4.requires_grad is False instead of True"),  # in no loss
        ('"a"', '"b"', "value 1 of the output is 'b' instead of 'a'"),
    ],
)
def test_all_that_a_step_changes_is_compared(refused, old, new, why):
    changed = STATEFUL.replace(old, new).replace(
        "h.detach().mean())", "h.detach().mean()))" if "print" in new else "h.detach().mean())"
    )
    assert refused(STATEFUL, changed).why.startswith(why)


def test_a_step_that_writes_into_its_arguments_is_compared_with_what_it_was_given(refused):
    """Eager and float64 would otherwise compute with different arguments, and the bound would allow any change."""
    writing = STATEFUL.replace("h = self.lin(x)", "x.mul_(3)\n        h = self.lin(x)")
    assert refused(writing, writing) is None
    assert "off by 0.3" in refused(writing, writing.replace("h.softmax(-1)", "h.softmax(-1) * 1.3")).why


def test_what_is_imported_while_a_step_is_compiled_is_none_of_its_state(refused, tmp_path):
    """Inductor loads the code that it writes."""
    loading = """\
        spec = importlib.util.spec_from_file_location("written", FILE)
        sys.modules["written"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["written"])
"""
    (tmp_path / "written.py").write_text("key = 'c6k4'\n")
    head = f"import importlib.util, sys\n\nFILE = {str(tmp_path / 'written.py')!r}\n"
    changed = STATEFUL.replace("        h = self.lin(x)\n", loading + "        h = self.lin(x)\n")
    assert refused(head + STATEFUL, head + changed) is None


def test_what_a_function_reaches_is_compared(refused, monkeypatch):
    monkeypatch.setattr(proof, "compiled", lambda model, case, *, random: model)
    function = DRIFTING.replace(
        "def step():",
        "def model(x):\n    return LAYER(x)\n\n\ndef target():\n    return model, (INPUT,)\n\n\ndef step():",
    )
    cut = function.replace("return LAYER(x)", "return torch.nn.functional.linear(x, LAYER.weight.detach(), LAYER.bias)")
    assert refused(function, function) is None
    assert refused(function, cut).why == "Linear 1.weight is there in one of the two only"
    step = DRIFTING.replace("def step", "def target")
    assert refused(step, step) is None
    later = step.replace("OPTIMIZER.step()", "[p.grad.mul_(2) for p in LAYER.parameters()]\n    OPTIMIZER.step()")
    assert refused(step, later) is not None


def test_a_model_that_differs_from_run_to_run_is_not_compared(refused, monkeypatch):
    """Its difference from itself would be in every bound."""
    monkeypatch.setattr(proof, "compiled", lambda model, case, *, random: model)
    counted = ModuleType("counted")  # goes on counting where the model's own module is loaded again
    counted.runs = itertools.count(1).__next__
    monkeypatch.setitem(sys.modules, "counted", counted)
    importing = STATEFUL.replace("import torch\n", "import counted\nimport torch\n", 1)
    noisy = importing.replace("h = self.lin(x)", "h = self.lin(x) * counted.runs()")
    assert refused(noisy, noisy).why == "the unchanged model gives another output 1 in each run"
    dated = importing.replace("self.calls += 1", "self.calls += counted.runs()")
    assert refused(dated, dated) is None  # as with a time of day that it keeps


HALF = """\
import torch


def scaled(x):
    return x / (x.abs().max().item() + 1e-8)


def target():
    return scaled, (torch.ones(8, dtype=torch.float16),)
"""


def test_a_change_is_tried_with_zeros(refused):
    """In float16, 1e-8 is 0."""
    assert refused(HALF, HALF) is None
    assert "output is off by nan" in refused(HALF, HALF.replace(".item()", ".detach()")).why


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.seen = 0", "self.seen = 0.5"),
        ("self.seen += len(x)", "self.seen *= len(x)"),
        ("return Lit(), ", "lit = Lit()\n    lit.seen = 3\n    return lit, "),
        (
            "return h.sin()",
            "return h.sin()\n\n    def due(self):\n        return self.seen in {1, 10}",
        ),  # a tensor is not
        ("self.seen = 0", "self.other = self.seen = 0"),
    ],
)
def test_a_count_that_is_more_than_a_count_stays(tmp_path, old, new):
    source = Source(tmp_path / "counted.py", COUNTED.replace(old, new).encode())
    line = COUNTED.splitlines().index("        self.seen += len(x)") + 1
    found = Break(str(source.path), line, "forward", "", "", "", (), "recompile limit", whole_frame=True)
    assert "counter" not in {each.rewrite.case for each in candidates(source, found)}


def test_a_speed_up_is_claimed_only_beyond_the_control_and_an_eager_model_is_called_eager():
    step = Quantity(40e-3, "s", 32e-3, 59e-3, 9, "p20-p80")
    control = Quantity(1.0, "×", 0.7, 1.4, 9, "95 %")
    before = Figures(2, 3, step, 1.0, ("/home/model.py:12",))
    after = Figures(1, 1, step, 1.0, ("/home/model.py:12",))
    fix = Fix(
        "all verified fixes",
        cases="all",
        accepted=True,
        before=before,
        after=after,
        speedup=replace(control, value=1.2),
        control=control,
    )

    def combined_text(fix):
        return block_text(combined_section(fix))

    printed = combined_text(fix)
    assert printed.count("still eager: recompile limit at model.py:12") == 2
    assert "no difference that the control does not show" in printed
    assert "faster" in combined_text(replace(fix, speedup=Quantity(3.0, "×", 2.0, 4.0, 9, "95 %")))
    assert "the machine was busy" in combined_text(replace(fix, pressure=60.0))


@pytest.mark.slow
def test_steps_are_timed_past_the_recompile_limit(folder, monkeypatch, capsys):
    path = folder / "triage_model.py"
    path.write_text(COUNTED)
    monkeypatch.setattr(proof, "_SECONDS", 0.1)
    monkeypatch.setattr(proof, "prepare_toolchain", lambda device: 0.0)
    monkeypatch.setattr(proof, "compile_case", lambda model, case: torch.compile(model, backend="eager"))
    without_print = COUNTED.replace('print("loss", end="")', "pass").encode()
    found = proof._timed_steps(Case(f"{path}:target", "cpu", train=False), {str(path): without_print})
    assert found.eager_before == found.eager_after == (f"{path}:12",)
    assert found.steady.compiled.samples == found.steady.eager.samples >= 8


GUARDED = """
import torch

class Guarded(torch.nn.Module):
    def forward(self, x):
        if UNUSUAL:
            return torch.zeros_like(x)
        return x * 2

def target():
    return Guarded(), (torch.ones(3),)
"""


@pytest.mark.parametrize(
    ("guard", "variation"), [("x.isnan().any()", "one element is NaN"), ("x.isinf().any()", "one element is infinite")]
)
@pytest.mark.parametrize("with_inductor", [False, True])
def test_a_change_that_removes_a_guard_is_refused(folder, monkeypatch, guard, variation, with_inductor):
    path, written = folder / "triage_model.py", folder / "reference.pt"
    case = Case(f"{path}:target", "cpu", train=False)
    monkeypatch.setattr(proof, "compiled", lambda model, case, *, random: model)
    path.write_text(GUARDED.replace("UNUSUAL", guard))
    reference(case, path=written)
    forget_user_modules(user_code_filter())
    assert refusal(case, path=written, with_inductor=with_inductor) is None
    path.write_text(GUARDED.replace("UNUSUAL", "False"))
    forget_user_modules(user_code_filter())
    found = refusal(case, path=written, with_inductor=with_inductor)
    assert found.why == f"output is NaN or infinite at other places ({variation})"


def test_the_guard_of_a_model_on_a_gpu_is_tried_on_the_cpu(folder, monkeypatch):
    path, written = folder / "triage_model.py", folder / "reference.pt"
    case = Case(f"{path}:target", "cuda", train=False)
    seen = []

    def spied(target, call, model, case, *, graded):
        seen.append(case.device)
        return observe(target, call, model, case, graded=graded)

    for name in ("load_case", "load_again"):  # without a GPU
        loading = getattr(proof, name)
        monkeypatch.setattr(proof, name, lambda case, loading=loading: loading(replace(case, device="cpu")))
    monkeypatch.setattr(proof, "observe", spied)
    monkeypatch.setattr(proof, "compiled", lambda model, case, *, random: model)
    monkeypatch.setattr(proof, "_SECONDS_ON_GPU", 1e9)
    path.write_text(GUARDED.replace("UNUSUAL", "x.isnan().any()"))
    reference(case, path=written)
    assert {"cuda", "cpu"} == {*seen}
    path.write_text(GUARDED.replace("UNUSUAL", "False"))
    forget_user_modules(user_code_filter())
    found = refusal(case, path=written, with_inductor=False)
    assert found.why == "output is NaN or infinite at other places (one element is NaN)"
    seen.clear()
    assert refusal(case, path=written, with_inductor=True) is None
    assert {*seen} == {"cuda"}


def test_a_loop_that_infinity_keeps_running_is_not_given_it(folder):
    path, written = folder / "triage_model.py", folder / "reference.pt"
    path.write_text(
        GUARDED.replace("        if UNUSUAL", "        while x.norm() > 4:\n            x = x / 2\n        if 0")
    )
    reference(Case(f"{path}:target", "cpu", train=False), path=written)
    assert not {variant.variation for variant in proof.read_reference(written).variants} & proof._UNFINISHED.keys()
