"""The lock file and the pytest plugin: what is locked, what counts as drift, what is over budget."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchkit import UserError
from compile_bench import Case, Harness, pytest_plugin
from compile_bench.capture.trace import CompileTrace, Graph
from compile_bench.check.lock import Inventory, key_of, locked, read_lock, update_lock
from compile_bench.cli import app
from compile_bench.measure.records import Triage

COUNTS = Inventory(
    1, 0, 0, guards=12, kernels=3, torch="2.13.0", own_breaks=0, own_recompiles=0, recompiles_per_guard=0
)


def test_an_entry_comes_back_and_others_stay(tmp_path):
    file = tmp_path / "compile.lock.json"
    update_lock(file, "b", COUNTS)
    update_lock(file, "a", replace(COUNTS, kernels=9))
    assert locked(file, "b") == COUNTS
    assert list(json.loads(file.read_text())["entries"]) == ["a", "b"]
    assert not COUNTS.drift(COUNTS)


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    """As workers of pytest-xdist do."""
    code = """
import sys
from pathlib import Path
from compile_bench.check.lock import update_lock
from compile_bench.check.lock import Inventory
for number in range(20):
    update_lock(Path(sys.argv[1]), f"{sys.argv[2]}{number}", Inventory(1, 0, 0, 0, 0, "2.13.0"))
"""
    file = tmp_path / "compile.lock.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    both = [subprocess.Popen([sys.executable, "-c", code, str(file), name], env=environment) for name in "ab"]
    assert [process.wait() for process in both] == [0, 0]
    assert len(read_lock(file)) == 40
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_drift_names_every_count_and_the_version():
    now = replace(COUNTS, graphs=2, kernels=5)
    assert COUNTS.drift(now) == ["graphs: 1 locked, 2 now", "kernels: 3 locked, 5 now"]
    *_, hint = COUNTS.drift(replace(now, torch="2.14.0"))
    assert hint == "locked with torch 2.13.0, this is 2.14.0: lock anew if that is the reason"
    assert COUNTS.drift(replace(COUNTS, torch="2.14.0")) == []


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 1, "entries": {"a": {"graphs": 1}}}'])
def test_what_is_no_lock_file_is_one_line(tmp_path, text):
    file = tmp_path / "lock.json"
    file.write_text(text)
    with pytest.raises(UserError, match="is not a lock file of compile-bench"):
        read_lock(file)


@pytest.mark.parametrize("changed", [{"graphs": None}, {"graphs": "1"}, {"own_breaks": 0.5}, {"torch": None}])
def test_a_count_that_is_no_number_is_no_entry(tmp_path, changed):
    file = tmp_path / "lock.json"
    file.write_text(json.dumps({"version": 2, "entries": {"a": {**asdict(COUNTS), **changed}}}))
    (name,) = changed
    with pytest.raises(UserError, match=f"is not a lock file of compile-bench .*{name} is "):
        read_lock(file)


def test_a_lock_file_of_another_version_or_without_the_entry_is_one_line(tmp_path):
    file = tmp_path / "lock.json"
    file.write_text('{"version": 7, "entries": {}}')
    with pytest.raises(UserError, match="of version 7; this compile-bench reads 1 and 2"):
        read_lock(file)
    with pytest.raises(UserError, match="there is no lock file"):
        read_lock(tmp_path / "absent.json")
    update_lock(tmp_path / "new.json", "a", COUNTS)
    with pytest.raises(UserError, match="has no entry 'b'"):
        locked(tmp_path / "new.json", "b")


def test_cases_have_keys_of_their_own():
    cases = [
        Case("m"),
        Case("m", train=False),
        Case("m", dynamic=True),
        Case("m", dynamic=False),
        Case("m", scope="blocks"),
        Case("m", mode="max-autotune"),
    ]
    assert len({key_of(case) for case in cases}) == len(cases)


def test_check_fails_on_drift_and_lock_fixes_it(tmp_path, monkeypatch):
    now = [COUNTS.kernels]
    trace = CompileTrace(graphs=(Graph("0/0", "f", 5, 12, None),))
    monkeypatch.setattr(Harness, "triage", lambda self, case: Triage(case, trace, 2))
    monkeypatch.setattr(Harness, "toolchain_seconds", lambda self: 1.0)
    monkeypatch.setattr(Harness, "ask", lambda self, job, case: (now[0], None))
    file = str(tmp_path / "compile.lock.json")

    def command(*arguments):
        return CliRunner().invoke(app, [*arguments, "--device", "cpu"])

    assert command("check", "m", "--lock", file).exit_code == 2
    result = command("lock", "m", "--file", file)
    assert result.exit_code == 0
    assert "1 graph, 0 graph breaks, 0 recompilations, 12 guards, 3 kernels" in result.output
    assert command("check", "m", "--lock", file).exit_code == 0
    now[0] = 4
    result = command("check", "m", "--lock", file)
    assert result.exit_code == 1
    assert "kernels: 3 locked, 4 now" in result.output


def test_an_inventory_counts_a_trace():
    trace = CompileTrace(graphs=(Graph("0/0", "f", 5, 12, None),), kernels=3)
    assert Inventory.of(trace, "2.13.0") == COUNTS


def test_a_file_that_cannot_be_written_ends_before_anything_is_measured(tmp_path, monkeypatch):
    def no_measurement(*arguments, **options):
        raise AssertionError

    monkeypatch.setattr("compile_bench.cli.checking.Harness.open", no_measurement)
    (tmp_path / "other.json").write_text("{}")
    for command, file, says in (
        ("lock", tmp_path / "other.json", "is not a lock file of compile-bench .* name another file, or remove"),
        ("lock", Path("/proc/x/compile.lock"), "/proc/x"),
        ("cache-key", Path("/proc/x/keys.json"), "/proc/x"),
    ):
        result = CliRunner().invoke(app, [command, "mlp", "--file", str(file), "--device", "cpu"])
        assert result.exit_code == 2
        assert re.search(says, result.output)


def test_counts_that_a_lock_file_of_version_1_lacks_are_not_compared(tmp_path):
    file = tmp_path / "compile.lock.json"
    entry = {"graphs": 1, "breaks": 0, "recompiles": 4, "guards": 12, "kernels": 3, "torch": "2.13.0"}
    file.write_text(json.dumps({"version": 1, "entries": {"a": entry}}))
    before = locked(file, "a")
    now = replace(before, own_recompiles=4, recompiles_per_guard=3, cuda_graphs=2)
    assert before.drift(now) == []
    update_lock(file, "a", now)
    assert json.loads(file.read_text())["version"] == 2
    drift = locked(file, "a").drift(replace(now, recompiles_per_guard=4, cuda_graphs=1))
    assert drift == ["recompiles_per_guard: 3 locked, 4 now", "cuda_graphs: 2 locked, 1 now"]


TESTS = """
import pytest, torch

def branching(x):
    if x.sum() > 0:
        x = x + 1
    return x.sin()

def run(function, *sizes):
    compiled = torch.compile(function, backend="eager", dynamic=False)
    for size in sizes:
        compiled(torch.ones(size))

@pytest.mark.compile_budget(breaks=0, recompiles=1)
def test_within(): run(torch.sin, 3, 4)

@pytest.mark.compile_budget(breaks=0)
def test_breaks(): run(branching, 3)

@pytest.mark.compile_budget(recompiles=1, recompiles_per_guard=1)
def test_recompiles(): run(lambda x: x.cos(), 3, 4, 5)

@pytest.mark.compile_budget(graphs=1, lock=True)
def test_locked(): run(lambda x: x.tan(), 3)

@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.compile_budget(cuda_graphs=True)
def test_needs_a_gpu(): pass

@pytest.mark.compile_budget(brakes=0)
def test_typo(): pass

@pytest.mark.compile_budget(breaks=0)
def test_fails_by_itself(): assert 1 == 2

def test_without_a_budget(): run(branching, 3)
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """What pytest prints about the tests above, with a lock file that holds other counts."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "test_it.py").write_text(TESTS)
    update_lock(folder / "compile.lock.json", "test_it.py::test_locked", replace(COUNTS, graphs=2))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "compile_bench.pytest_plugin"]
    command += ["--strict-markers", "test_it.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_the_plugin_holds_tests_to_their_budgets(answer):
    assert "1 graph break, 0 allowed" in answer
    assert "test_it.py:5: Data-dependent branching" in answer
    assert "2 recompilations, 1 allowed" in answer
    assert "2 recompilations, 1 allowed for one guard" in answer
    assert "cuda_graphs=True): expected a CUDA GPU, torch sees none" in answer
    assert "own_only=, cuda_graphs=, lock=; got brakes" in answer
    assert "assert 1 == 2" in answer
    assert "6 failed, 2 passed" in answer
    assert "torch.__trace" not in answer  # the trace's entries are no messages for the reader of a failure


@pytest.mark.slow
def test_the_plugin_notices_drift(answer):
    assert "graphs: 2 locked, 1 now" in answer
    assert "kernels: 3 locked, 0 now" in answer


def test_the_plugin_writes_the_lock(tmp_path):
    def item(update):
        config = SimpleNamespace(getoption=lambda name: update)
        return SimpleNamespace(path=tmp_path / "test_it.py", nodeid="tests/test_it.py::TestX::test_y[1]", config=config)

    trace = CompileTrace(graphs=(Graph("0/0", "f", 5, 12, None),), kernels=3)
    (missing,) = pytest_plugin._drift(item(False), trace, "2.13.0")
    assert "there is no lock file" in missing
    assert "--compile-lock-update" in missing
    assert pytest_plugin._drift(item(True), trace, "2.13.0") == []
    assert locked(tmp_path / "compile.lock.json", "test_it.py::TestX::test_y[1]") == COUNTS
    assert pytest_plugin._drift(item(False), trace, "2.13.0") == []


GROWING = """\
import torch
from torch import nn


class Cache:
    def __init__(self):
        self.rows, self.seen = [], 0

    def add(self, row):
        self.seen += 1
        self.rows = [torch.cat([*self.rows, row])]
        return self.rows[0]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.cache = nn.Linear(4, 4), Cache()

    def forward(self, x):
        rows = self.cache.add(self.project(x))
        return x + rows.mean(0) / self.cache.seen


def make():
    torch.manual_seed(0)
    return Decoder().eval(), (torch.randn(1, 4),)
"""


@pytest.mark.slow
def test_a_target_that_changes_with_every_step_is_counted_alike_by_lock_and_check(tmp_path):
    (tmp_path / "decoder.py").write_text(GROWING)
    target, file = f"{tmp_path / 'decoder.py'}:make", str(tmp_path / "compile.lock.json")

    def command(*arguments):
        return CliRunner().invoke(app, [*arguments, "--device", "cpu", "--infer"])

    locked = command("lock", target, "--file", file)
    assert locked.exit_code == 0, locked.output
    assert "8 graphs, 1 graph break, 8 recompilations" in locked.output
    checked = command("check", target, "--max-breaks", "1", "--max-recompiles", "8", "--lock", file)
    assert checked.exit_code == 0, checked.output
