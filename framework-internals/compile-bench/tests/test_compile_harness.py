"""The harness and the command line: fresh processes, their failures, and one real compilation."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchkit import Comparison, Quantity, Timing, UserError, numbers
from benchkit.processes import budget
from compile_bench import Case, ChildFailure, Harness, judge
from compile_bench.capture.frames import Frame
from compile_bench.capture.text import break_lines, recompile_lines
from compile_bench.capture.trace import Break, CompileTrace, Recompile
from compile_bench.check.budget import too_slow
from compile_bench.cli import app
from compile_bench.cli.measuring import describe_bench
from compile_bench.measure import steps as measuring
from compile_bench.measure.records import Accuracy, Bench, ErrorPair, FirstSteps, Memory, Steady, StepProfile, Triage
from compile_bench.measure.steps import load_case, sample, self_comparison

from .printed import printed_text

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

def fails():
    return torch.nn.Linear(16, 16), (torch.randn(4, 5),)

class Slow(torch.nn.Module):
    def forward(self, x):
        if torch.compiler.is_compiling():
            while True:  # Dynamo unrolls it for ever
                x = x + 1
        return x

def hangs():
    return Slow(), (torch.ones(3),)

def sees_no_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    return torch.nn.Linear(3, 3), (torch.ones(2, 3),)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "targets.py"
    path.write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return path


def command(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_a_check_that_nobody_waited_for_ends_with_the_harness():
    with Harness.open("cpu") as harness:
        harness.begin_toolchain_check()
    assert "toolchain" not in [thread.name for thread in threading.enumerate()]


def test_inductor_is_told_to_trust_the_cpu_unless_the_user_has_told_it_anything(monkeypatch):
    jobs = []
    monkeypatch.setattr(Harness, "run", lambda self, job, **options: jobs.append(job))
    monkeypatch.delenv("TORCHINDUCTOR_VEC_ISA_OK", raising=False)
    for trust_cpu in (True, False):
        with Harness.open("cpu", trust_cpu=trust_cpu) as harness:
            harness.eager(Case("mlp"))
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
    with Harness.open("cpu", trust_cpu=True) as harness:
        harness.eager(Case("mlp"))
    assert [job.environment.get("TORCHINDUCTOR_VEC_ISA_OK") for job in jobs] == ["1", None, None]


def test_a_job_for_the_cpu_sees_no_gpu(file, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with Harness.open("cpu") as harness:
        assert harness.eager(Case(f"{file}:sees_no_gpu")).total > 0


def test_a_hanging_process_is_ended_with_its_children(tmp_path, monkeypatch):
    child = tmp_path / "child"
    # Its time is over when it hangs, and no time passes before, however slow the machine is.
    clock = SimpleNamespace(monotonic=lambda: 1e6 * child.exists(), sleep=time.sleep)
    monkeypatch.setattr("benchkit.processes.fork_server.time", clock)
    (tmp_path / "hanging.py").write_text(
        "import pathlib, subprocess, time\n"
        "def target():\n"
        "    process = subprocess.Popen(['sleep', '600'])\n"
        "    path = pathlib.Path(__file__).with_name('child')\n"
        "    path.with_suffix('.new').write_text(str(process.pid))\n"
        "    path.with_suffix('.new').rename(path)\n"
        "    time.sleep(600)\n"
    )
    with Harness.open("cpu", limit=3.0) as harness, pytest.raises(ChildFailure, match=r"time limit of 3 s"):
        harness.eager(Case(f"{tmp_path / 'hanging.py'}:target"))
    pid = int(child.read_text())
    while _alive(pid):  # one that nobody ends meets the time limit of the test
        time.sleep(0.02)


def _alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_crash_is_a_failure_and_the_folder_is_gone(file):
    with Harness.open("cpu") as harness:
        folder = harness.folder
        with pytest.raises(ChildFailure, match=f"status -{signal.SIGSEGV.value}"):
            harness.triage(Case(f"{file}:crashes"))
    assert not folder.exists()


@pytest.mark.slow
def test_triage_lists_the_planted_trouble_and_nothing_else(tmp_path):
    result = command("triage", "planted", "--device", "cpu", "--patches", str(tmp_path))
    assert result.exit_code == 0, result.output
    lines = (PACKAGE / "src/compile_bench/targets/zoo.py").read_text().splitlines()
    for comment in ("a branch on a tensor's value", "a tensor's value read by Python", "a side effect in the middle"):
        number = next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))
        assert f"zoo.py:{number} |" in result.output
    assert "3 breaks" in result.output
    assert "self.started is no longer False" in result.output
    assert "has size 7 in dimension 0, compiled for 32" in result.output
    assert (tmp_path / "all.patch").exists()


def test_check_names_what_is_over_budget(monkeypatch):
    trouble = Break("model.py", 12, "forward", "if x > 0:", "Data-dependent branching", "", (), "branch", False)
    again = Recompile("model.py", 10, "self.calls == 0", compile_id="0/1", function="forward")
    found = Triage(Case("x"), CompileTrace(breaks=(trouble,), recompiles=(again, again)), 2)
    monkeypatch.setattr(Harness, "triage", lambda self, case: found)
    result = command("check", "x", "--device", "cpu")
    assert result.exit_code == 1
    assert "1 graph breaks, 0 allowed" not in result.output
    assert "1 graph break, 0 allowed" in result.output
    assert "model.py:12: Data-dependent branching" in result.output
    assert "2 recompilations, 1 allowed" in result.output
    assert "model.py:10: self.calls is no longer 0 (2 times)" in result.output
    assert command("check", "x", "--max-breaks", "1", "--max-recompiles", "2", "--device", "cpu").exit_code == 0
    assert command("check", "x", "--max-breaks", "-1", "--device", "cpu").exit_code == 2  # no budget, a slip
    cannot = replace(found, trace=CompileTrace(), failures=("RuntimeError: no double backward",))
    monkeypatch.setattr(Harness, "triage", lambda self, case: cannot)
    result = command("check", "x", "--device", "cpu")
    assert result.exit_code == 1
    assert "raises when it is compiled, and not by itself: RuntimeError: no double backward" in result.output


def test_check_groups_by_cause_and_names_the_librarys_line():
    """One line for a cause, with the user's lines and those of the library that they call."""
    site = "/home/me/venv/lib/python3.11/site-packages"
    called = Break("m.py", 9, "step", "opt.step()", "skipped", "", (), "", False)
    called = replace(called, stack=(Frame("m.py", 9, "step"), Frame(f"{site}/accelerate/optimizer.py", 186, "step")))
    inner = replace(called, stack=(*called.stack[:1], Frame("/usr/lib/python3.11/inspect.py", 241, "isfunction")))
    branches = [Break("m.py", line, "forward", "", "Data-dependent branching", "", (), "", False) for line in range(8)]
    assert break_lines((called, inner, *branches), Path.cwd()) == [
        "m.py:9 (in accelerate/optimizer.py:186, python3.11/inspect.py:241): skipped",
        "Data-dependent branching, 8 lines: m.py:0, m.py:1, m.py:2, m.py:3, m.py:4 and 3 more",
    ]
    again = Recompile(
        f"{site}/kornia/core.py",
        83,
        "___check_type_id(x, 94526924036560)",
        "",
        "m.py:4",
        compile_id="0/1",
        function="f",
    )
    same = replace(again, guard="___check_type_id(x, 94526926109440)")
    other = Recompile("m.py", 6, "self.calls == 1", compile_id="1/1", function="g")
    kinds = [replace(other, line=line, guard="___check_obj_id(self.act, 94526924036560)") for line in (7, 8)]
    assert recompile_lines((again, same, other, *kinds), Path.cwd()) == [
        "m.py:4 (in kornia/core.py:83): x is of another type (2 times)",
        "m.py:6: self.calls is no longer 1",
        "self.act is another object, 2 lines: m.py:7, m.py:8",
    ]


def test_what_cannot_be_is_refused_before_anything_runs(tmp_path, monkeypatch):
    def opened(*_, **__):
        raise AssertionError("a harness for nothing")

    monkeypatch.setattr(Harness, "open", opened)
    (tmp_path / "file").write_text("in the way")
    locked = command("lock", "mlp", "--file", str(tmp_path / "file" / "lock.json"), "--device", "cpu")
    assert locked.exit_code == 2
    assert "lock.json cannot be written: File exists; name another folder" in locked.output
    shaped = command("shapes", "mlp", "--schedule", "growing", "--device", "cpu")
    assert shaped.exit_code == 2
    assert "--schedule takes last-batch, batch-1, growing-sequence, got 'growing'" in shaped.output


def test_a_target_at_fault_says_so_before_the_compiler_is_prepared(file, monkeypatch):
    def prepared(_):
        raise AssertionError("the compiler was prepared for nothing")

    monkeypatch.setattr(Harness, "toolchain_seconds", prepared)
    monkeypatch.setattr("compile_bench.measure.harness.missing_inductor", lambda device: None)
    result = command("run", f"{file}:raises", "--device", "cpu")
    assert result.exit_code == 2
    assert result.output.endswith("targets.py:raises raised ValueError: three words here\n")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--device", "gpu", ""),
        ("--mode", "fast", "--mode takes default"),
        ("--scope", "half", "--scope takes whole, blocks, nested, got 'half'"),
    ],
)
def test_an_option_without_such_a_value_is_one_line_and_status_2(option, value, message):
    result = command("run", "mlp", option, value)
    assert result.exit_code == 2
    assert message in result.output


def made_up(low, high, **more):
    step = Quantity(0.1, "s", 0.1, 0.1, 9)
    speedup = Quantity((low + high) / 2, "×", low, high, 9, "bootstrap 95%")
    steady = Steady(step, step, speedup, "wall-clock", 0.0, Quantity(1.0, "×", 0.99, 1.01, 9))
    first = FirstSteps((1.0, 0.1, 0.1))
    accuracy = Accuracy(ErrorPair("output", 1e-7, 1e-7, 4e-7), None, 1)
    return replace(
        Bench.of_case(Case("x"), CompileTrace(), eager=first, cold=first, steady=steady, accuracy=accuracy), **more
    )


def test_a_speedup_is_too_small_when_its_whole_interval_is():
    assert too_slow(made_up(0.9, 1.2), 1.05) == []
    (line,) = too_slow(made_up(0.9, 1.0), 1.05)
    assert "at least 1.05×" in line


@pytest.mark.slow
def test_a_step_is_compared_with_itself():
    found = self_comparison(Case("mlp", train=False), runs=2, seconds=0.02)
    assert len(found) == 2
    for steady in found:
        assert steady.speedup.low <= steady.speedup.value <= steady.speedup.high
        assert steady.control.samples == steady.speedup.samples >= 8


@pytest.fixture(scope="module")
def toolchain(tmp_path_factory):
    """A harness whose toolchain has been asked once: ten seconds and more on a CPU."""
    with Harness.open("cpu") as harness:
        assert harness.toolchain_seconds() > 0
        yield harness


@pytest.mark.slow
def test_what_autotuning_gives_is_sampled_in_the_same_rounds(toolchain, file):
    bench = toolchain.bench(Case(f"{file}:small", mode="max-autotune"), steady_seconds=0.1, warm=False)
    other = bench.steady.untuned
    assert other.mode == "default"
    assert other.step.samples == other.speedup.samples == bench.steady.speedup.samples
    assert len(bench.trace.graphs) == 1  # the second compilation is not the mode's own
    text = printed_text(describe_bench, bench)
    assert f"| step, default | {numbers.quantity(other.step)} |" in text
    assert f"| autotuning | a step {numbers.quantity(other.speedup)} as fast as in default" in text


def test_a_comparison_that_was_not_made_says_why():
    tuned = replace(made_up(1.9, 2.1), mode="max-autotune")
    assert "| autotuning | not compared with default: a third model does not fit in the memory |" in printed_text(
        describe_bench, tuned
    )
    nested = replace(tuned, scope="nested")
    assert "| autotuning | not compared with default: blocks are marked once |" in printed_text(describe_bench, nested)
    assert "autotuning" not in printed_text(describe_bench, made_up(1.9, 2.1))


def test_without_room_for_a_third_model_the_rest_is_measured(monkeypatch):
    def full(model, case):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(measuring, "compile_case", full)
    target = load_case(Case("mlp"))
    assert measuring._untuned(target, Case("mlp", mode="max-autotune")) is None


@pytest.mark.slow
def test_a_small_model_is_measured_to_the_end(toolchain, file):
    bench = toolchain.bench(Case(f"{file}:small"), steady_seconds=0.5, artifacts=True)
    assert len(bench.trace.graphs) == 1
    assert bench.trace.breaks == ()
    assert bench.trace.kernels > 0
    assert bench.trace.cache_events["fx_graph_cache_miss"] > 0
    for other in (bench.warm, bench.artifact):
        assert other.cache_events["fx_graph_cache_hit"] > 0
        assert not other.cache_events.get("fx_graph_cache_miss")
    assert bench.artifact_bytes > 1_000
    assert 0 < bench.artifact.artifact_seconds < bench.artifact.total
    assert sum(bench.trace.phases.values()) <= sum(bench.cold.steps)
    assert bench.accuracy.holds
    assert bench.accuracy.tensors == 4  # the loss, the output and two gradients
    # The output, the gelu's input and three gradients of float32 are alive at once, and not a hundred times as much.
    assert 4 * (16 * 16 + 16) < bench.memory.compiled < 100_000
    assert bench.eager_profile.covered == 0
    assert 0 < bench.compiled_profile.covered <= 1
    assert bench.compiled_profile.operators < bench.eager_profile.operators
    assert bench.no_cudagraphs == ()
    assert bench.steady.control.samples == bench.steady.speedup.samples
    assert judge(bench).advice in ("compile", "don't", "inconclusive")
    assert judge(bench).artifact is not None
    assert not [path for path in toolchain.folder.iterdir() if "request" in path.name]


def test_a_mode_that_autotunes_is_compared_with_the_same_without():
    mlp = Case("mlp", "cpu", mode="max-autotune")
    assert mlp.untuned == Case("mlp", "cpu")
    assert replace(mlp, device="cuda").untuned == Case("mlp", "cuda", mode="reduce-overhead")
    assert replace(mlp, device="cuda", mode="max-autotune-no-cudagraphs").untuned == Case("mlp", "cuda")
    assert replace(mlp, mode="reduce-overhead").untuned is None


def test_steps_that_are_compiled_when_the_time_is_over_are_timed():
    with budget.within(0.0):
        found = sample(lambda: None, lambda: None, Case("mlp"), 0.01)
    assert found.compiled.value > 0


def test_steps_without_autotuning_are_sampled_in_the_same_rounds(monkeypatch):
    seconds = {"eager": 2e-3, "compiled": 1e-3, "control": 2e-3, "untuned": 4e-3}

    def compared(steps, **_):
        return Comparison({name: Timing((seconds[name],) * 10, 1, "wall-clock", 0.0) for name in steps})

    monkeypatch.setattr(measuring, "compare", compared)
    case, nothing = Case("mlp", mode="max-autotune"), (lambda: None)
    found = sample(nothing, nothing, case, 0.05, untuned=nothing)
    assert found.untuned.mode == "default"
    assert found.untuned.speedup.value == pytest.approx(4.0)
    assert found.untuned.step.value == 4e-3
    assert sample(nothing, nothing, case, 0.01).untuned is None


def test_the_zoo_goes_on_after_a_target_that_fails(monkeypatch):
    def bench(self, case, **options):
        if case.target == "gpt":
            raise ChildFailure("gpt (compiled, default) was ended after its time limit of 5 s")
        return made_up(1.9, 2.1)

    monkeypatch.setattr(Harness, "bench", bench)
    result = command("zoo", "gpt", "mlp", "--device", "cpu")
    assert result.exit_code == 3
    assert "gpt (compiled, default) was ended after its time limit of 5 s" in result.output
    assert "| x | compile | 2.00× (1.90–2.10) |" in result.output


def test_the_zoo_is_listed():
    result = command("zoo")
    assert result.exit_code == 0
    assert "| wav2vec2 |" in result.output


def test_a_step_that_fails_without_compiling_is_the_users(file):
    with (
        Harness.open("cpu") as harness,
        pytest.raises(UserError, match="raises by itself, uncompiled, in training: RuntimeError"),
    ):
        harness.eager(Case(f"{file}:fails"))


def test_a_compilation_that_hangs_is_ended_and_the_rest_goes_on(file):
    with Harness.open("cpu", limit=1.0) as harness:
        with pytest.raises(ChildFailure, match=r"hangs \(triage, default\) was ended after its time limit of 1 s"):
            harness.triage(Case(f"{file}:hangs", train=False))
        harness.limit = 120.0
        assert harness.eager(Case(f"{file}:small")).total > 0


def test_a_stopped_harness_ends_its_processes_and_begins_no_other(file):
    with Harness.open("cpu") as harness, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(harness.triage, Case(f"{file}:hangs", train=False))
        while not harness.groups():
            time.sleep(0.05)
        harness.stop()
        with pytest.raises(ChildFailure, match="was ended: measuring was stopped"):
            waiting.result()
        with pytest.raises(ChildFailure, match="measuring was stopped"):
            harness.eager(Case(f"{file}:small"))


def test_a_bench_is_described_with_its_plan():
    profile = StepProfile(0.9, 4, 7, 2, 1e-5)
    first = FirstSteps((1.0, 0.1, 0.1))
    bench = made_up(
        1.9,
        2.1,
        warm=first,
        artifact=first,
        memory=Memory(2048, 1024, 512),
        eager_profile=profile,
        compiled_profile=profile,
        no_cudagraphs=("no",),
    )
    text = printed_text(describe_bench, bench)
    assert "| GPU kernels a step | eager 7, compiled 7 |" in text
    assert "| CUDA graphs skipped | no |" in text
    assert "| peak memory | eager 2.00 KiB, compiled 1.00 KiB, 512 B of it kept by captured graphs |" in text
    assert "| eager against itself | 1.00× (0.990–1.01) |" in text
    assert "| 10 | the caches of the first | compile, " in text


def test_a_missing_compiler_is_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with (
        Harness.open("cpu") as harness,
        pytest.raises(UserError, match=r"no C\+\+ compiler 'no-such-compiler' on PATH \(install one"),
    ):
        harness.toolchain_seconds()
