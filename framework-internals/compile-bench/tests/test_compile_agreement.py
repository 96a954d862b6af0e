"""Graphs and breaks that the collector counts, compared with PyTorch's two own sources.

The collector and the handler of ``TORCH_LOGS=graph_breaks,recompiles`` watch the same step; ``torch._dynamo.explain``
traces the model once more. All use the backend ``eager``.
"""

import importlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_bench.capture.collector import BREAK_LOGGERS, Collector, user_code_filter
from compile_bench.capture.trace import Recompile
from compile_bench.lens import SWEEP_GROUPS
from compile_bench.measure.records import Survey
from compile_bench.measure.steps import load_case
from compile_bench.targets.case import Case
from compile_bench.targets.loading import load_target
from compile_bench.targets.overlay import forget_user_modules
from compile_bench.targets.regional import OwnRegions
from compile_bench.targets.target import FunctionModel, Target

_PLACE = re.compile(r"Graph break in user code at (?P<file>.*):(?P<line>\d+)")
_INNERMOST = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')
_RECOMPILED = re.compile(r"Recompiling function \S+ in (?P<place>.*:\d+)\n")
_LIMIT = re.compile(r"torch._dynamo hit config.recompile_limit .*\n +function: '.*' \((?P<place>.*:\d+)\)\n")
_REASON = re.compile(r"(?:^|\n) +(?:- |last reason: )(?=\d+/\d+: )")
_GUARD = re.compile(r"\d+/\d+: (?P<guard>.*?)(?:  # .*|$)", re.MULTILINE)
_MADE_AT = re.compile(r"  # (?P<file>[^#\n]*\.py):(?P<line>\d+) in ")
_LOGGERS = (*BREAK_LOGGERS, "torch._dynamo.guards.__recompiles", "torch._dynamo.convert_frame")


@dataclass(frozen=True)
class Counts:
    """Counts of one target, traced with the backend ``eager``, from three sources."""

    graphs: int  # graphs that the collector saw
    places: set[str]  # file.py:LINE of every break that it saw
    met: int  # how often these breaks were met; Dynamo's repeated attempts count
    explain_graphs: int  # graph_count of torch._dynamo.explain
    explain_breaks: int  # its graph_break_count
    log_places: set[str]  # file.py:LINE of every break in the log of TORCH_LOGS=graph_breaks

    def compare(self, *, several_frames: bool = False) -> None:
        """Fail unless all sources agree.

        ``explain`` counts no breaks, but takes one from the number of graphs: a line that breaks in ``several_frames``
        counts several times.
        """
        assert self.places == self.log_places
        assert self.graphs == self.explain_graphs
        counted = {self.explain_graphs - 1} if several_frames else {len(self.places), self.met}
        assert self.explain_breaks in counted


def count_breaks(case: Case) -> Counts:
    """Count graphs and breaks of a target with the collector, with ``explain`` and from PyTorch's log."""
    target = load_case(case)
    with dynamo_log() as messages, Collector() as collector:
        _once(target, case)
    own = collector.trace(user_code_filter(libraries=False))
    torch.compiler.reset()
    torch.manual_seed(0)
    explain = importlib.import_module("torch._dynamo").explain
    with torch.set_grad_enabled(case.train), target.precision():
        told = explain(target.copied())(*target.args, **target.kwargs)
    return Counts(
        len(own.graphs),
        {entry.place for entry in own.breaks},
        sum(entry.times for entry in own.breaks),
        told.graph_count,
        told.graph_break_count,
        places(messages),
    )


def _once(target: Target, case: Case) -> None:
    torch.manual_seed(0)
    model = target.copied()
    compiled: Any = torch.compile(model, backend="eager")
    target.step(compiled, train=case.train)()


@contextmanager
def dynamo_log() -> Iterator[list[str]]:
    """What ``TORCH_LOGS=graph_breaks,recompiles`` prints, and the warning about the recompile limit."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep(level=logging.DEBUG)
    torch._logging.set_logs(graph_breaks=True, recompiles=True)  # type: ignore[attr-defined] # documented, but not listed
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = loggers[-1].level
    loggers[-1].setLevel(logging.WARNING)  # a survey silences it
    try:
        for logger in loggers:
            logger.addHandler(handler)
        yield messages
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        loggers[-1].setLevel(before)
        torch._logging.set_logs()  # type: ignore[attr-defined]


def places(messages: list[str]) -> set[str]:
    """``file.py:LINE`` of every break in the log: the last line of the user's that a message names."""
    found = set()
    library = str(Path(torch.__file__).parent)
    for message in messages:
        text = message.partition("User code traceback:")[2].split("\nTraceback (most recent call last):")[0]
        stack = [m for m in _INNERMOST.finditer(text) if not m["file"].startswith(library)]
        named = stack[-1] if stack else _PLACE.search(message)
        if named:
            found.add(f"{named['file']}:{named['line']}")
    return found


@dataclass(frozen=True)
class Guard:
    """A failed guard in the log.

    Attributes:
        text: The condition, with ``#`` for its numbers.
        place: ``file.py:LINE`` of the line that made it, or of the function that was compiled again.
    """

    text: str
    place: str

    @classmethod
    def of(cls, recompile: Recompile) -> "Guard":
        return cls(without_numbers(recompile.guard), recompile.place)


def without_numbers(guard: str) -> str:
    return " ".join(re.sub(r"\d+(\.\d+)?", "#", guard).split())


def recompilations(messages: list[str]) -> list[list[Guard]]:
    """The failed guards of every recompilation in the log; that of the newest code comes first."""
    return [_guards(message, found["place"]) for message in messages if (found := _RECOMPILED.match(message))]


def recompile_limits(messages: list[str]) -> set[str]:
    """The line of the guard that failed last, for every function that reached the recompile limit."""
    found = ((message, _LIMIT.match(message)) for message in messages)
    return {_guards(message, limit["place"])[0].place for message, limit in found if limit}


def _guards(message: str, function: str) -> list[Guard]:
    library, guards = str(Path(torch.__file__).parent), []
    for reason in _REASON.split(message)[1:]:
        stack = [m for m in _INNERMOST.finditer(reason) if not m["file"].startswith(library)]
        made = _MADE_AT.search(reason.split("\n")[0])
        place = function
        if stack:
            place = f"{stack[-1]['file']}:{stack[-1]['line']}"
        elif made and function.rpartition(":")[0].endswith(made["file"]):
            place = f"{function.rpartition(':')[0]}:{made['line']}"
        found = _GUARD.match(reason)
        assert found, reason
        guards.append(Guard(without_numbers(found["guard"]), place))
    return guards


def compiled_plainly(target: Target, backend: str, dynamic: bool | None) -> Any:
    """As a user compiles it: a module or a function as it is, and nothing where the code has compiled its regions."""
    model = target.model
    if isinstance(model, OwnRegions):
        model.compiled = True
        return model
    if isinstance(model, FunctionModel):
        return FunctionModel(torch.compile(model.function, backend=backend, dynamic=dynamic))
    return torch.compile(model, backend=backend, dynamic=dynamic)


def logged(case: Case, calls: int) -> list[str]:
    """What Dynamo's own log says about as many steps as a survey took."""
    torch.compiler.reset()
    forget_user_modules(user_code_filter())
    target = load_target(case.target, "cpu")
    target.model.train(case.train)
    first, *others = target.calls()
    with dynamo_log() as messages:
        backend = "aot_eager" if case.train else "eager"
        compiled = compiled_plainly(target, backend, case.dynamic)
        step = first.step(compiled, train=case.train)
        for _ in range(calls - len(others)):
            step()
        for each in others:
            each.step(compiled, train=case.train)()
        step()  # the survey's last step looks for functions that run eagerly
    torch.compiler.reset()
    return messages


def compare_recompilations(found: Survey, messages: list[str]) -> None:
    """Fail unless a survey and the log name the same guards at the same lines."""
    log = recompilations(messages)
    newest = {guards[0] for guards in log}
    own = {Guard.of(each) for each in found.recompiles}
    assert own == newest, f"only here {own - newest}, only in the log {newest - own}"
    older = {guard.place for guards in log for guard in guards} - {guard.place for guard in own}
    assert not older, f"missed {older}"


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_all_three_agree_on_planted_breaks(train):
    counts = count_breaks(Case("planted", train=train))
    assert len(counts.places) == 3
    counts.compare()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # as errors, the models' own warnings would end the trace
@pytest.mark.parametrize("target", [target for group in SWEEP_GROUPS for target in group])
def test_the_counts_of_every_model_agree(target):
    if target not in ("gpt", "mlp", "resnet"):
        pytest.importorskip("transformers")
    counts = count_breaks(Case(target))
    counts.compare(several_frames=target in ("wav2vec2", "longformer"))
    if target == "gpt2":
        assert [Path(place).name.split(":")[0] for place in counts.places] == ["modeling_utils.py"]
