"""Triage from end to end on a small model of two files, interrupted, and with targets that are no use."""

import linecache
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchkit import UserError
from benchkit.processes import ChildFailure
from compile_bench import Case, Harness
from compile_bench.capture.collector import user_code_filter
from compile_bench.capture.trace import CompileTrace, Graph
from compile_bench.cli import app
from compile_bench.cli.triaging import describe_report, write_patches
from compile_bench.fixes.trial import reference, refusal
from compile_bench.measure.records import Survey
from compile_bench.measure.survey import survey, triage
from compile_bench.targets.loading import load_target
from compile_bench.targets.overlay import forget_user_modules, overlaid
from compile_bench.triage import run
from compile_bench.triage.findings import TriageReport
from compile_bench.triage.run import _together, run_triage

from .printed import printed_text
from .triage_models import MODEL

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns about what the models do


HANG = "def hang():\n    import time\n\n    time.sleep(600)\n\n\n"


@pytest.mark.slow
def test_breaks_are_found_costed_fixed_and_proved(folder):
    target = f"{folder / 'triage_model.py'}:target"
    with Harness.open("cpu", limit=1800) as harness:
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
    printed = printed_text(describe_report, report, patches)
    assert "triage_model.py:14: Data-dependent branching" in printed
    assert "patches/" in printed
    for patch in patches.values():
        subprocess.run(["git", "apply", "--check", str(patch)], cwd=folder, check=True)
    records = report.records(folder)
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


def test_an_error_of_a_changed_model_is_told_to_its_end(folder, tmp_path):
    case, path = Case(f"{folder / 'triage_model.py'}:target", "cpu"), tmp_path / "reference.pt"
    reference(case, path=path)
    why = "the shapes do not fit, " * 20 + "which ends here"
    raising = MODEL.replace("return self.b(x)", f"raise ValueError({why!r})")
    with overlaid({str(folder / "triage_model.py"): raising.encode()}):
        forget_user_modules(user_code_filter())
        refused = refusal(case, path=path, with_inductor=False)
    assert refused.why == f"the changed model raised ValueError: {why}"


def test_an_overlay_is_what_is_imported_and_shown(folder):
    path = folder / "triage_model.py"
    with overlaid({str(path): MODEL.replace("nn.Linear(8, 8)", "nn.Linear(8, 3)").encode()}):
        assert load_target(f"{path}:target", "cpu").model.b.out_features == 3
        assert "nn.Linear(8, 3)" in linecache.getline(str(path), 9)
    assert "nn.Linear(8, 8)" in linecache.getline(str(path), 9)
    forget_user_modules(user_code_filter())
    assert load_target(f"{path}:target", "cpu").model.b.out_features == 8
    assert path.read_text() == MODEL


def test_a_model_that_raises_only_where_it_is_compiled_is_told_first(folder):
    (folder / "triage_model.py").write_text(DOUBLE_BACKWARD)
    case = Case(f"{folder / 'triage_model.py'}:target", "cpu")
    found = triage(case)
    (failure,) = found.failures
    assert "double backward" in failure
    report = TriageReport.of_surveys("m", (survey(case, seeds=(0,)),))
    assert (
        printed_text(describe_report, report, {})
        .splitlines()[1]
        .startswith("training raises where it is compiled, which ended its")
    )


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


def test_what_there_is_survives_an_end_before_the_end(folder, monkeypatch):
    """Each break is printed when it is seen, and the report has what was found."""
    monkeypatch.setattr(run._Triage, "fix", lambda self, root: signal.raise_signal(signal.SIGTERM))
    answer = CliRunner().invoke(app, ["triage", "triage_model.py:target", "--infer", "--device", "cpu"])
    assert answer.exit_code == 130, answer.output
    at_once, report = answer.output.split("\n\n", 1)
    assert at_once.splitlines()[0] == "[1/3] breaks: tracing inference"
    assert "  triage_model.py:14: Data-dependent branching" in at_once
    assert "  triage_helper.py:4: " in at_once
    assert "[2/3] costs: 3 findings" in at_once
    assert "not done: the rest: triage was interrupted" in report
    assert "triage_model.py:14: Data-dependent branching" in report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "number", "missing"),
    [
        ("  triage_helper.py:4: ", signal.SIGINT, "the rest"),
        ("[2/3] costs", signal.SIGTERM, "the rest"),
        ("  triage_helper.py:4, change 1: ", signal.SIGINT, "the proof of the changes that remove the breaks of"),
    ],
    ids=["collecting", "measuring costs", "proving"],
)
def test_an_interrupt_in_any_stage_prints_what_there_is(folder, stage, number, missing):
    """The signal goes to all processes, as from a terminal, and leaves none of them."""
    if "change" not in stage and "costs" not in stage:  # a survey that is still going on
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
def test_a_survey_that_does_not_end_keeps_what_it_saw(folder, monkeypatch):
    """It hangs in the second call, when the breaks of the first are known."""
    path, hangs = folder / "triage_model.py", folder / "hangs"
    # Time passes only where a process hangs, however slow the machine is.
    hangs.touch()
    clock = SimpleNamespace(monotonic=lambda: 1e6 * hangs.stat().st_size, sleep=time.sleep)
    monkeypatch.setattr("benchkit.processes.fork_server.time", clock)
    hang = 'print("seen", end="")\n        self.calls = getattr(self, "calls", 0) + 1\n        '
    hang += "if self.calls > 4:\n            hang()"
    noted = HANG.replace("    time", f"    with open({str(hangs)!r}, 'a') as file:\n        file.write('x')\n    time")
    path.write_text(MODEL.replace('print("seen", end="")', hang).replace("class Small", noted + "class Small"))
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
        report = run_triage(harness, Case(f"{folder / 'triage_model.py'}:target", "cpu"), kinds=(False,))
    assert report.findings == ()
    assert jobs == ["survey"]


@pytest.mark.parametrize(
    ("function", "status", "message"),
    [
        ("nothing", 2, "returned an object of type int"),
        ("unfit", 2, "raises by itself, uncompiled, in inference: RuntimeError: size mismatch"),
        ("hangs", 3, "was ended after its time limit"),
    ],
)
def test_a_target_that_is_no_use_gets_one_line(folder, function, status, message):
    limit = "1" if function == "hangs" else "200"
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
    told = printed_text(describe_report, TriageReport.of_surveys("m", (seen, nothing)), {}).splitlines()[1:]
    assert told == [
        "training: all of it is compiled, as 1 graph with 3 operations",
        "inference: it computes nothing with tensors, so there is nothing to compile",
    ]
    refused = replace(nothing, failures=("RuntimeError: not a scripted model",))
    (told,) = printed_text(describe_report, TriageReport.of_surveys("m", (refused,)), {}).splitlines()[1:]
    assert told.startswith("inference raises where it is compiled")


UNTRAINABLE = """\
import torch


def target():
    return torch.nn.Embedding(4, 2).requires_grad_(False).weight.argmax, ()
"""


def test_a_target_that_cannot_train_is_told_how_to_go_on(folder):
    (folder / "triage_model.py").write_text(UNTRAINABLE)
    answer = CliRunner().invoke(app, ["check", "triage_model.py:target", "--device", "cpu", "--train"])
    assert answer.exit_code == 2
    assert "inference works: try --infer" in answer.output


# In a process of its own, with what a worker imports: in this one other tests have long had the zoo.
ZOO_CHANGED = """
import importlib.util
from pathlib import Path
import compile_bench.measure.survey
from compile_bench.capture.collector import user_code_filter
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


@pytest.mark.slow
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
