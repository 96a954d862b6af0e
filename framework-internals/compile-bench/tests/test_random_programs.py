"""Random modules with planted breaks: every line is found, none is invented, and what the fixes compute is the same."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_bench import Case
from compile_bench.capture.collector import user_code_filter
from compile_bench.fixes.fixer import Fixer
from compile_bench.measure.survey.run import survey
from compile_bench.measure.survey.types import Survey, place_of
from compile_bench.targets.loading import load_target
from compile_bench.targets.overlay import forget_user_modules, overlaid
from compile_bench.targets.target import Target

from .random_programs import Program, programs
from .test_compile_agreement import break_log, places
from .test_compile_triage import InThisProcess

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns about what the programs do

PROGRAMS = {
    "programs": "modules with 0–5 planted causes, nested, in training and inference",
    "oracle": "Dynamo's own log of graph breaks; outputs and gradients in float64",
}
_numbers = itertools.count()


def logged(case: Case) -> set[int]:
    """The lines in Dynamo's own log."""
    torch.compiler.reset()
    target = load_target(case.target, "cpu")
    target.model.train(case.train)
    with break_log() as messages:
        step = target.step(torch.compile(target.model, backend="eager"), train=case.train)
        for _ in range(3):
            step()
    torch.compiler.reset()
    return {int(place.rpartition(":")[2]) for place in places(messages) if place.startswith(case.target[:-7])}


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


def check(program: Program, folder: Path) -> str:
    path = folder / f"program_{next(_numbers)}.py"
    path.write_text(program.text)
    case = Case(f"{path}:target", "cpu", program.train)
    found = survey(case, seeds=(0,))
    lines = {each.line for each in found.breaks}
    log = logged(case)
    assert found.failures == (), found.failures
    assert log <= lines, f"missed lines of the log {log - lines} of\n{program.text}"
    assert lines <= program.lines | log, f"invented {lines - program.lines - log} in\n{program.text}"
    hidden = program.lines - lines
    assert not hidden or found.notes, f"missed {hidden} in\n{program.text}"
    assert not found.eager, found.eager
    if program.fix and found.breaks and not hidden:
        return check_fixes(case, found, folder)
    return "some stay hidden, and a note says so" if hidden else "all found"


@pytest.mark.fuzz
def test_every_planted_line_is_found_and_no_fix_is_wrong(fuzz, tmp_path, capsys):
    record = fuzz.run(programs(), lambda program: check(program, tmp_path), **PROGRAMS, wanted=500)
    assert record.outcomes.get("some stay hidden, and a note says so", 0) <= 0.05 * record.run


def test_some_planted_lines_are_found_and_no_fix_is_wrong(fuzz, tmp_path, capsys):
    fuzz.run(programs(), lambda program: check(program, tmp_path), **PROGRAMS, wanted=6)
