"""On a CUDA GPU: the training step stays in one graph, its results hold, and CUDA graphs are used."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchkit.results import load
from benchkit.run import sweep_and_write
from compile_bench import Case, Harness, judge
from compile_bench.check import jobs
from compile_bench.check.budget import without_cuda_graphs
from compile_bench.cli import app
from compile_bench.lens import SWEEP_GROUPS, build_lens
from compile_bench.measure.records import FailedCell
from compile_bench.report.queries import measured_cases
from compile_bench.targets.case import MODES
from compile_bench.targets.hugging_face import ARCHITECTURES
from compile_bench.targets.loading import load_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]


@pytest.fixture(scope="module")
def harness():
    with Harness.open("cuda", limit=300.0) as opened:
        yield opened


@pytest.fixture(scope="module")
def trained(harness):
    return harness.bench(Case("gpt-one-layer", "cuda"), steady_seconds=1.0)


def test_the_training_step_is_one_graph_without_breaks(trained):
    assert len(trained.trace.graphs) == 1
    assert trained.trace.breaks == ()
    assert trained.trace.recompiles == ()
    assert trained.trace.kernels > 0
    assert trained.trace.phases["C++/Triton compiler"] > 0


def test_outputs_and_gradients_are_within_the_bound(trained):
    assert trained.accuracy.skipped == ""
    assert trained.accuracy.tensors > 5
    assert trained.accuracy.holds, trained.accuracy


def test_the_second_process_finds_the_caches(trained):
    assert trained.warm.cache_events["fx_graph_cache_hit"] > 0


def test_memory_and_verdict_are_there(trained):
    weights = sum(p.numel() * p.element_size() for p in load_target("gpt-one-layer", "cpu").model.parameters())
    assert trained.memory.eager > weights
    assert trained.memory.compiled > weights
    assert judge(trained).advice in ("compile", "don't", "inconclusive")


def test_a_compiled_step_runs_fewer_kernels_and_covers_its_forward_and_backward(trained):
    eager, compiled = trained.eager_profile, trained.compiled_profile
    assert 0 < compiled.kernels < eager.kernels
    assert 0 < compiled.launches <= eager.launches
    assert compiled.busy_seconds > 0
    assert compiled.costliest[0].seconds >= compiled.costliest[-1].seconds > 0
    assert eager.covered == 0
    assert 0.3 < compiled.covered <= 1  # clipping and the optimizer stay outside
    assert eager.fused_attention >= 2  # forward and backward
    assert compiled.fused_attention >= 2


def test_artifacts_spare_the_next_machine_the_compiling(harness):
    bench = harness.bench(Case("mlp", "cuda", train=False), steady_seconds=0.5, warm=False, artifacts=True)
    assert bench.artifact_bytes > 1_000
    assert bench.artifact.cache_events["fx_graph_cache_hit"] > 0
    assert sum(bench.artifact.phases.values()) < sum(bench.cold.phases.values())


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    """A target that computes a part of its result on the CPU, in line 4."""
    path = tmp_path_factory.mktemp("targets") / "on_the_cpu.py"
    path.write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * x.cpu().sin().to(x.device)\n"  # a constant would be moved to the GPU
        "def target():\n"
        "    return Model(), (torch.ones(8, 3),)\n"
    )
    return Case(f"{path}:target", "cuda", train=False, mode="reduce-overhead")


def test_a_lost_cuda_graph_has_a_reason(harness, on_the_cpu):
    case = on_the_cpu
    bench = harness.bench(case, steady_seconds=0.2, warm=False)
    # Torch 2.10 speaks of "non gpu ops", 2.11 of "cpu ops" and "DeviceCopy ops", 2.15 of "cross-device ops".
    assert any(re.search("cpu|non gpu|Copy|cross-device", reason) for reason in bench.no_cudagraphs), (
        bench.no_cudagraphs
    )


@pytest.mark.parametrize("name", [name for group in SWEEP_GROUPS for name in group])
def test_the_zoo_makes_a_step_at_real_width(name):
    if name in ARCHITECTURES:
        pytest.importorskip("transformers")
    target = load_target(name, "cuda")
    model = target.copied().train()
    assert torch.isfinite(target.step(model, train=True)())


def test_blocks_and_nested_regions_keep_the_results(harness):
    for scope in ("blocks", "nested"):
        case = Case("vit", "cuda", train=False, scope=scope)
        bench = harness.bench(case, steady_seconds=0.2, warm=False)
        assert bench.accuracy.holds, (scope, bench.accuracy)


def test_cuda_graphs_keep_the_results(harness, trained):
    bench = harness.bench(Case("gpt-one-layer", "cuda", mode="reduce-overhead"), steady_seconds=1.0, warm=False)
    assert bench.trace.breaks == ()
    assert bench.no_cudagraphs == ()
    assert bench.compiled_profile.launches < 0.5 * bench.eager_profile.launches
    assert bench.compiled_profile.fused_attention >= 2  # in a replay, which calls no operators
    assert bench.accuracy.holds, bench.accuracy
    assert trained.memory.captured == 0
    assert bench.memory.captured > 0  # what lives between kernels has to be somewhere


def test_each_compiled_graph_is_seen_under_cuda_graphs(harness):
    """Forward and backward of a training step: both are replayed, and both are named."""
    case = Case("gpt-one-layer", "cuda", mode="reduce-overhead")
    runs = harness.ask(jobs.cuda_graphs, case)
    assert [(run.compile_id, run.backward, run.whole) for run in runs] == [
        ("0/0", False, True),
        ("0/0", True, True),
    ], runs
    assert without_cuda_graphs(runs) == []
    assert harness.ask(jobs.kernels, case)[1] == 2
    plain = harness.ask(jobs.cuda_graphs, replace(case, mode="default"))
    assert [run.replays for run in plain] == [0.0, 0.0]
    assert all(run.launches > 0 for run in plain)


def test_a_part_without_a_cuda_graph_fails_the_check_with_its_line(on_the_cpu):
    options = ["--infer", "--device", "cuda", "--mode", "reduce-overhead", "--require-cuda-graphs"]
    result = CliRunner().invoke(app, ["check", on_the_cpu.target, *options])
    assert result.exit_code == 1, result.output
    assert "1 of 1 compiled graph not wholly under CUDA graphs, 0 allowed" in result.output
    assert "on_the_cpu.py:4)" in result.output
    result = CliRunner().invoke(app, ["check", "mlp", *options])
    assert result.exit_code == 0, result.output
    assert "1 of 1 compiled graph under CUDA graphs" in result.output


def test_the_memory_ratio_is_that_of_known_allocations(harness, tmp_path):
    """Eager holds sin(x) while it computes cos of it; the compiled kernel holds the result alone."""
    path = tmp_path / "chain.py"
    path.write_text("import torch\ndef target():\n    return (lambda x: x.sin().cos()), (torch.ones(2**20),)\n")
    found = harness.ask(jobs.memory, Case(f"{path}:target", "cuda", train=False))
    assert (found.eager, found.compiled) == pytest.approx((2**23, 2**22), rel=0.01)
    trained = harness.ask(jobs.memory, Case("gpt-one-layer", "cuda"))
    target = load_target("gpt-one-layer", "cuda")
    weights = sum(parameter.numel() * parameter.element_size() for parameter in target.model.parameters())
    logits = 4 * target.args[0].numel() * target.model.config.vocab_size  # in float32
    # Eager's log_softmax is an operator: when its backward pass runs, its result, the gradient of it and that of the
    # logits are there. AdamW's two moments and the weights always are.
    assert trained.eager > 3 * weights + 3 * logits
    # Fused, the loss reads the product's logits in bfloat16 and writes none in float32.
    assert 3 * weights + logits / 2 < trained.compiled < trained.eager - 2 * logits


def test_the_plugin_requires_cuda_graphs(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest, torch\n"
        "@pytest.mark.compile_budget(breaks=0, cuda_graphs=True)\n"
        "@pytest.mark.parametrize('mode', ['reduce-overhead', 'default'])\n"
        "def test_it(mode):\n"
        "    step = torch.compile(lambda x: x.sin().cos(), mode=mode)\n"
        "    for _ in range(4):\n"
        "        step(torch.ones(64, device='cuda'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "compile_bench.pytest_plugin", "test_it.py"]
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "1 failed, 1 passed" in answer.stdout, answer.stdout
    assert "no CUDA graph was replayed" in answer.stdout


def test_inference_with_cuda_graphs(harness):
    case = Case("mlp", "cuda", train=False, mode="reduce-overhead")
    bench = harness.bench(case, steady_seconds=0.5, warm=False)
    assert bench.accuracy.holds, bench.accuracy


def test_a_sweep_times_exclusively_and_autotunes_once(tmp_path):
    """All modes of a model side by side: graphs are replayed, and the second mode that autotunes finds the choices."""
    wanted = {
        "device": "cuda",
        "groups": [["mlp"]],
        "kinds": ["inference"],
        "modes": list(MODES),
        "processes": 3,
        "compile_threads": 4,
        "limit_seconds": 1800.0,
        "steady_seconds": 0.3,
    }
    lens = replace(build_lens(Path(__file__).parents[1]), configure=lambda device, quick: {"sweep": wanted})
    sweep_and_write(lens, device="cuda", quick=True, out=tmp_path)
    results = load(tmp_path / "sweep.json")
    assert FailedCell.select(results) == []
    cases = {case.mode: case for case in measured_cases(results)}
    assert set(cases) == set(MODES)
    launches = {mode: case.compiled_profile.launches for mode, case in cases.items()}
    assert launches["reduce-overhead"] < launches["default"]
    assert launches["max-autotune"] < launches["max-autotune-no-cudagraphs"]
    tuner, tuned = cases["max-autotune-no-cudagraphs"], cases["max-autotune"]
    assert (tuner.tuned, tuned.tuned) == (False, True)
    compared = {mode: case.steady.untuned and case.steady.untuned.mode for mode, case in cases.items()}
    assert compared["max-autotune"] == "reduce-overhead"
    assert compared["max-autotune-no-cudagraphs"] == "default"
    assert compared["default"] is compared["reduce-overhead"] is None
    paired = tuned.steady.untuned.speedup
    assert 0 < paired.low <= paired.value <= paired.high
    for start in (each for case in cases.values() for each in (case.cold, case.eager)):
        assert sum(start.phases.values()) <= start.total
