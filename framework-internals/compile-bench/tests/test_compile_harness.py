"""The harness and the command line: fresh processes, their failures, and one real compilation."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchkit import Quantity, UserError
from compile_bench import Case, Harness, WorkerFailure, judge
from compile_bench.cli import app
from compile_bench.cli_measure import budget_exceeded
from compile_bench.harness import run_limited
from compile_bench.results import Accuracy, Bench, FirstSteps, Steady, Triage
from compile_bench.trace import Break, CompileTrace, Recompile

PACKAGE = Path(__file__).parents[1]

FILE = """
import os, signal, torch

def small():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()), (torch.randn(4, 16),)

def crashes():
    os.kill(os.getpid(), signal.SIGSEGV)

def raises():
    raise ValueError("three words here")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "targets.py"
    path.write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return path


def command(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_a_hanging_process_is_ended_with_its_children(tmp_path):
    child = tmp_path / "child"
    program = (
        "import pathlib, subprocess, sys, time\n"
        "process = subprocess.Popen(['sleep', '60'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(process.pid))\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    command = [sys.executable, "-c", program, str(child)]
    assert run_limited(command, dict(os.environ), tmp_path / "log", limit=3.0) is None
    assert time.monotonic() - start < 20
    pid = int(child.read_text())
    for _ in range(50):
        if not _alive(pid):
            break
        time.sleep(0.1)
    assert not _alive(pid)


def test_a_target_that_takes_too_long_is_a_failure():
    with Harness.open("cpu", limit=0.5) as harness, pytest.raises(WorkerFailure, match=r"time limit of 0\.5 s"):
        harness.triage(Case("planted"))


def _alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_crash_is_a_failure_and_the_folder_is_gone(file):
    with Harness.open("cpu") as harness:
        folder = harness.folder
        with pytest.raises(WorkerFailure, match=f"status -{signal.SIGSEGV.value}"):
            harness.triage(Case(f"{file}:crashes"))
    assert not folder.exists()


def test_triage_lists_the_planted_trouble_and_nothing_else():
    result = command("triage", "planted", "--device", "cpu")
    assert result.exit_code == 0, result.output
    lines = (PACKAGE / "src/compile_bench/zoo.py").read_text().splitlines()
    for comment in ("a branch on a tensor's value", "a tensor's value read by Python", "a side effect in the middle"):
        number = next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))
        assert f"zoo.py:{number} |" in result.output
    assert "3 breaks" in result.output
    assert "self.calls == 0" in result.output
    assert "size mismatch" in result.output


def test_check_keeps_a_clean_target(file):
    result = command("check", f"{file}:small", "--infer", "--device", "cpu")
    assert (result.exit_code, result.output) == (0, f"{file}:small: within budget\n")


def test_check_names_what_is_over_budget(monkeypatch):
    trouble = Break("model.py", 12, "forward", "if x > 0:", "Data-dependent branching", "", (), "branch", False)
    again = Recompile("0/1", "forward", "model.py", 10, "self.calls == 0", "Python value")
    found = Triage(Case("x"), CompileTrace(breaks=(trouble,), recompiles=(again, again)), 2)
    monkeypatch.setattr(Harness, "triage", lambda self, case: found)
    result = command("check", "x", "--device", "cpu")
    assert result.exit_code == 1
    assert "1 graph breaks, 0 allowed" not in result.output
    assert "1 graph break, 0 allowed" in result.output
    assert "model.py:12: Data-dependent branching" in result.output
    assert "2 recompilations, 1 allowed" in result.output
    assert "self.calls == 0 no longer held" in result.output
    assert command("check", "x", "--max-breaks", "1", "--max-recompiles", "2", "--device", "cpu").exit_code == 0


def test_an_unusable_target_is_one_line_and_status_2(file):
    result = command("triage", f"{file}:raises", "--device", "cpu")
    assert result.exit_code == 2
    assert result.output.endswith("targets.py:raises raised ValueError: three words here\n")
    assert command("triage", f"{file}:small", "--device", "gpu").exit_code == 2
    assert "--mode takes default" in command("run", "mlp", "--mode", "fast", "--device", "cpu").output


def test_a_speedup_is_too_small_when_its_whole_interval_is():
    def bench(low, high):
        speedup = Quantity((low + high) / 2, "×", low, high, 9, "bootstrap 95%")
        step = Quantity(0.1, "s", 0.1, 0.1, 9)
        first = FirstSteps((1.0, 0.1, 0.1), trace=CompileTrace())
        return Bench(Case("x"), first, first, None, Steady(step, step, speedup, "wall-clock"), Accuracy(), None)

    clean = Triage(Case("x"), CompileTrace(), 2)
    assert budget_exceeded(clean, bench(0.9, 1.2), 0, 1, 1.05) == []
    (line,) = budget_exceeded(clean, bench(0.9, 1.0), 0, 1, 1.05)
    assert "at least 1.05×" in line


@pytest.fixture(scope="module")
def toolchain(tmp_path_factory):
    """A harness whose toolchain has been asked once: ten seconds and more on a CPU."""
    with Harness.open("cpu") as harness:
        assert harness.toolchain_seconds() > 0
        yield harness


@pytest.mark.slow
def test_a_small_model_is_measured_to_the_end(toolchain, file):
    bench = toolchain.bench(Case(f"{file}:small"), steady_seconds=0.5)
    assert len(bench.trace.graphs) == 1
    assert bench.trace.breaks == ()
    assert bench.trace.kernels > 0
    assert bench.trace.cache_events["fx_graph_cache_miss"] > 0
    assert bench.warm.trace.cache_events["fx_graph_cache_hit"] > 0
    assert bench.warm.trace.phases.get("Inductor", 0.0) < bench.trace.phases["Inductor"]
    assert sum(bench.trace.phases.values()) <= sum(bench.cold.steps)
    assert bench.accuracy.holds
    assert bench.accuracy.tensors == 3
    assert bench.memory is None
    assert judge(bench).advice in ("compile", "don't", "inconclusive")
    assert not [path for path in toolchain.folder.iterdir() if "request" in path.name]


def test_a_missing_compiler_is_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with (
        Harness.open("cpu") as harness,
        pytest.raises(UserError, match=r"no C\+\+ compiler 'no-such-compiler' on PATH \(install one"),
    ):
        harness.toolchain_seconds()
