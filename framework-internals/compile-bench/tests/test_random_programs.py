"""Random modules with planted breaks and recompilations: every line is found, none is invented, no fix is wrong."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from benchkit.errors import first_line
from compile_bench import Case
from compile_bench.capture.collector import settings, user_code_filter
from compile_bench.fixes.fixer import Fixer
from compile_bench.measure.records import Survey, place_of
from compile_bench.measure.survey import survey
from compile_bench.targets.loading import load_target
from compile_bench.targets.overlay import forget_user_modules, overlaid
from compile_bench.targets.target import Target

from .random_programs import Program, StepProgram, programs, step_programs
from .test_compile_agreement import compare_recompilations, logged, places, recompile_limits
from .triage_models import InThisProcess

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns about what the programs do

PROGRAMS = {
    "programs": "modules with 0–5 planted causes of breaks and recompilations, nested, in training and inference",
    "oracle": "Dynamo's own log of graph breaks and recompilations; outputs and gradients in float64",
}
STEPS = {
    "programs": "training steps as functions, closures and objects: backward, accumulation, clipping, optimizer, "
    "scheduler, state, own regions",
    "oracle": PROGRAMS["oracle"].partition(";")[0],
}
RAISES = "the compiled step raises without the tool too"
HIDDEN = "some breaks stay hidden, and a note says so"
_indices = itertools.count()
_LONGEST = 250  # lines


def in_float64(target: Target, train: bool, seed: int) -> list[torch.Tensor]:
    """Output and gradients for other arguments."""
    torch.manual_seed(seed)
    model, (x,) = target.model.double(), target.args
    model.zero_grad()
    out = model(torch.randn_like(x, dtype=torch.float64, requires_grad=train) * (1 + seed))
    if not train:
        return [out.detach()]
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check_fixes(case: Case, found: Survey, folder: Path) -> str:
    path = case.target.rpartition(":")[0]
    fixer: Any = InThisProcess(folder)
    results = Fixer(fixer, case, [found], folder).fix([place_of(each) for each in found.breaks])
    if results.combined is None:
        return "no fix"
    forget_user_modules(user_code_filter())
    before = load_target(case.target, "cpu")
    with overlaid(results.overlay):
        forget_user_modules(user_code_filter())
        after = load_target(case.target, "cpu")
    for seed in range(1, 4):
        for one, other in zip(*(in_float64(each, case.train, seed) for each in (before, after)), strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-12), results.overlay[path].decode()
    return "fixed"


# Fewer than PyTorch's 8, so that programs reach it in half the time.
@settings({"recompile_limit": 3})
def check(program: Program | StepProgram, folder: Path) -> str:
    index = next(_indices)
    path = folder / f"program_{index}.py"
    # PyTorch takes functions for one that are equal but for their file. So no line has the number of another program's.
    number = _LONGEST * index
    assert program.text.count("\n") < _LONGEST
    path.write_text("\n" * number + program.text)
    batches = isinstance(program, Program) and program.batches
    case = Case(f"{path}:target", "cpu", program.train, dynamic=False if batches else None)
    found = survey(case, seeds=(0,))
    if found.failures:
        assert found.eager_failure == ""
        with pytest.raises(Exception) as plain:  # noqa: PT011 # whatever the compiled program raises
            logged(case, 12)
        assert any(first_line(plain.value) in failure for failure in found.failures), found.failures
        return RAISES
    messages = logged(case, found.calls)
    planted = {f"{path}:{number + line}" for line in program.lines}
    lines = {each.place for each in found.breaks}
    log = places(messages) | recompile_limits(messages)
    assert log <= lines, f"missed lines of the log {log - lines}"
    assert lines <= planted | log, f"invented {lines - planted - log}"
    compare_recompilations(found, messages)
    if not found.breaks:  # whatever is planted is traced
        guards, shared = (
            {f"{path}:{number + line}" for line in marked} for marked in (program.guards, program.shared_guards)
        )
        recompiled = {each.place for each in found.recompiles}
        assert guards <= recompiled, f"missed {guards - recompiled}"
        assert not shared or shared & recompiled, f"missed all of {shared}"
    hidden = planted - lines
    assert not hidden or found.notes, f"missed {hidden}"
    assert not found.eager, found.eager
    if program.fix and found.breaks and not hidden:
        return check_fixes(case, found, folder)
    return HIDDEN if hidden else "all found"


@pytest.mark.fuzz
def test_every_planted_line_is_found_and_no_fix_is_wrong(fuzz, tmp_path, capsys):
    record = fuzz.run(programs(), lambda program: check(program, tmp_path), **PROGRAMS, wanted=500)
    assert record.outcomes.get(HIDDEN, 0) <= 0.05 * record.run


def test_some_planted_lines_are_found_and_no_fix_is_wrong(fuzz, tmp_path, capsys):
    fuzz.run(programs(), lambda program: check(program, tmp_path), **PROGRAMS, wanted=2)


@pytest.mark.fuzz
def test_every_line_of_a_step_is_found(fuzz, tmp_path, capsys):
    fuzz.run(step_programs(), lambda program: check(program, tmp_path), **STEPS, wanted=300)


def test_some_lines_of_steps_are_found(fuzz, tmp_path, capsys):
    fuzz.run(step_programs(), lambda program: check(program, tmp_path), **STEPS, wanted=1)


# Of an object with a __call__, Dynamo names the first two lines, and skips the rest.
@pytest.mark.parametrize(
    "form",
    [*(pytest.param(form, marks=pytest.mark.slow) for form in ("function", "closure")), "method", "own region"],
)
def test_a_step_breaks_where_the_log_says_and_resumes(form, tmp_path, capsys):
    """Backward, optimizer, scheduler and zero_grad, in every form of a step."""
    parts = tuple((part, "plain") for part in ("backward", "optimizer", "scheduler", "zero-grad"))
    program = StepProgram(form, parts)
    path = tmp_path / "training_step.py"
    path.write_text(program.text)
    case = Case(f"{path}:target", "cpu")
    found = survey(case, seeds=(0,))
    assert {each.place for each in found.breaks} == places(logged(case, found.calls))
    assert {each.line for each in found.breaks} == program.lines
    assert len(program.lines) == (0 if form == "own region" else 4)
    assert not any(each.whole_frame for each in found.breaks)


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        # Dynamo compiles nothing that a function at the recompile limit calls: its closure is no silent function.
        (Program((("changed-global", "closure"),), train=False, batches=True), "all found"),
        # The guard is the helper's line, not that of the call in forward.
        (Program((("growing-list", "helper"),), train=True), "all found"),
        # Two numbers that change become dynamic in the same recompilation, which names the first.
        (Program((("changed-global", "closure"), ("changed-global", "plain")), train=False), "all found"),
        # The count is multiplied with the input, so its fix must not change it in place.
        pytest.param(
            Program((("int-attribute", "closure"),), train=True, fix=True, batches=True),
            "fixed",
            marks=pytest.mark.slow,
        ),
        # Dynamo sets `capturable` in groups that a step changes, which raises on a CPU at the recompile limit: no error
        # of the uncompiled step, which has to be run from a state of its own.
        pytest.param(
            StepProgram("function", tuple((part, "plain") for part in ("backward", "rate", "optimizer")), "RMSprop"),
            RAISES,
            marks=pytest.mark.slow,
        ),
        # Dynamo keeps the module of an object's globals: when its file is loaded again, guards looked at the old ones.
        (StepProgram("object", (("counted", "plain"),), train=False), "all found"),
    ],
)
def test_programs_that_random_ones_were_shrunk_to(program, outcome, tmp_path, capsys):
    assert check(program, tmp_path) == outcome
