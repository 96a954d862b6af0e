"""On a CUDA GPU: the training step stays in one graph, its results hold, and CUDA graphs are used."""

import pytest
import torch

from compile_bench import Case, Harness, judge
from compile_bench.target import load_target

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
    assert trained.warm.trace.cache_events["fx_graph_cache_hit"] > 0
    assert trained.warm.total < trained.cold.total


def test_memory_and_verdict_are_there(trained):
    weights = sum(p.numel() * p.element_size() for p in load_target("gpt-one-layer", "cpu").model.parameters())
    assert trained.memory.eager > weights
    assert trained.memory.compiled > weights
    assert judge(trained).advice in ("compile", "don't", "inconclusive")


def test_cuda_graphs_keep_the_results(harness):
    bench = harness.bench(Case("gpt-one-layer", "cuda", mode="reduce-overhead"), steady_seconds=1.0, warm=False)
    assert bench.trace.breaks == ()
    assert bench.accuracy.holds, bench.accuracy


def test_inference_with_cuda_graphs(harness):
    case = Case("mlp", "cuda", train=False, mode="reduce-overhead")
    bench = harness.bench(case, steady_seconds=0.5, warm=False)
    assert bench.accuracy.holds, bench.accuracy
