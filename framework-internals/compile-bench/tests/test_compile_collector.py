"""The collector on this torch: the private names that it needs, its records, and the loggers that it restores."""

import importlib
import importlib.util
import logging
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from compile_bench.capture.collector import Collector, autotuning_within, missing_surface, untimed_guards
from compile_bench.capture.frames import UserCodeFilter
from compile_bench.capture.parsing import read_events
from compile_bench.capture.text import recompiled
from compile_bench.capture.trace import RECOMPILE_LIMIT

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def program():
    spec = importlib.util.spec_from_file_location("compile_bench_golden_program", GOLDEN / "program.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch._dynamo.reset()
    yield module
    torch._dynamo.reset()


def test_the_private_surface_is_there():
    missing = missing_surface()
    assert not missing, f"torch {torch.__version__} has moved {missing}: compile_bench.capture needs an update"


def test_what_inductor_times_on_a_gpu_is_within_a_guard(monkeypatch):
    """Whichever function of Inductor asks for the time. The test replaces the timing itself."""
    benchmarker = importlib.import_module("torch._inductor.runtime.benchmarking").benchmarker
    happened = []

    @contextmanager
    def guard():
        happened.append("begin")
        yield
        happened.append("end")

    def timed(self, candidate, *arguments, **options):
        candidate()
        return 1.5

    def candidate():
        happened.append("call")

    monkeypatch.setattr(type(benchmarker), "benchmark_gpu", timed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    guarded = ["call", "begin", "call", "end"]  # no other process waits for the first call, which compiles
    with autotuning_within(guard):
        assert benchmarker.benchmark(candidate, (), {}, device="cuda") == 1.5
        assert happened == guarded
        assert benchmarker.benchmark_gpu(candidate, rep=20) == 1.5
        assert happened == guarded * 2
    happened.clear()
    benchmarker.benchmark_gpu(candidate)
    assert happened == ["call"]


def test_nobody_waits_for_a_candidate_that_fails(monkeypatch):
    benchmarker = importlib.import_module("torch._inductor.runtime.benchmarking").benchmarker
    begun = []

    @contextmanager
    def guard():
        begun.append(True)
        yield

    def candidate():
        raise RuntimeError("out of shared memory")

    with autotuning_within(guard), pytest.raises(RuntimeError, match="shared memory"):
        benchmarker.benchmark_gpu(candidate)
    assert not begun


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


@pytest.fixture
def guarded():
    """Skips a test where torch itself is wrong: torch 2.11 on Python 3.13.0 does not guard a module's attributes."""
    torch._dynamo.reset()
    counting = torch.compile(Counting(), backend="eager")
    results = [counting(torch.ones(())).item() for _ in range(2)]
    torch._dynamo.reset()
    if results != [1.0, 2.0]:
        python = ".".join(map(str, sys.version_info[:3]))
        pytest.skip(
            f"torch {torch.__version__} on Python {python} does not compile again when a module's attribute has changed"
        )


def test_guards_are_timed_but_where_that_is_left_out():
    def seconds():
        torch._dynamo.reset()
        with Collector() as collector:
            torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))
        (graph,) = collector.trace().graphs
        return graph.guard_seconds

    with untimed_guards():
        assert seconds() is None
    assert seconds() > 0


def test_the_trace_of_this_torch_reads_as_the_recorded_ones_do(program, guarded):
    with Collector() as collector:
        program.breaks()
    trace = collector.trace()
    what = (
        f"torch {torch.__version__} writes its structured trace differently: update compile_bench.capture and record it"
    )
    assert [entry.category for entry in trace.breaks] == [
        "data-dependent control flow",
        "tensor value read by Python",
        "side effect",
    ], what
    assert {Path(entry.file).name for entry in trace.breaks} == {"program.py"}, what
    assert trace.recompiles[0].guard == "self.calls == 0", what
    assert {entry.cause for entry in trace.recompiles} == {"Python value", "tensor size"}, what
    assert trace.graphs[0].operations == 3, what
    assert trace.graphs[0].guards > 0, what
    assert 0 < trace.phases["Dynamo"] < 60, what


def test_loggers_are_as_they_were(program):
    names = ("torch.__trace", "torch._dynamo.symbolic_convert.__graph_breaks")
    before = [(log.level, log.propagate, list(log.handlers)) for log in map(logging.getLogger, names)]
    with pytest.raises(ZeroDivisionError), Collector():
        raise ZeroDivisionError
    assert [(log.level, log.propagate, list(log.handlers)) for log in map(logging.getLogger, names)] == before


def test_what_pytest_captures_of_the_logs_has_no_entry_of_the_trace(caplog):
    with Collector() as collector:
        torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))
    assert collector.trace().graphs
    assert [record for record in caplog.records if record.name.startswith("torch.__trace")] == []


def test_an_entry_that_cannot_be_read_is_reported():
    collector = Collector()
    with collector:
        record = logging.LogRecord("torch.__trace", logging.DEBUG, "", 0, "", (), None)
        record.metadata = {"chromium_event": {}}
        record.payload = "not JSON"
        collector.handle(record)
    with pytest.raises(RuntimeError, match="needs an update"):
        collector.trace()


def test_results_and_report_need_no_torch():
    code = "import compile_bench.report.sections, compile_bench.measure.harness, sys; assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


LIBRARY = """
from torch import nn


class Helper(nn.Module):
    calls = 0  # a constant to the compiler

    def forward(self, x):
        print(end="")  # not followed into: compiled by itself
        self.calls += 1
        return x.sin() + self.calls
"""
CALLER = """
from library import Helper

helper = Helper()


def forward(x):
    return helper(x.cos())  # the user's call
"""


def test_what_is_compiled_again_in_a_library_names_the_users_call(tmp_path, monkeypatch, guarded):
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "library.py").write_text(LIBRARY)
    (tmp_path / "caller.py").write_text(CALLER)
    for folder in (installed, tmp_path):
        monkeypatch.syspath_prepend(folder)
    torch._dynamo.reset()
    outer = torch.compile(importlib.import_module("caller").forward, backend="eager")
    with Collector() as collector:
        for _ in range(10):
            outer(torch.ones(2))
    torch._dynamo.reset()
    user_code = UserCodeFilter(
        torch=str(Path(torch.__file__).parent), library=[str(installed)], launcher=str(Path(__file__).parent)
    )
    trace = read_events(collector.events, user_code=user_code)
    limit = next(each for each in trace.breaks if each.category == RECOMPILE_LIMIT)
    line = next(number for number, text in enumerate(CALLER.splitlines(), 1) if text.endswith("# the user's call"))
    assert (limit.place, limit.function) == (f"{tmp_path / 'caller.py'}:{line}", "forward")
    assert limit.library.startswith(f"{installed / 'library.py'}:")
    again = next(each for each in trace.recompiles if each.file == str(installed / "library.py"))
    assert again.called_from == f"{tmp_path / 'caller.py'}:{line}"
    assert recompiled(again, Path.cwd()) == f"caller.py:{line} (in library.py:{again.line})"
