"""The zoo: every target runs a step in training and in inference, and transformers loads lazily."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchkit import UserError
from benchkit.processes import ChildFailure
from compile_bench.cli import app
from compile_bench.lens import SWEEP_GROUPS
from compile_bench.measure.harness import Harness
from compile_bench.targets import hugging_face as zoo_transformers
from compile_bench.targets.hugging_face import ARCHITECTURES
from compile_bench.targets.loading import load_target
from compile_bench.targets.workloads import workload
from compile_bench.targets.zoo import ZOO, ResNet
from torch_baseline.config import GPTConfig

SURVEY = [name for group in SWEEP_GROUPS for name in group]

# Not "planted": that it breaks is its point.
OURS = [name for name in ZOO if name not in (*ARCHITECTURES, "planted")]


def _check(name):
    target = load_target(name, "cpu")
    if about := workload(name, "cpu"):
        assert tuple(target.args[0].shape) == about.batch
    model = target.copied().train()
    loss = target.step(model, train=True)()
    assert loss.ndim == 0
    assert torch.isfinite(loss)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    model = target.copied().eval()
    output = target.step(model, train=False)()
    assert torch.equal(output, target.step(model, train=False)())
    assert not output.requires_grad


def _slow_but(quick, names):
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


# gpt-one-layer has the code of gpt.
@pytest.mark.parametrize("name", _slow_but(("gpt-one-layer", "mlp"), OURS))
def test_our_targets_train_and_infer(name):
    _check(name)


@pytest.mark.filterwarnings("ignore")  # the library's own, about weights and versions
@pytest.mark.parametrize("name", _slow_but(("gpt2", "t5"), ARCHITECTURES))
def test_the_librarys_architectures_train_and_infer(name):
    pytest.importorskip("transformers")
    _check(name)


@pytest.mark.parametrize(
    ("name", "reason"), [("nosuch", "or one of bert, "), ("nosuch.py:make", "there is no file nosuch.py")]
)
def test_a_wrong_name_ends_the_command_before_anything_is_measured(name, reason):
    answer = CliRunner().invoke(app, ["zoo", "mlp", name, "--device", "cpu"])
    assert answer.exit_code == 2
    assert reason in answer.output


def test_an_interrupt_keeps_the_lines_of_the_targets_before_it(monkeypatch):
    def bench(harness, case, **options):
        raise ChildFailure("crashed") if case.target == "mlp" else KeyboardInterrupt

    monkeypatch.setattr(Harness, "bench", bench)
    answer = CliRunner().invoke(app, ["zoo", "mlp", "resnet", "gpt", "--device", "cpu"])
    assert answer.exit_code == 130
    assert "crashed" in answer.output
    assert "interrupted: resnet and the targets after it are not measured" in answer.output


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name in SURVEY])
def test_the_label_of_a_cut_model_says_how_many_layers_it_has(name):
    pytest.importorskip("transformers")
    by_device = ARCHITECTURES[name]["sizes"]
    sizes = {**by_device["cuda"], **by_device.get("always", {})}
    depth = next(sizes[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in sizes)
    label = str(workload(name, "cuda"))
    assert re.search(rf", {depth} (\+ {depth} )?of its [\d +]+ layers, ", label), label
    assert str(workload(name, "cpu")).startswith("small ")


def test_a_report_names_the_batches_that_a_gpu_gets():
    for name in ("mlp", "resnet"):
        assert tuple(ZOO[name].make("cuda").args[0].shape) == workload(name, "cuda").batch
    assert workload("gpt", "cuda").batch == (16, GPTConfig.preset("gpt2-124m").block_size)
    assert all(workload(name, device) for name in SURVEY for device in ("cpu", "cuda"))
    assert str(workload("gpt", "cuda")) == "preset `gpt2-124m`, 16 × 1,024 tokens"
    assert workload("mine.py:make", "cuda") is None


def test_the_zoo_has_what_it_promises():
    assert set(SURVEY) <= set(ZOO)
    wanted = {"gpt", "mlp", "resnet", "gpt2", "llama", "qwen3", "qwen3-moe", "bert", "vit", "t5", "mamba"}
    assert wanted | {"wav2vec2", "longformer"} == set(SURVEY)


def test_a_missing_library_is_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"needs the package transformers: pip install 'compile-bench\[zoo\]'"):
        load_target("llama", "cpu")


def test_a_library_without_its_own_requirements_is_not_called_missing(monkeypatch):
    def without_tokenizers(name):
        raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")

    monkeypatch.setattr(zoo_transformers, "importlib", SimpleNamespace(import_module=without_tokenizers))
    with pytest.raises(UserError, match=r"llama cannot be made: ModuleNotFoundError: No module named .tokenizers"):
        load_target("llama", "cpu")


@pytest.mark.slow
def test_the_library_is_not_loaded_before_it_is_asked_for():
    code = "import compile_bench.targets.zoo, sys; assert 'transformers' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_real_widths_are_the_published_ones(name):
    pytest.importorskip("transformers")
    architecture = ARCHITECTURES[name]
    library = zoo_transformers._library(name)
    config = zoo_transformers.config_of(architecture, library, "cuda")
    assert config.hidden_size in (768, 1024, 2048)
    assert getattr(config, "vocab_size", 32) in (32, 30_522, 32_128, 50_257, 50_280, 128_256, 151_936)
    assert config.num_hidden_layers == 2
    inputs, _ = zoo_transformers.INPUTS[architecture["inputs"]](config, architecture["batch"]["cuda"])
    assert tuple(inputs[0].shape) == workload(name, "cuda").batch


def test_resnet_18_has_its_parameters():
    # 11,689,512: the count of the paper's architecture with 1,000 classes.
    assert sum(parameter.numel() for parameter in ResNet(classes=1000).parameters()) == 11_689_512
    assert ResNet(classes=1000)(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
