"""What ``check`` limits: recompilations per guard, own code apart from packages, memory, CUDA graphs; its summary."""

from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from typer.testing import CliRunner

from benchkit import UserError
from compile_bench import Case, Harness
from compile_bench.capture.collector import CudaGraphSkips
from compile_bench.capture.frames import UserCodeFilter
from compile_bench.capture.trace import Break, CompileTrace, Graph, Recompile
from compile_bench.check import jobs
from compile_bench.check.budget import Budget, GraphRun, MemoryRounds, without_cuda_graphs
from compile_bench.check.cache_keys import CacheKey, KeyPart
from compile_bench.check.jobs import graph_runs, peaks_in_alternation
from compile_bench.cli import app
from compile_bench.measure.profiling import launches_by_graph
from compile_bench.measure.records import Memory, Triage
from compile_bench.measure.survey import survey

from .test_compile_profiling import event

SITE = "/venv/lib/python3.11/site-packages"


def broken(line, package="", reason="Data-dependent branching"):
    return Break("m.py", line, "forward", "", reason, "", (), "", False, package=package)


def failed(number, guard, line=3, package=""):
    return Recompile("m.py", line, guard, package=package, compile_id=f"0/{number}", function="f")


def command(*arguments):
    return CliRunner().invoke(app, [*arguments, "--device", "cpu"])


def test_a_guard_over_its_limit_is_named_with_its_line_and_count():
    sizes = [
        failed(number, f"tensor 'x' size mismatch at index 0. expected {number}, actual 9") for number in (1, 2, 3)
    ]
    trace = CompileTrace(recompiles=(*sizes, failed(4, "len(self.seen) == 1", line=8)))
    (line,) = Budget(recompiles_per_guard=2).exceeded(trace, Path())
    changed = "m.py:3: x has size 9 in dimension 0, compiled for 1"
    assert line == f"{changed}: 3 recompilations, 2 allowed for one guard"
    assert Budget(recompiles_per_guard=3).exceeded(trace, Path()) == []
    first, *details = Budget(recompiles=3).exceeded(trace, Path())
    assert first == "4 recompilations, 3 allowed"
    assert details[0] == "  m.py:3: x has size 9 in dimension 0, compiled for 1 (3 times)"
    assert trace.most_of_one_guard == 3
    assert CompileTrace().most_of_one_guard == 0


def test_own_code_and_packages_are_counted_apart():
    trace = CompileTrace(
        breaks=(broken(1), broken(2, "accelerate", "skipped"), broken(3, "accelerate", "skipped"), broken(4, "pyro")),
        recompiles=(failed(1, "self.calls == 0"), failed(2, "len(x) == 1", package="kornia")),
    )
    line, *_ = Budget(breaks=3).exceeded(trace, Path())
    assert line == "4 graph breaks, 3 allowed: 1 in your own code, 2 in accelerate, 1 in pyro"
    assert Budget(breaks=1, recompiles=1, own_only=True).exceeded(trace, Path()) == []
    line, detail = Budget(breaks=0, own_only=True).exceeded(trace, Path())
    assert line == "1 graph break, 0 allowed (2 in accelerate, 1 in pyro, not counted)"
    assert detail == "  m.py:1: Data-dependent branching"
    line, _, _ = Budget(recompiles=1).exceeded(trace, Path())
    assert line == "2 recompilations, 1 allowed: 1 in your own code, 1 in kornia"


def test_a_line_that_breaks_for_two_reasons_is_one_break():
    first, other = broken(9), broken(9, reason="another")
    assert Budget(breaks=1).exceeded(CompileTrace(breaks=(first, other)), Path()) == []
    lines = Budget(breaks=1).exceeded(CompileTrace(breaks=(first, other, broken(10))), Path())
    assert lines[0] == "3 graph breaks in 2 lines, 1 allowed"


def test_a_file_belongs_to_its_package_to_pythons_library_or_to_nobody():
    stdlib = "/usr/lib/python3.11"
    files = UserCodeFilter(torch=f"{SITE}/torch", library=[SITE, stdlib, f"{stdlib}/site-packages"])
    packages = {
        f"{SITE}/accelerate/optimizer.py": "accelerate",
        f"{SITE}/six.py": "six",
        f"{SITE}/torch/nn/modules/module.py": "torch",
        f"{SITE}/torch/_dynamo/external_utils.py": "",
        f"{stdlib}/contextlib.py": "contextlib",
        f"{stdlib}/site-packages/einops/layers.py": "einops",
        "/home/me/model.py": "",
        "<eval_with_key>.3": "",
    }
    assert {file: files.package(file) for file in packages} == packages


def test_a_break_inside_a_package_is_the_packages_and_one_in_the_model_is_the_models(tmp_path, monkeypatch):
    (tmp_path / "site" / "noisy-1.dist-info").mkdir(parents=True)  # so pip would leave it
    (tmp_path / "site" / "noisy.py").write_text("def noisy(x):\n    print('a')\n    return x + 1\n")
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from noisy import noisy\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        x = noisy(x)\n"
        "        print('b')\n"
        "        return x.sin()\n"
        "def target():\n"
        "    return Model(), (torch.ones(2),)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = survey(Case(f"{tmp_path / 'mine.py'}:target", train=False), seeds=(0,), behind=False)
    assert {(Path(each.file).name, each.line, each.package) for each in found.breaks} == {
        ("mine.py", 5, "noisy"),
        ("mine.py", 6, ""),
    }


def known(buffers):
    """A step that holds this many buffers of a million floats at once."""
    return lambda: [torch.ones(1_000_000) for _ in range(buffers)] and None


def test_the_memory_ratio_is_that_of_known_allocations():
    found = peaks_in_alternation(Case("x"), lambda: known(4), lambda: known(1))
    assert len(found.rounds) == jobs.ROUNDS
    assert found.eager == pytest.approx(16_000_000, rel=0.01)
    assert found.compiled == pytest.approx(4_000_000, rel=0.01)
    assert found.ratio == pytest.approx(0.25, rel=0.02)


def test_a_step_that_allocates_nothing_has_a_ratio_too():
    assert MemoryRounds((Memory(0, 0),)).ratio == 1.0
    assert MemoryRounds((Memory(0, 8),)).ratio == float("inf")
    assert MemoryRounds((Memory(8, 4), Memory(8, 8), Memory(8, 16))).ratio == 1.0


@pytest.mark.slow
def test_two_fused_operators_need_half_of_the_memory(tmp_path):
    """Eager holds sin(x) while it computes cos of it; the compiled loop holds the result alone."""
    path = tmp_path / "chain.py"
    path.write_text("import torch\ndef target():\n    return (lambda x: x.sin().cos()), (torch.ones(1_000_000),)\n")
    with Harness.open("cpu") as harness:
        found = harness.ask(jobs.memory, Case(f"{path}:target", train=False))
    assert found.eager == pytest.approx(8_000_000, rel=0.01)
    assert found.compiled == pytest.approx(4_000_000, rel=0.01)
    assert found.ratio == pytest.approx(0.5, rel=0.02)


@pytest.fixture
def clean(monkeypatch):
    """A harness that finds nothing to object to, and one answer of its measuring processes for each job."""
    answers = {}
    monkeypatch.setattr(Harness, "triage", lambda self, case: Triage(case, CompileTrace(), 2))
    monkeypatch.setattr(Harness, "toolchain_seconds", lambda self: 1.0)
    monkeypatch.setattr(Harness, "ask", lambda self, job, case: answers[job.__name__])
    return answers


def test_more_memory_than_allowed_is_over_budget(clean):
    clean["memory"] = MemoryRounds((Memory(2**21, 3 * 2**20),) * 3)
    result = command("check", "m", "--max-memory-ratio", "1.2")
    assert result.exit_code == 1
    assert "1.50× (1.50–1.50 in 3 rounds), at most 1.20× allowed" in result.output
    result = command("check", "m", "--max-memory-ratio", "1.5")
    assert result.exit_code == 0
    assert result.output.startswith(
        "m: within budget: 0 graph breaks, 0 recompilations, peak memory compiled 3.00 MiB, eager 2.00"
    )


@pytest.mark.parametrize("option", ["--max-memory-ratio", "--min-speedup"])
def test_a_limit_that_nothing_can_break_is_refused(clean, option):
    result = command("check", "m", option, "nan")
    assert result.exit_code == 2
    assert option in result.output


def test_cuda_graphs_cannot_be_required_where_there_are_none():
    result = command("check", "m", "--require-cuda-graphs", "--mode", "reduce-overhead")
    assert result.exit_code == 2
    assert "expected device cuda, got cpu, where there are none; run it on a machine with a GPU" in result.output


def test_cuda_graphs_cannot_be_required_of_a_mode_without(clean, monkeypatch):
    monkeypatch.setattr("compile_bench.cli.options.resolve_device", lambda name: "cuda")
    result = command("check", "m", "--require-cuda-graphs")
    assert result.exit_code == 2
    assert "expected a mode that asks for CUDA graphs, got default; add --mode reduce-overhead" in result.output
    forward, backward = GraphRun("0/0", "f", False, 1.0, 2.0), GraphRun("0/0", "f", True, 0.0, 9.0, ("cpu device",))
    clean["cuda_graphs"] = (forward, backward)
    result = command("check", "m", "--require-cuda-graphs", "--mode", "reduce-overhead")
    assert result.exit_code == 1
    assert "1 of 2 compiled graphs not wholly under CUDA graphs, 0 allowed" in result.output
    assert "0/0 backward of f: not at all: cpu device" in result.output
    clean["cuda_graphs"] = (forward,)
    result = command("check", "m", "--require-cuda-graphs", "--mode", "reduce-overhead")
    assert result.exit_code == 0
    assert "1 of 1 compiled graph under CUDA graphs" in result.output


def test_launches_belong_to_the_graph_that_makes_them():
    def call(key, start, end):
        return event(f"## Call CompiledFxGraph {key} ##", start, end)

    events = [
        call("fa", 0, 10),
        event("cudaGraphLaunch", 2, 3),
        event("cudaLaunchKernel", 1, 2),  # copies an argument
        call("fb", 20, 30),
        event("cuLaunchKernel", 22, 23),
        event("cudaGraphLaunch", 40, 41),  # of no graph
        event("## Call CompiledFxGraph fa ##", 0, 30, device_type=DeviceType.CUDA),
        call("fa", 50, 60),
        event("cudaGraphLaunch", 52, 53),
    ]
    assert launches_by_graph(events, steps=2) == {"fa": (1.0, 0.5), "fb": (0.0, 0.5)}


def test_a_graph_without_a_replay_has_the_reasons_of_its_compilation():
    backward = KeyPart("fx_kwargs[is_backward]", "h", "True")
    keys = [
        CacheKey("aotautograd", "0/0", "miss", "ga"),
        CacheKey("fx_graph", "0/0", "miss", "fa"),
        CacheKey("fx_graph", "0/0", "miss", "fb", (backward,)),
        CacheKey("fx_graph", "1/0", "miss", "fc"),
    ]
    graphs = [Graph("0/0", "f", 1, 1, None), Graph("1/0", "g", 1, 1, None)]
    launches = {"fa": (1.0, 2.0), "fb": (1.0, 0.0), "fc": (0.0, 3.0)}
    reasons = [("cpu device (m.py:4)", {"1/0"}), ("mutated inputs", {""})]
    runs = graph_runs(launches, keys, graphs, reasons)
    assert [(run.name, run.whole) for run in runs] == [
        ("0/0 forward of f", True),
        ("0/0 backward of f", True),
        ("1/0 forward of g", False),
    ]
    assert runs[2].reasons == ("cpu device (m.py:4)", "mutated inputs")
    # A reason at run time that no graph without a replay explains concerns all: the graph runs in both ways in turn.
    runs = graph_runs({"fa": (1.0, 2.0)}, keys, graphs, reasons)
    assert runs[0].reasons == ("mutated inputs",)
    assert without_cuda_graphs(runs)[1] == "  0/0 forward of f: in part (1 replayed a step): mutated inputs"
    (unknown,) = graph_runs({"None": (0.0, 1.0)}, keys, graphs, [])
    assert "a graph forward of ?: not at all: PyTorch gives no reason" in without_cuda_graphs([unknown])[1]
    assert without_cuda_graphs([]) == ["no compiled graph ran, so none ran under CUDA graphs"]


def test_a_reason_that_two_compilations_give_is_kept_once_with_both(monkeypatch):
    ids = iter(("0/0", "1/0", ""))
    monkeypatch.setattr("compile_bench.capture.collector.compile_id", lambda: next(ids))
    with CudaGraphSkips() as skips:
        for _ in range(3):
            skips.handle(message("skipping cudagraphs due to cpu device (arg0)"))
    assert skips.reasons == ["cpu device (arg0)"]
    assert skips.compile_ids == [{"0/0", "1/0", ""}]


def message(text):
    import logging

    return logging.LogRecord("torch", logging.WARNING, __file__, 1, text, (), None)


def test_what_raises_when_it_is_compiled_is_over_budget_and_not_measured(tmp_path, monkeypatch):
    traced = Triage(Case("bad"), CompileTrace(), 1, failures=("ValueError: no",))
    monkeypatch.setattr(Harness, "triage", lambda self, case: traced)
    monkeypatch.setattr(Harness, "ask", None)
    result = command("check", "bad", "--max-memory-ratio", "2")
    assert (result.exit_code, "bad: raises when it is compiled" in result.output) == (1, True)
    for refused in ("lock", "cache-key"):
        result = command(refused, "bad", "--file", str(tmp_path / "file.json"))
        assert result.exit_code == 2
        assert "bad raises when it is compiled, and not by itself: ValueError: no" in result.output
        assert not list(tmp_path.iterdir())


def test_several_targets_are_checked_and_one_that_fails_stops_no_other(tmp_path, clean, monkeypatch):
    def triage(self, case):
        if case.target == "lost":
            raise UserError("no target 'lost'")
        return Triage(case, CompileTrace(breaks=(broken(7),) if case.target == "bad" else ()), 2)

    monkeypatch.setattr(Harness, "triage", triage)
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    result = command("check", "good", "bad", "lost", "good", "--summary", str(summary))
    assert result.exit_code == 2
    assert result.output.count("good: within budget") == 2
    assert "bad: 1 graph break, 0 allowed" in result.output
    assert "compile-bench: no target 'lost'" in result.output
    text = summary.read_text()
    assert text.startswith("before\n### compile-bench check\n")
    assert "| `good` | within budget | 0 graph breaks, 0 recompilations |" in text
    assert "| `bad` | over budget | 1 graph break, 0 recompilations |" in text
    assert "| `lost` | not checked |" in text
    assert "    1 graph break, 0 allowed\n      m.py:7: Data-dependent branching" in text
