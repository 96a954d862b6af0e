"""Triage from end to end on a small model of two files, its parts, and its answers to targets that are no use."""

import ast
import linecache
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchkit import Quantity, UserError
from benchkit.processes import ChildFailure
from compile_bench import Case, Harness
from compile_bench.capture.collector import Collector, CudaGraphSkips, backend_of, user_code_filter
from compile_bench.capture.eager_frames import EagerFrame, EagerWatch
from compile_bench.capture.frames import RESUMED, Frame, UserCodeFilter
from compile_bench.capture.silent_eager import lost_cuda_graphs, silent_functions
from compile_bench.capture.trace import Break, CompileTrace, Graph, Recompile
from compile_bench.catalogue import CAUSES
from compile_bench.cli import app
from compile_bench.cli.triaging import describe_report, write_patches
from compile_bench.fixes import fixer as fixer_module
from compile_bench.fixes import timed_steps as timing
from compile_bench.fixes import verify as proof
from compile_bench.fixes.fixer import Fixer
from compile_bench.fixes.rewrites import candidates
from compile_bench.fixes.source import Edit, Source
from compile_bench.fixes.trial import trials
from compile_bench.fixes.types import Figures, Fix, Trial
from compile_bench.fixes.verify import reference, refusal
from compile_bench.measure.survey import tracing
from compile_bench.measure.survey.break_cost import GapProfiler, costs_of, why_not_measured
from compile_bench.measure.survey.run import survey, triage
from compile_bench.measure.survey.tracing import run_until_settled
from compile_bench.measure.survey.types import Survey, place_of
from compile_bench.report.breaks import recompile_advice
from compile_bench.report.triage import combined_table
from compile_bench.targets.blocks import changeable_blocks, handlers_around, is_in_block, resumable
from compile_bench.targets.loading import load_target
from compile_bench.targets.overlay import forget_user_modules, overlaid
from compile_bench.triage import findings as triage_findings
from compile_bench.triage.cuda_graphs import reasons_without_cuda_graphs
from compile_bench.triage.library_breaks import advice_to_the_caller
from compile_bench.triage.run import _together, _Triage, run_triage
from compile_bench.triage.serialize import triage_report_records
from compile_bench.triage.types import Finding, TriageReport

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns about what the models do

NO_LINE = "torch 2.10 does not say at which line it gave up a function for a loop"

HANG = "def hang():\n    import time\n\n    time.sleep(600)\n\n\n"

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


def raises():
    raise ValueError("not today")


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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "triage_model.py").write_text(MODEL)
    (tmp_path / "triage_helper.py").write_text(HELPER)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    for name in ("triage_model", "triage_helper"):
        sys.modules.pop(name, None)
    torch.compiler.reset()


def test_a_guess_of_pytorchs_that_the_code_is_wrong_is_no_advice():
    guess = "Your code may result in an error when running in eager. Please double check that your code …"
    assert triage_findings._hint((guess, "Avoid calling it.")) == "Avoid calling it."
    rules = "It may be possible to write Dynamo tracing rules for this code. Please report an issue to PyTorch."
    assert triage_findings._hint((guess,)) == triage_findings._hint((rules,)) == triage_findings._hint(()) == ""


def test_advice_fits_the_place(tmp_path):
    """A break out of a loop is no torch.where; no empty words."""
    path = tmp_path / "model.py"
    path.write_text("def f(x):\n    while True:\n        if x.max() > 3:\n            x = x + 1\n            break\n")
    branch = Break(str(path), 3, "f", "if x.max() > 3:", "Data-dependent branching", "", (), "", False)
    branch = replace(branch, category="data-dependent control flow")
    survey = Survey(Case("m"), (), (), (), CompileTrace(), (), 3, (), 0, 0, frozenset({str(path)}))
    leaving = triage_findings.finding_of_break(branch, (0,), survey, (branch,))
    assert (leaving.case, leaving.advice) == ("loop-until-value", CAUSES["loop-until-value"].advice)

    empty = ("Avoid calling `<class 'method'>`.", "If it is a Python builtin, please file an issue", "Do that.")
    assert triage_findings._hint(empty) == "Do that."


PACKAGE = """\
def remembered(method):
    def g(self, x):
        print("seen")
        return method(self, x)
    return g


class Kernel:
    def __call__(self, x):
        sizes = tuple(each.item() for each in x)
        return self.covariance(x, sizes)

    @remembered
    def covariance(self, x, sizes):
        if x.sum() > 0:
            logger.warning("positive")
        return x

    @property
    def scale(self):
        return self.raw.item()

    def forward(self, x):
        return self(x)
"""


def test_advice_on_a_package_is_for_its_caller(tmp_path):
    """It names functions that can be imported, and says what keeping them out of the graph brings; or a setting."""
    file = tmp_path / "site-packages" / "gp" / "kernels.py"
    file.parent.mkdir(parents=True)
    file.write_text(PACKAGE)
    call, expression, wrapper, method = (
        Frame(str(file), line, name, PACKAGE.splitlines()[line - 1].strip())
        for line, name in ((11, "__call__"), (10, "<genexpr>"), (4, "g"), (15, "covariance"))
    )
    user = Frame("/m.py", 3, "forward", "return self.kernel(x)")
    skipped = Break("/m.py", 3, "forward", "", "Attempted to call function marked as skipped", "", (), "", False)
    inside = replace(skipped, stack=(user, call, wrapper))
    branch = replace(skipped, reason="Data-dependent branching", stack=(user, call, wrapper, method))
    reading = replace(
        skipped, reason="Unsupported Tensor.item() call", stack=(user, replace(call, line=10), expression)
    )

    def advice(found, *others):
        return advice_to_the_caller(found, (found, *others))

    out = "out of the graph with torch.compiler.disable: "
    assert advice(reading, inside).startswith("Set torch._dynamo.config.capture_scalar_outputs = True")
    assert advice(branch) == advice(inside) == "See whether a newer version of gp can be traced."
    then = "All of it runs eagerly then."
    together = f"Keep gp.kernels.Kernel.__call__ {out}1 break instead of 2. {then}"
    assert advice(branch, inside, reading) == advice(inside, branch) == together
    scale = replace(branch, stack=(user, call, replace(method, line=21)))
    assert advice(scale, inside) == together  # nobody can disable a property
    whole = replace(branch, whole_frame=True)
    assert (
        advice(whole)
        == f"Keep gp.kernels.Kernel.covariance {out}the frames around are split there instead of skipped. {then}"
    )
    model = replace(method, line=24, function="forward", source="return self(x)")
    assert advice(replace(whole, stack=(user, model, wrapper))) == "See whether a newer version of gp can be traced."
    elsewhere = replace(branch, file="/other.py", stack=(replace(user, file="/other.py"), call))
    assert advice(branch, elsewhere) == "See whether a newer version of gp can be traced."
    written = replace(branch, stack=(user, replace(method, source='logger.warning("positive")'), wrapper))
    assert advice(written).startswith("Call the model once before it is compiled if the message is written once")


def test_advice_on_a_packages_guard_is_for_its_caller():
    size = "tensor 'x1' size mismatch at index 0. expected 20, actual 40"
    assert "mark_dynamic" in recompile_advice(size, "", "")
    assert recompile_advice(size, "", "gpytorch").startswith(
        "Pass the same sizes in every call, or compile with dynamic=True"
    )
    assert recompile_advice("len(inputs) == 1", "", "gpytorch") == ""
    assert recompile_advice("x2 is None", "", "gpytorch") == ""
    assert recompile_advice("self.table is None", "", "e3nn").startswith("Call the model once before it is compiled")
    assert recompile_advice("GLOBAL_STATE changed: grad_mode", "", "peft") == recompile_advice(
        "GLOBAL_STATE changed: grad_mode", "", ""
    )


def test_one_line_that_calls_many_of_a_library_is_one_finding(tmp_path):
    frames = [Frame(f"<eval_with_key>.{n}", 4, "forward") for n in range(3)] + [Frame("/v/other.py", 9, "f")]
    breaks = [
        replace(BREAK, file="/m.py", category="", stack=(Frame("/m.py", BREAK.line, "forward"), frame))
        for frame in frames
    ]
    assert len({each.identity for each in breaks}) == 2
    survey = Survey(Case("m"), tuple(breaks), ((0,),) * 4, (), CompileTrace(), (), 3, (), 0, 0)
    (found,) = triage_findings.findings_of([survey])
    assert (found.library, found.times, found.kinds) == ("<torch.fx>:4, /v/other.py:9", 4, ("training",))


def test_a_recompilation_is_told_with_what_to_do():
    known = Recompile("1/1", "forward", "/elsewhere/model.py", 9, "self.calls == 1", "self.calls += 1")
    new = Recompile("2/1", "forward", "/elsewhere/model.py", 12, "something new")
    printed = describe_report(TriageReport("m", (), (known, replace(known, guard="self.calls == 2"), new), ()), {})
    assert printed.count("(catalogue: counter)") == 1
    assert f"  do, for model.py:9: {CAUSES['counter'].advice} (catalogue: counter)" in printed
    assert "  model.py:9: self.calls is no longer 1" in printed
    assert "  model.py:12: the guard `something new` no longer holds" in printed


def test_the_same_advice_is_given_once_for_all_its_lines():
    """Two breaks of one line, a break of another, and recompilations of both lines and of a third."""
    counter = CAUSES["counter"]
    texts = ("f", "self.calls += 1", "c", "limit", "", counter.advice, "counter")
    limit = Finding("recompile limit", "/e/m.py", 9, 9, *texts, ("training",), (0,), 8)
    inside = replace(limit, kind="graph break", reason="skipped", library="/e/library.py:3")
    again = Recompile("1/1", "forward", "/e/m.py", 9, "self.calls == 1", "self.calls += 1")
    findings = (limit, inside, replace(limit, line=12, end_line=12))
    printed = describe_report(TriageReport("m", findings, tuple(replace(again, line=n) for n in (9, 12, 15)), ()), {})
    assert "| m.py:9 | recompile limit, graph break | c | training |" in printed
    assert (
        "m.py:9: recompile limit, graph break\n    self.calls += 1\n  limit\n  skipped, in library.py:3\n  do: "
        in printed
    )
    assert printed.count(counter.advice) == 1
    assert "m.py:12: limit\n    self.calls += 1\n  do: as for m.py:9\n" in printed
    assert "self.calls is no longer 1, 3 lines: m.py:9, m.py:12, m.py:15" in printed
    assert "  do, for m.py:15: as for m.py:9" in printed


def test_patches_of_an_earlier_triage_are_removed(tmp_path):
    for name in ("07-item.patch", "all.patch", "mine.patch"):
        (tmp_path / name).write_text("")
    assert write_patches(TriageReport("", (), (), ()), tmp_path) == {}
    assert [each.name for each in tmp_path.iterdir()] == ["mine.patch"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_breaks_are_found_costed_fixed_and_proved(folder):
    target = f"{folder / 'triage_model.py'}:target"
    with Harness.open("cpu", limit=400) as harness:
        report = run_triage(harness, Case(target, "cpu"))
    assert not report.absent
    places = {each.place: each for each in report.findings}
    model, helper = folder / "triage_model.py", folder / "triage_helper.py"
    assert set(places) == {f"{model}:14", f"{model}:17", f"{helper}:4"}
    assert {each.kinds for each in report.findings} == {("training", "inference")}
    assert {each.case for each in report.findings} == {"branch-on-value", "print", "item"}
    gaps = [each.cost.time_lost.value for each in report.findings]
    assert gaps == sorted(gaps, reverse=True)
    # The first graph hands over x, the condition and what the backward pass needs: x is 4 · 8 numbers of 4 bytes.
    assert places[f"{model}:14"].cost.output_bytes >= 128
    assert [each.fix.verdict for each in report.findings if not each.fix.accepted] == []
    assert (report.combined.before.breaks, report.combined.after.breaks) == (3, 0)
    assert (report.combined.before.graphs, report.combined.after.graphs) == (4, 1)
    assert report.combined.after.step is not None

    patches = write_patches(report, folder / "patches")
    printed = describe_report(report, patches)
    assert "triage_model.py:14: Data-dependent branching" in printed
    assert "patches/" in printed
    for patch in patches.values():
        subprocess.run(["git", "apply", "--check", str(patch)], cwd=folder, check=True)
    records = triage_report_records(report, folder)
    assert [record.name for record in records] == ["triage report", "finding", "finding", "finding", "combined fix"]
    subprocess.run(["git", "apply", str(folder / "patches" / "all.patch")], cwd=folder, check=True)
    forget_user_modules(user_code_filter())
    assert survey(Case(target, "cpu"), seeds=(0,)).breaks == ()


def test_a_change_of_what_is_computed_is_refused(folder, tmp_path):
    case, path = Case(f"{folder / 'triage_model.py'}:target", "cpu"), tmp_path / "reference.pt"
    reference(case, path=path)
    assert refusal(case, path=path, with_inductor=False) is None
    for wrong, message, off in (
        (MODEL.replace("x + 0.5", "x + 0.51"), "output is off by", True),
        (MODEL.replace("mean() > 0", "mean() > 1e9"), "arguments ×", True),  # right where the branch is not taken
        (MODEL.replace("return self.b(x)", "return self.b(x).double()"), "float64[4, 8] instead of", False),
        (MODEL.replace("return self.b(x)", "return self.b(x.detach())"), "is there in one of the two only", False),
    ):
        with overlaid({str(folder / "triage_model.py"): wrong.encode()}):
            forget_user_modules(user_code_filter())
            refused = refusal(case, path=path, with_inductor=False)
            assert message in refused.why
            assert refused.out_of_bound == off


def test_an_overlay_is_what_is_imported_and_shown(folder):
    path = folder / "triage_model.py"
    with overlaid({str(path): MODEL.replace("nn.Linear(8, 8)", "nn.Linear(8, 3)").encode()}):
        assert load_target(f"{path}:target", "cpu").model.b.out_features == 3
        assert "nn.Linear(8, 3)" in linecache.getline(str(path), 9)
    assert "nn.Linear(8, 8)" in linecache.getline(str(path), 9)
    forget_user_modules(user_code_filter())
    assert load_target(f"{path}:target", "cpu").model.b.out_features == 8
    assert path.read_text() == MODEL


BLOCKS = """\
import threading

import torch

LOCK = threading.Lock()


def blocks(x, seen):
    for key, value in {"a": x, "b": x + 1}.items():
        with LOCK, open(__file__) as file:
            seen.append((key, file.readline()))
        try:
            with torch.no_grad():
                seen.append(value)
        except ZeroDivisionError:
            seen.append("never")
        else:
            seen.append("else")
    try:
        return seen
    finally:
        seen.append("finally")
"""


def test_changed_blocks_keep_their_lines_and_what_they_compute(tmp_path):
    path = tmp_path / "blocks.py"
    path.write_text(BLOCKS)
    file = str(path)
    changed = {(file, line) for line in (9, 10, 12, 19)}
    assert set().union(*(changeable_blocks(file, line) for line in (11, 14, 20))) == changed
    assert handlers_around(file, 14) == {(file, 12)}
    assert handlers_around(file, 16) == set()
    assert is_in_block(file, 11)
    assert not is_in_block(file, 5)
    (tree,) = resumable(changed).values()
    names, original = {"__file__": file}, {"__file__": file}
    exec(compile(tree, file, "exec"), names)
    exec(BLOCKS, original)
    assert names["blocks"](1, []) == original["blocks"](1, [])
    lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)}
    assert {11, 14, 18, 20, 22} <= lines
    assert {13} == {node.lineno for node in ast.walk(tree) if isinstance(node, (ast.With, ast.Try))}


HANDLED = """\
import copy
import threading

import torch

LOCK = threading.Lock()
HISTORY = []


def scale(x):
    scale = 1.0
    for bound in (0.5, 1e9):
        try:
            scale = scale / float((x > bound).sum())
        except (KeyError, ZeroDivisionError):
            scale = scale * 2.0
    x = x * scale
    print("mean", end="")
    return x


def model(x):
    with LOCK:
        x = scale(x)
    stats = {name: each.item() for name, each in {"mean": x.mean(), "std": x.std()}.items()}
    HISTORY.append(copy.deepcopy(stats))
    return x


def target():
    return model, (torch.ones(3),)
"""


def test_a_model_that_raises_only_where_it_is_compiled_is_told_first(folder):
    (folder / "triage_model.py").write_text(DOUBLE_BACKWARD)
    case = Case(f"{folder / 'triage_model.py'}:target", "cpu")
    found = triage(case)
    (failure,) = found.failures
    assert "double backward" in failure
    report = TriageReport("m", (), (), (survey(case, seeds=(0,)),))
    assert (
        describe_report(report, {}).splitlines()[1].startswith("training raises where it is compiled, which ended its")
    )


def test_only_what_follows_a_handler_that_runs_stays_hidden(folder, capsys):
    """Line 18 follows a break in a try whose handler the model needs."""
    (folder / "triage_model.py").write_text(HANDLED)
    found = survey(Case(f"{folder / 'triage_model.py'}:target", "cpu", train=False), seeds=(0,))
    places = {(each.file, each.line) for each in found.breaks}
    assert {line for file, line in places if file == str(folder / "triage_model.py")} == {14, 23, 25}
    assert len(places) == 3
    (note,) = found.notes
    assert note.startswith("breaks behind triage_model.py:14")
    assert note.endswith("may stay hidden: Dynamo skips the frame there")


DOUBLE_BACKWARD = """\
import torch
from torch import nn

from compile_bench.targets.target import Target


def target():
    torch.manual_seed(0)
    x = torch.randn(8, 4, requires_grad=True)

    def loss(out):
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + (slope.norm(dim=1) - 1).pow(2).mean()

    return Target(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), (x,), loss=loss)
"""


HEAP = """\
import heapq

import torch


class Beam(torch.nn.Module):
    def forward(self, x):
        heap = []
        for row in range(3):
            heapq.heappush(heap, (x[row].sum().item(), row))
        while heap:
            score, row = heapq.heappop(heap)
            x = x * x[row].abs().max().item()
        return x.sin(), float(x.norm())


def target():
    torch.manual_seed(0)
    return Beam(), (torch.rand(3, 3),)
"""


def test_what_lies_behind_a_heap_is_found(folder, capsys):
    (folder / "triage_model.py").write_text(HEAP)
    found = survey(Case(f"{folder / 'triage_model.py'}:target", "cpu", train=False), seeds=(0,))
    assert {each.line for each in found.breaks} == {10, 12, 13, 14}
    assert found.notes == ()


LOOPING = """\
import torch


class Looping(torch.nn.Module):
    def forward(self, x):
        kept = []
        rows = x.relu().sum(1) + 1
        while rows.numel() > 1:
            kept.append(float(rows[0]))
            try:
                rows = rows[1:][rows[1:] > rows.mean().item() - 9]
            except ZeroDivisionError:
                break
        if rows.sum() > 0:
            x = x * max(kept)
        return x.sin() * rows.norm().item()


def target():
    torch.manual_seed(0)
    return Looping(), (torch.rand(4, 3),)
"""


def test_all_that_lies_behind_the_breaks_of_a_loop_is_found(folder, capsys):
    (folder / "triage_model.py").write_text(LOOPING)
    found = survey(Case(f"{folder / 'triage_model.py'}:target", "cpu", train=False), seeds=(0,))
    assert {each.line for each in found.breaks} == {9, 11, 14, 16}
    assert found.notes == ()


NESTED = """\
import torch


class Nested(torch.nn.Module):
    def forward(self, x):
        rows = [self.chosen(row) for row in zip(x, x.sin())]
        for each in self.scaled(
            x.max()
            .item()
        ), self.scaled(2.0):
            x = x * each
        return x, rows

    def chosen(self, pair):
        some = torch.nonzero(pair[0] > 0).flatten()
        total = 0.0
        while some.numel() > total:
            total += some[0].float().item() + 1.0
            if (least := pair[1].min()) > 2:
                break
        return total * least

    def scaled(self, factor):
        try:
            return float(torch.tensor(factor).cos())
        finally:
            torch._dynamo.graph_break()


def target():
    return Nested(), (torch.ones(2, 3),)
"""


def test_what_a_broken_line_calls_is_looked_into(folder, capsys):
    """Dynamo skips the frames of the callers too."""
    (folder / "triage_model.py").write_text(NESTED)
    found = survey(Case(f"{folder / 'triage_model.py'}:target", "cpu", train=False), seeds=(0,))
    assert {each.line for each in found.breaks} >= {9, 15, 18, 19, 25, 27}
    assert found.notes == ()


BOXED = """\
import torch


class Box:
    def __init__(self, row):
        self.row = row
        self.size = 1.0


class Boxed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        boxes = [Box(row) for row in self.linear(x)]
        return self.added(self.first(boxes))

    def first(self, boxes):
        for _ in range(2):
            best = max(boxes, key=lambda box: box.size)
        return best.row

    def added(self, row):
        for _ in range(2):
            scale = float(row.mean())
            print(end="")
            row = row * scale
        return row


def target():
    torch.manual_seed(0)
    return Boxed(), (torch.ones(2, 3),)
"""


def test_lines_behind_a_skipped_frame_of_a_helper_are_found(folder, capsys):
    (folder / "triage_model.py").write_text(BOXED)
    found = survey(Case(f"{folder / 'triage_model.py'}:target", "cpu"), seeds=(0,))
    assert {each.line for each in found.breaks} == {21, 26, 27}
    (note,) = found.notes
    assert note.startswith("breaks behind triage_model.py:21 may stay hidden: Dynamo skips the frame there")


HOOKED = """\
import torch


class Hooked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.linear.register_full_backward_hook(lambda module, grads, above: None)

    def forward(self, x):
        for _ in range(2):
            x = self.linear(x)
        least = x.min().item()
        return x * least * x.max().item()


def target():
    return Hooked(), (torch.ones(2, 2),)
"""


def test_a_backward_hook_hides_nothing_of_the_forward_pass(folder, capsys):
    (folder / "triage_model.py").write_text(HOOKED)
    found = survey(Case(f"{folder / 'triage_model.py'}:target", "cpu"), seeds=(0,))
    assert {each.line for each in found.breaks} == {12, 13, 14}


SCALING = """\
import torch

SCALES = [
    lambda x: x / x.abs().max().item(),
    lambda x: x + 1,
]


class Scaling(torch.nn.Module):
    def forward(self, x):
        total = 0.0
        for scale in SCALES:
            x = scale(x)
        for low, high in zip(x.amin(1).tolist(), x.amax(1).tolist()):
            total += high - low
        if total == 0.0:
            raise ValueError("the same in every column")
        return x * x.norm().item()


def target():
    return Scaling(), (torch.rand(4, 3),)
"""


def test_what_lies_behind_lambdas_and_iterators_is_found(folder, capsys):
    """The loops go over a list and over a zip."""
    (folder / "triage_model.py").write_text(SCALING)
    found = survey(Case(f"{folder / 'triage_model.py'}:target", "cpu", train=False), seeds=(0,))
    assert {each.line for each in found.breaks} == {4, 14, 18}
    assert found.notes == ()


GROWING = """\
import torch

from compile_bench.targets.target import Target


class Growing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.past = []

    def forward(self, x):
        self.past.append(x)
        return torch.stack(self.past).mean(0)


def target():
    return Target(Growing(), (torch.ones(3),), schedule=((torch.ones(3),),) * 10)
"""


def test_nothing_is_looked_for_behind_the_recompile_limit(folder, capsys):
    """Until a function reaches the limit, all of it is traced."""
    (folder / "triage_model.py").write_text(GROWING)
    found = survey(Case(f"{folder / 'triage_model.py'}:target", "cpu", train=False), seeds=(0,))
    assert [(each.line, each.category) for each in found.breaks] == [(12, "recompile limit")]
    assert found.notes == ()


READING = """\
import torch


class Reading(torch.nn.Module):
    def forward(self, x):
        for _ in range(2):
            with open(__file__, encoding="utf-8") as file:
                first = file.readline()
            with open(__file__ + ".log", "w") as log:
                log.write(first)
            if x.sum() > 0:
                x = x * len(first)
        return x.cos() * x.mean().item()


def target():
    return Reading(), (torch.ones(4, 3),)
"""


@pytest.mark.skipif(torch.__version__ < (2, 11), reason=NO_LINE)
def test_files_that_a_loop_reads_hide_nothing_behind_them(folder):
    path = folder / "triage_model.py"
    path.write_text(READING)
    found = survey(Case(f"{path}:target", "cpu", train=False), seeds=(0,))
    assert {each.line for each in found.breaks} >= {7, 9, 11, 13}
    assert found.notes == ()
    assert Path(f"{path}.log").read_text() == "import torch\n"


MASKED = """\
import torch


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.filler = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x, mask):
        h = self.linear(x)
        h = self.filled(h, mask)
        return h.sin()

    def filled(self, h, mask):
        h[mask] = self.filler
        return h


def target():
    torch.manual_seed(0)
    return Masked(), (torch.ones(2, 4, 3), torch.rand(2, 4) > 0.5)
"""


def test_what_the_backend_fails_for_has_the_line_of_the_operator(folder, capsys):
    (folder / "triage_model.py").write_text(MASKED)
    case = Case(f"{folder / 'triage_model.py'}:target", "cpu")
    found = survey(case, seeds=(0,))
    # Only the backward pass needs to know how many there are.
    assert [(each.line, each.function, each.category) for each in found.breaks] == [(16, "filled", "backend failed")]
    assert survey(replace(case, train=False), seeds=(0,)).breaks == ()


YIELDING = """\
import torch


class Yielding(torch.nn.Module):
    def rows(self, x):
        for row in x:
            yield row.sin() * 2

    def forward(self, x):
        total = x.sum()
        for row in self.rows(x):
            if row.sum() > 0:
                total = total + row.cos().sum()
        return total


def target():
    return Yielding(), (torch.ones(3, 2),)
"""


def test_a_generator_in_a_function_that_was_skipped_is_no_finding(folder, capsys):
    (folder / "triage_model.py").write_text(YIELDING)
    found = survey(Case(f"{folder / 'triage_model.py'}:target", "cpu", train=False), seeds=(0,))
    assert [each.line for each in found.breaks] == [12]
    assert found.eager == ()


RAISING = """\
import torch


@torch.compiler.disable
def picked(x, index):
    return x * [1.0, 2.0][index]


class Picking(torch.nn.Module):
    def forward(self, x):
        x = picked(x, 2 if torch.compiler.is_compiling() else 1)
        return x.sin()


def target():
    return Picking(), (torch.ones(3),)
"""


def test_an_error_of_the_compiled_model_alone_has_its_line(folder, capsys):
    (folder / "triage_model.py").write_text(RAISING)
    found = survey(Case(f"{folder / 'triage_model.py'}:target", "cpu"), seeds=(0,))
    assert found.failures == ("IndexError: list index out of range",)
    (raised,) = (each for each in found.breaks if each.category == "compile error")
    assert (raised.line, raised.function) == (6, "picked")
    assert raised.reason == "IndexError: list index out of range; the model by itself does not raise it"


HIDING = """\
import os

import torch


class Hiding(torch.nn.Module):
    def forward(self, x):
        print(end="")
        for _ in range(2):
            self.process = os.getpid()
        return x / x.norm().item()


def target():
    return Hiding(), (torch.ones(3),)
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
        return trials(case, seeds=seeds, proposals=[proposal], path=path)[0][0]


@pytest.mark.skipif(torch.__version__ < (2, 11), reason=NO_LINE)
def test_what_stays_hidden_is_neither_counted_as_fixed_nor_proved(folder, capsys):
    (folder / "triage_model.py").write_text(HIDING)
    case = Case(f"{folder / 'triage_model.py'}:target", "cpu", train=False)
    found = survey(case, seeds=(0,))
    assert [each.line for each in found.breaks] == [8, 10, 11]
    assert found.hidden == {place_of(found.breaks[2])}
    findings = [
        Finding("graph break", each.file, each.line, each.line, each.function, each.source, *[""] * 5, (), (), 1)
        for each in found.breaks
    ]
    fix_results = Fixer(InThisProcess(folder), case, [found], folder).fix([(each.file, each.line) for each in findings])
    fixes = {line: fix for (_, line), fix in fix_results.fixes.items()}
    assert (fixes[8].accepted, fixes[8].before.breaks, fixes[8].after.breaks) == (True, 3, 2)
    assert not fixes[11].accepted
    assert "Dynamo still skips a frame around it" in fixes[11].verdict
    assert fix_results.combined.accepted


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
    findings = [
        Finding("graph break", each.file, each.line, each.line, each.function, each.source, *[""] * 5, (), (), 1)
        for each in found.breaks
    ]
    fix_results = Fixer(InThisProcess(folder), case, [found], folder).fix([(each.file, each.line) for each in findings])
    assert {line: (each.before.breaks, each.after.breaks) for (_, line), each in fix_results.fixes.items()} == {
        7: (2, 1),
        9: (2, 1),
    }
    assert fix_results.combined.after.breaks == 0


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
        each.line: Finding(
            "graph break", each.file, each.line, each.line, each.function, each.source, *[""] * 5, ("inference",), (), 1
        )
        for each in found.breaks
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
        "", tuple(replace(findings[line], fix=fixes[line]) for line in fixes), (), (), fix_results.combined
    )
    printed = describe_report(report, write_patches(report, folder / "patches"))
    assert "  the combined fix leaves it out: two of the changes conflict" in printed
    assert "| verified fixes without conflicts | breaks |" in printed
    subprocess.run(["git", "apply", str(folder / "patches" / "all.patch")], cwd=folder, check=True)
    assert path.read_bytes() == fix_results.overlay[str(path)]
    assert path.read_text().splitlines()[6] == '        print("seen", end="")'


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
    findings = [
        Finding("graph break", each.file, each.line, each.line, each.function, each.source, *[""] * 5, (), (), 1)
        for each in found.breaks
    ]
    fix_results = Fixer(Counting(folder), case, [found], folder).fix([(each.file, each.line) for each in findings])
    assert {line: (each.accepted, each.conflict) for (_, line), each in fix_results.fixes.items()} == {
        7: (True, ""),
        9: (True, ""),
    }
    assert (fix_results.combined.before.breaks, fix_results.combined.after.breaks) == (2, 0)
    assert b"0 * x" not in fix_results.overlay[str(path)]
    assert len(proofs) == 4  # both, each by itself, both in the other way


@pytest.mark.slow
@pytest.mark.timeout(900)
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
    with Harness.open("cpu", limit=400) as harness:
        report = run_triage(harness, Case(f"{folder / 'triage_model.py'}:target", "cpu"), kinds=(False,), cost=False)
    assert not report.absent
    fixes = {each.source: each.fix for each in report.findings}
    assert {source.split("(")[0]: each.accepted for source, each in fixes.items()} == {
        "if x.mean": True,
        "print": False,
        "/ x.abs": True,
    }
    assert "output is off by" in next(each.verdict for each in fixes.values() if not each.accepted)
    assert (report.combined.title, report.combined.case) == (
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
    with torch.serialization.safe_globals([proof.Expected, proof.Observation]):
        _, _, expected = torch.load(written, weights_only=True)
    assert [each.allowance["output"] < 1e-6 for each in expected] == [True] * 4


def test_the_rest_of_a_function_that_was_skipped_is_no_finding():
    skipped = Break("/user/model.py", 9, "forward", "if x.sum() > 0:", "", "", (), "", whole_frame=True)
    rest = EagerFrame(Frame("/user/model.py", 5, f"{RESUMED}forward_at_5"), ())
    assert silent_functions([rest], CompileTrace(breaks=(skipped,))) == []
    (silent,) = silent_functions([rest], CompileTrace())
    assert (silent.kind, silent.function) == ("silent eager", "forward")


def test_what_a_function_at_the_recompile_limit_calls_is_no_finding():
    calls = Frame("/user/model.py", 9, "forward")
    helper = EagerFrame(Frame("/user/other.py", 5, "helper"), (calls,))
    guard = (Frame("/user/model.py", 7, "forward"), Frame("/user/other.py", 2, "another"))
    limit = Break("/user/other.py", 2, "another", "", "", "", (), "recompile limit", whole_frame=True, stack=guard)
    assert silent_functions([helper], CompileTrace(breaks=(limit,))) == []
    assert silent_functions([helper], CompileTrace(breaks=(replace(limit, stack=guard[1:]),))) != []


STEPPING = """\
import torch

LAYER = torch.nn.Linear(4, 2)
OPTIMIZER = torch.optim.SGD(LAYER.parameters(), lr=0.1)


def train_step(x):
    loss = LAYER(x).square().mean()
    if loss.isnan():
        raise FloatingPointError
    loss.backward()
    return loss.detach()


def target():
    return train_step, (torch.ones(3, 4),)
"""


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


def test_a_function_with_a_backward_pass_of_its_own_is_surveyed(folder, capsys):
    (folder / "triage_model.py").write_text(STEPPING)
    found = survey(Case(f"{folder / 'triage_model.py'}:target", "cpu"), seeds=(0,))
    assert found.failures == ()
    assert {each.line for each in found.breaks} == {9, 11}


def test_the_innermost_line_is_the_users():
    user_code = UserCodeFilter("/site/torch", ["/site"], "/bench", ["zoo.py"])
    stack = [
        Frame("/bench/worker.py", 1, "main"),
        Frame("/site/torch/nn/modules/module.py", 1, "_call_impl"),
        Frame("/home/model.py", 5, "forward"),
        Frame("/site/other/layer.py", 7, "forward"),
    ]
    assert user_code.innermost(stack) == stack[2]
    assert user_code.model_frames(stack) == tuple(stack[2:])
    assert user_code.innermost([stack[0], stack[3]]) == stack[3]  # nothing of the user's
    assert user_code.innermost(stack[:2]) is None


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).relu()

    def encode(self, x):
        return self.layer(x) * 2

    def passed(self, x):
        return x


def test_functions_that_compute_eagerly_are_seen():
    torch.compiler.reset()
    model = Encoder()
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(2, 4)
    compiled(x)
    watch = EagerWatch(model.modules(), user_code_filter())
    assert watch.run(lambda: compiled(x)) == ()
    assert watch.run(lambda: compiled.passed(x)) == ()
    (found,) = watch.run(lambda: compiled.encode(x))
    assert (found.frame.function, found.method_of) == ("encode", "Encoder")
    assert sys.getprofile() is None


def test_code_that_cannot_be_hashed_is_watched():
    """Dynamo puts dictionaries among the constants of the code that it writes."""
    code = Encoder.encode.__code__
    encode = type(Encoder.encode)(code.replace(co_consts=(*code.co_consts, {})), Encoder.encode.__globals__)
    model = Encoder()
    (found,) = EagerWatch(model.modules(), user_code_filter()).run(lambda: encode(model, torch.ones(2, 4)))
    assert found.frame.function == "encode"


BREAK = Break("model.py", 7, "forward", "print(x)", "side effect", "", (), "side effect", whole_frame=False)


class Counting(nn.Module):
    """Reads a number of its own that changes: compiled anew at every call, until Dynamo gives it up."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = x + 1
        torch._dynamo.graph_break()
        return x * self.calls


def test_a_gap_is_measured_once_nothing_is_compiled_any_more(capsys):
    """Behind eight compilations the function runs eagerly, and no graph is left around its break."""
    torch._dynamo.reset()
    profiler = GapProfiler(backend_of("eager"))
    model = torch.compile(Counting(), backend=profiler)
    with Collector() as collector:
        model(torch.ones(4))
        calls, settled = run_until_settled(lambda: model(torch.ones(4)), collector)
    assert settled
    assert calls > 8
    trace = collector.trace()
    (limit,) = (each for each in trace.breaks if each.category == "recompile limit")
    assert Path(limit.file).name == Path(__file__).name
    (asked,) = (each for each in trace.breaks if each.category != "recompile limit")
    costs = costs_of(profiler, lambda: model(torch.ones(4)), trace, settled=settled)
    assert costs[place_of(asked)].time_lost is None
    assert "is recompiled up to the recompile limit" in costs[place_of(asked)].not_measured


def test_a_break_without_a_gap_has_a_reason():
    assert "still compiled in every step" in why_not_measured(BREAK, settled=False, limits=())
    assert why_not_measured(BREAK, settled=True, limits=()).startswith("no graph runs both before and behind")


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


def test_a_counter_is_seen_past_the_recompile_limit_and_its_fix_is_verified(folder, capsys):
    """Without the fix of line 12 the function runs eagerly, whatever else is fixed."""
    path = folder / "triage_model.py"
    path.write_text(COUNTED)
    case = Case(f"{path}:target", "cpu", train=False)
    found = survey(case, seeds=(0,))
    assert {each.line: each.category for each in found.breaks} == {12: "recompile limit", 14: "side effect"}
    results = Fixer(InThisProcess(folder), case, [found], folder).fix([place_of(each) for each in found.breaks])
    fixes = {line: fix for (_, line), fix in results.fixes.items()}
    assert (fixes[12].case, fixes[12].accepted) == ("counter", True)
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


def test_a_counter_that_the_backward_pass_needs_is_not_changed_in_place(folder, capsys):
    path = folder / "triage_model.py"
    path.write_text(RESET)
    case = Case(f"{path}:target", "cpu")
    (limit,) = survey(case, seeds=(0,)).breaks
    results = Fixer(InThisProcess(folder), case, [survey(case, seeds=(0,))], folder).fix([place_of(limit)])
    assert results.combined.accepted
    assert "self.count = self.count - (2 - 3)" in results.overlay[str(path)].decode()
    assert "self.count = torch.as_tensor(0, device=self.count.device)" in results.overlay[str(path)].decode()
    with overlaid(results.overlay):
        forget_user_modules(user_code_filter())
        model = load_target(case.target, "cpu").model
    out = [model(torch.ones(n, requires_grad=True)) for n in (2, 9, 2)]
    sum(each.sum() for each in out).backward()
    assert [float(each[0]) for each in out] == [pytest.approx(torch.tensor(n).sin().item()) for n in (1.0, 2.0, 0.0)]


def test_arguments_need_a_gradient_unless_the_model_refuses_that(folder, tmp_path):
    """The model has no weights: without a gradient of x nothing is kept for the backward pass."""
    path, kept = folder / "triage_model.py", tmp_path / "reference.pt"
    case = Case(f"{path}:target", "cpu")

    def refused(source, changed):
        path.write_text(source)
        forget_user_modules(user_code_filter())
        reference(case, path=kept)
        with overlaid({str(path): changed.encode()}):
            forget_user_modules(user_code_filter())
            return refusal(case, path=kept, with_inductor=False)

    buffer = RESET.replace("self.count = 1", 'self.register_buffer("count", torch.tensor(1))').replace(
        "self.count = 0", "self.count.zero_()"
    )
    assert refused(RESET, buffer.replace("self.count -= 2 - 3", "self.count = self.count + 1")) is None
    in_place = refused(RESET, buffer.replace("self.count -= 2 - 3", "self.count.add_(1)"))
    assert "modified by an inplace operation" in in_place.why
    cut = refused(RESET, RESET.replace("return x.sin()", "return x.sin().detach()"))
    assert cut.why == "argument 0 is there in one of the two only"
    numpy = RESET.replace("x.shape[0]", "x.numpy().shape[0]")
    assert refused(numpy, numpy) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.seen = 0", "self.seen = 0.5"),
        ("self.seen += len(x)", "self.seen *= len(x)"),
        ("return Lit(), ", "lit = Lit()\n    lit.seen = 3\n    return lit, "),
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
    fix = Fix("all", "all verified fixes", "", "", True, "", before, after, "", replace(control, value=1.2), control)
    printed = combined_table(fix)
    assert printed.count("still eager: recompile limit at model.py:12") == 2
    assert "no difference that the control does not show" in printed
    assert "faster" in combined_table(replace(fix, speedup=Quantity(3.0, "×", 2.0, 4.0, 9, "95 %")))
    assert "the machine was busy" in combined_table(replace(fix, pressure=60.0))


def test_steps_are_timed_past_the_recompile_limit(folder, monkeypatch, capsys):
    path = folder / "triage_model.py"
    path.write_text(COUNTED)
    monkeypatch.setattr(timing, "prepare_toolchain", lambda device: 0.0)
    monkeypatch.setattr(timing, "_compile", lambda model, case: torch.compile(model, backend="eager"))
    without_print = COUNTED.replace('print("loss", end="")', "pass").encode()
    found = timing.timed_steps(Case(f"{path}:target", "cpu", train=False), {str(path): without_print})
    assert found.eager_before == found.eager_after == (f"{path}:12",)
    assert found.steady.control.low < 1.5
    assert found.steady.compiled.samples == found.steady.eager.samples >= 8


def test_different_guards_are_never_one(folder):
    again = Recompile("0/1", "f", "m.py", 3, "tensor 'cache' size mismatch at index 2. expected 5, actual 6")
    grown = replace(again, guard="tensor 'cache' size mismatch at index 2. expected 6, actual 7")
    batch = replace(again, guard="tensor 'cache' size mismatch at index 0. expected 1, actual 4")
    other = replace(again, guard="len(self._transform_matrices) == 1")
    surveys = [Survey(Case("m"), (), (), (), CompileTrace(), (each,), 3, (), 0, 0) for each in (again, grown, batch)]
    assert len({each.identity for each in (again, grown, batch, other)}) == 3
    triage = _Triage(Harness(folder, "cpu", 1.0), Case("m"), (True,), False, print)
    triage._surveys = surveys
    assert [each.guard for each in triage.report().recompiles] == [again.guard, batch.guard]


INTERRUPTED = """\
import os, signal, sys
from compile_bench.cli import app
from compile_bench.triage import run

def fix(self, root):
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()

run._Triage.fix = fix
sys.argv = ["compile-bench", "triage", sys.argv[1], "--infer", "--device", "cpu"]
app()
"""


def test_what_there_is_survives_an_end_before_the_end(folder):
    """Each break is printed when it is seen, and the report has what was found."""
    target = f"{folder / 'triage_model.py'}:target"
    answer = subprocess.run([sys.executable, "-c", INTERRUPTED, target], capture_output=True, text=True, check=False)
    assert answer.returncode == 130, answer.stderr
    at_once, report = answer.stdout.split("\n\n", 1)
    assert at_once.splitlines()[0] == "[1/3] breaks: tracing inference"
    assert "  triage_model.py:14: Data-dependent branching" in at_once
    assert "  triage_helper.py:4: " in at_once
    assert "[2/3] price: 3 findings" in at_once
    assert "not done: the rest: triage was interrupted" in report
    assert "triage_model.py:14: Data-dependent branching" in report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "number", "missing"),
    [
        ("  triage_helper.py:4: ", signal.SIGINT, "the rest"),
        ("[2/3] price", signal.SIGTERM, "the rest"),
        ("  triage_helper.py:4, change 1: ", signal.SIGINT, "the proof of the changes that remove the breaks of"),
    ],
    ids=["collecting", "pricing", "proving"],
)
def test_an_interrupt_in_any_stage_prints_what_there_is(folder, stage, number, missing):
    """The signal goes to all processes, as from a terminal, and leaves none of them."""
    if "change" not in stage and "price" not in stage:  # a survey that is still going on
        hang = 'print("seen", end="")\n        self.calls = getattr(self, "calls", 0) + 1\n        '
        hang += "if self.calls > 4:\n            hang()"
        hanging = MODEL.replace('print("seen", end="")', hang).replace("class Small", HANG + "class Small")
        (folder / "triage_model.py").write_text(hanging)
    line = [sys.executable, "-m", "compile_bench", "triage", "triage_model.py:target", "--infer", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    printed = []
    with subprocess.Popen(line, stdout=-1, text=True, env=environment, start_new_session=True) as process:
        for text in process.stdout:
            if text.startswith(stage) and not any(each.startswith(stage) for each in printed):
                os.killpg(process.pid, number)
            printed.append(text)
    assert process.returncode == 130
    report = "".join(printed).partition("\n\n")[2]
    assert "triage_helper.py:4: " in report
    assert f"not done: {missing}" in report
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_survey_that_does_not_end_keeps_what_it_saw(folder):
    """It hangs in the second call, when the breaks of the first are known."""
    path = folder / "triage_model.py"
    hang = 'print("seen", end="")\n        self.calls = getattr(self, "calls", 0) + 1\n        '
    hang += "if self.calls > 4:\n            hang()"
    path.write_text(MODEL.replace('print("seen", end="")', hang).replace("class Small", HANG + "class Small"))
    with Harness.open("cpu", limit=12) as harness:
        report = run_triage(harness, Case(f"{path}:target", "cpu"), kinds=(False,))
    assert {Path(each.file).name for each in report.findings} >= {"triage_model.py", "triage_helper.py"}
    assert "was ended after its time limit" in report.absent[0]


def test_a_model_without_breaks_ends_after_its_survey(folder, monkeypatch):
    jobs = []

    def noted(self, call, **options):
        jobs.append(call.func.__name__)
        return original(self, call, **options)

    original = Harness._in_child
    monkeypatch.setattr(Harness, "_in_child", noted)
    clean = MODEL.replace("if x.mean() > 0:", "if True:").replace('print("seen", end="")', "pass")
    (folder / "triage_model.py").write_text(clean)
    (folder / "triage_helper.py").write_text("def scaled(x):\n    return x / 2\n")
    with Harness.open("cpu", limit=200) as harness:
        report = run_triage(harness, Case(f"{folder / 'triage_model.py'}:target", "cpu"))
    assert report.findings == ()
    assert jobs == ["survey", "survey"]


DROPPING = """\
import random

import torch

from compile_bench.targets.target import Target


class Dropping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = False

    def forward(self, x):
        if self.drop:
            print(end="")
        return x * torch.rand(4)


def target():
    def make_step(model, args):
        def step():
            model.drop = random.random() < 0.2
            return model(*args)

        return step

    return Target(Dropping(), (torch.ones(4),), make_step=make_step)
"""


def test_other_seeds_are_further_steps_of_one_compiled_model(folder, monkeypatch, capsys):
    path = folder / "triage_model.py"
    path.write_text(DROPPING)
    made = []
    monkeypatch.setattr(tracing, "own_model", lambda target, case: made.append(1) or target.model)
    case = Case(f"{path}:target", "cpu")
    assert survey(case, seeds=(0,)).breaks == ()  # 0.84, 0.76, 0.42, 0.26
    found = survey(case, seeds=(0, 1))  # 0.13
    assert [(each.line, seeds) for each, seeds in zip(found.breaks, found.seeds, strict=True)] == [(15, (1,))]
    assert len(made) == 2


STACK = 'File "/home/model.py", line 7, in forward\n    self.seen.add_(1)'
SKIPS = {
    "a whole graph": (
        "torch._inductor.cudagraph_utils.__cudagraphs",
        (f"skipping cudagraphs due to mutated inputs (1 instances). Found from : \n   {STACK}\n",),
        "mutated inputs (1 instances)",
    ),
    "handed on": (
        "torch._inductor.cudagraph_utils.__cudagraphs",
        (f"skipping cudagraphs due to skipping cudagraphs due to cpu device (ones). Found from : \n   {STACK}\n",),
        "cpu device (ones)",
    ),
    "torch 2.10, a part": (
        "torch._inductor.utils.__perf_hints",
        (f"cudagraph partition due to non gpu ops. Found from : \n   {STACK}", "cudagraph partition into 3 partitions"),
        "non gpu ops (a part of the graph)",
    ),
    "torch 2.11, a part": (
        "torch._inductor.scheduler.__cudagraphs",
        (
            "Created 3 graph partitions: 2 cudagraphable, 1 non-cudagraphable",
            "  Partition 1: 2 nodes, non-cudagraphable, inputs=1, outputs=1",
            "    op1: reason=DeviceCopy ops, ir=DeviceCopy, fx=prims.device_put.default(sin, cpu)",
            *(" " * 9 + line for line in STACK.split("\n")),
            "    op2: reason=DeviceCopy ops, ir=DeviceCopy, fx=prims.device_put.default(mul, cpu)",
            '         File "/home/model.py", line 9, in forward',
            "    op3: reason=partition includes all ops when cudagraphs is disabled, ir=ComputedBuffer",
            '         File "/home/model.py", line 10, in forward',
        ),
        "DeviceCopy ops (a part of the graph)",
    ),
}


@pytest.mark.parametrize(("logger", "messages", "reason"), SKIPS.values(), ids=SKIPS)
def test_a_lost_cuda_graph_has_its_line(logger, messages, reason):
    with CudaGraphSkips() as skips:
        for message in messages:
            logging.getLogger(logger).debug(message)
    (found,) = lost_cuda_graphs(skips.reasons, skips.messages, UserCodeFilter())
    assert (found.frame.file, found.frame.line) == ("/home/model.py", 7)
    assert found.frame.source == "self.seen.add_(1)"
    assert found.reason == f"CUDA graphs are not used: {reason}"


@pytest.mark.gpu
def test_a_lost_cuda_graph_is_found(folder):
    (folder / "triage_model.py").write_text(
        "import torch\n\n\nclass Moved(torch.nn.Module):\n    def forward(self, x):\n"
        "        return x + x.cpu().sin().to(x.device)\n\n\ndef target():\n    return Moved(), (torch.ones(4),)\n"
    )
    found = reasons_without_cuda_graphs(Case(f"{folder / 'triage_model.py'}:target", "cuda", train=False))
    assert {each.kind for each in found} == {"CUDA graph lost"}
    assert (Path(found[0].frame.file).name, found[0].frame.line) == ("triage_model.py", 6)


@pytest.mark.parametrize(
    ("function", "status", "message"),
    [
        ("missing", 2, "has no 'missing'"),
        ("raises", 2, "raised ValueError: not today"),
        ("nothing", 2, "returned an object of type int"),
        ("unfit", 2, "raises by itself, uncompiled, in inference: RuntimeError: size mismatch"),
        ("hangs", 3, "was ended after its time limit"),
    ],
)
def test_a_target_that_is_no_use_gets_one_line(folder, function, status, message):
    limit = "4" if function == "hangs" else "200"
    answer = CliRunner().invoke(
        app, ["triage", f"triage_model.py:{function}", "--device", "cpu", "--limit", limit, "--no-cost", "--infer"]
    )
    assert answer.exit_code == status
    stage, line = answer.output.strip().splitlines()
    assert stage == "[1/3] breaks: tracing inference"
    assert message in line


def test_a_target_that_raises_in_training_and_in_inference_is_told_both(folder):
    answer = CliRunner().invoke(app, ["triage", "triage_model.py:unfit", "--device", "cpu"])
    assert answer.exit_code == 2
    _, line = answer.output.strip().splitlines()
    assert "in training: ValueError: no training today; triage_model.py:unfit raises" in line
    assert "in inference: RuntimeError: size mismatch" in line
    assert str(_together([UserError("no such file"), UserError("no such file")])) == "no such file"
    assert isinstance(_together([UserError("raised"), ChildFailure("ended")]), ChildFailure)


def test_a_target_without_findings_is_told_what_was_compiled():
    seen = Survey(Case("m"), (), (), (), CompileTrace((Graph("0/0", "f", 3, 1, None),)), (), 3, (), 0, 0)
    nothing = replace(seen, case=Case("m", train=False), trace=CompileTrace())
    told = describe_report(TriageReport("m", (), (), (seen, nothing)), {}).splitlines()[1:]
    assert told == [
        "training: all of it is compiled, as 1 graph with 3 operations",
        "inference: it computes nothing with tensors, so there is nothing to compile",
    ]


UNTRAINABLE = """\
import torch


def target():
    return torch.nn.Embedding(4, 2).requires_grad_(False).weight.argmax, ()
"""


@pytest.mark.parametrize("command", ["check", "triage"])
def test_a_target_that_cannot_train_is_told_how_to_go_on(folder, command):
    (folder / "triage_model.py").write_text(UNTRAINABLE)
    answer = CliRunner().invoke(app, [command, "triage_model.py:target", "--device", "cpu", "--train"])
    assert answer.exit_code == 2
    assert "inference works: try --infer" in answer.output


# In a process of its own, with what a worker imports: in this one other tests have long had the zoo.
ZOO_CHANGED = """
import importlib.util
from pathlib import Path
import compile_bench.measure.survey.run
from compile_bench.capture.collector import user_code_filter
from compile_bench.targets.blocks import changeable_blocks, handlers_around, is_in_block, resumable
from compile_bench.targets.loading import load_target
from compile_bench.targets.overlay import forget_user_modules, overlaid
from compile_bench.fixes.trial import trials

zoo = Path(importlib.util.find_spec("compile_bench.targets.zoo").origin)
before, after = "self.outer = nn.Linear(64, 64)", "self.outer = nn.Linear(64, 3)"
changed = zoo.read_text().replace(before, after).encode()
for overlay in ({}, {str(zoo): changed}, {}):
    with overlaid(overlay):
        forget_user_modules(user_code_filter())
        print(load_target("planted", "cpu").model.outer.out_features)
"""


def test_a_change_of_the_zoo_itself_is_tried():
    answer = subprocess.run([sys.executable, "-c", ZOO_CHANGED], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["64", "3", "64"]


STEPPER = """\
import torch
from torch import nn
from compile_bench.targets.target import Target


class Warming(nn.Module):
    def __init__(self):
        super().__init__()
        self.epoch = 0
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) * self.epoch


def target():
    def make_step(model, args):
        taken = 0

        def step():
            nonlocal taken
            model.epoch = taken
            taken += 1
            return model(*args)

        return step

    return Target(Warming(), (torch.ones(2, 4),), make_step=make_step)
"""


def test_what_a_step_keeps_from_call_to_call_compiles_it_again(tmp_path):
    """A counter beside the model goes on as it does in a training loop."""
    file = tmp_path / "stepper.py"
    file.write_text(STEPPER)
    found = survey(Case(f"{file}:target"), seeds=(0,), behind=False)
    assert [each.guard for each in found.recompiles if "epoch" in each.guard]
