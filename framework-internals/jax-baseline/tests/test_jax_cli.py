"""Every command of the README, and what they say when something is wrong."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchkit import Quantity, UserError
from jax_baseline.cli import app
from jax_baseline.parity.comparison import Observation, compare_observations
from jax_baseline.parity.gpt.convergence import summarise
from jax_baseline.parity.records import ConvergedRecord
from torch_baseline.config import GPTConfig

SMALL = ["--steps", "3", "--batch-size", "2"]


def invoke(*arguments):
    return CliRunner().invoke(app, [*arguments])


def test_parity_takes_shapes_and_gives_a_verdict():
    shape = ["--layers", "1", "--heads", "3", "--width", "18", "--length", "5", "--batch", "2"]
    result = invoke("parity", *shape, "--steps", "3", "--dtype", "float32", "--seed", "1", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "PARITY tiny, 3 steps, seed 1, float32; probe in float64: all within bounds" in result.output
    assert "would not be seen, nor what begins after the compared steps" in result.output
    assert "of 100,000 correct ports at most 1 is called wrong" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "parity a.py:f a.py:g --steps 5 --dtype float64",
            "--steps, --dtype would change nothing here: a pair takes",
        ),
        ("diff a.py:f a.py:g --layers 3", "--layers would change nothing here: they are of the baseline's loss"),
        ("diff --gradients", "--gradients would change nothing here: they are for two functions of yours"),
        ("hlo a.txt --measure --device cpu", "--device, --measure would change nothing here: a file has the text"),
        ("lock a.lock a.txt --target h200", "--target would change nothing here: a file has the text"),
        ("train --processes 2", "--processes would change nothing here: they need --coordinator"),
        ("bench --kernels 5", "--kernels would change nothing here: they need --sweep"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(arguments, says):
    result = invoke(*arguments.split())
    assert isinstance(result.exception, UserError), result.output
    assert says in str(result.exception)


def test_no_parity_is_exit_status_1(monkeypatch):
    seen = Observation(5.0, 1.0, {"w": np.ones(2)}, {"w": np.ones(2)})
    judged = compare_observations([seen], [replace(seen, loss=5.5)], controls=[[seen]], dtype="float32")
    monkeypatch.setattr("jax_baseline.parity.gpt.adapters.run", lambda setup: judged)
    result = invoke("parity", "--steps", "1", "--device", "cpu")
    assert result.exit_code == 1
    assert "NO PARITY tiny, 1 steps, seed 0, float32: step 0: the loss off by 5.0e-01" in result.output


def test_a_bound_that_is_not_small_is_exit_status_3(monkeypatch):
    seen = Observation(5.0, 1.0, {"w": np.ones(2)}, {"w": np.ones(2)})
    moved = [[replace(seen, gradients={"w": np.ones(2) + by})] for by in (0.1, 0.2, -0.1)]
    judged = compare_observations([seen], [seen], controls=moved, dtype="float32")
    monkeypatch.setattr("jax_baseline.parity.gpt.adapters.run", lambda setup: judged)
    result = invoke("parity", "--steps", "1", "--device", "cpu", "--no-probe")
    assert result.exit_code == 3, result.output
    assert "CAN'T BE JUDGED tiny, 1 steps, seed 0, float32: rounding alone moves the gradients" in result.output


# The pair of the guide, whose state is compared.
GUIDE = (Path(__file__).parents[3] / "docs" / "jax-baseline.md").read_text()
PAIR = next(block.split("```")[0] for block in GUIDE.split("```python\n")[1:] if "def torch_side" in block)


CORRECTED = """\
old, var = state["norm"]["var"], new["batch_stats"]["norm"]["var"]
        new["batch_stats"]["norm"]["var"] = 0.9 * old + (var - 0.9 * old) * 8 / 7
        return ((out - y)"""


@pytest.mark.parametrize(
    ("given", "instead", "status", "says"),
    [
        ("", "", 1, GUIDE.split("```text\nNO PARITY")[1].split("\n")[1]),
        pytest.param("return ((out - y)", CORRECTED, 0, "\nPARITY", marks=pytest.mark.slow),
        pytest.param(
            "use_running_average=False, momentum=0.9",
            "use_running_average=False, momentum=0.99",
            1,
            "the new value of norm.running_mean differs: JAX's changes 0.1 times as far",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["as it is", "corrected", "another momentum"],
)
def test_the_pair_of_the_guide(tmp_path, monkeypatch, given, instead, status, says):
    assert given in PAIR
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PAIR.replace(given, instead) if given else PAIR)
    result = invoke("parity", "mine.py:torch_side", "mine.py:jax_side")
    assert result.exit_code == status, result.output
    assert says in result.output
    assert "not compared" not in result.output


@pytest.mark.slow
def test_train_then_resume(tmp_path):
    run = ["train", "--preset", "tiny", "--steps", "2", "--batch-size", "2", "--device", "cpu", "--out", str(tmp_path)]
    result = invoke(*run, "--steps-per-dispatch", "2", "--scan", "--remat")
    assert result.exit_code == 0, result.output
    assert "step 2  loss" in result.output
    assert "bits per held-out byte" in result.output
    again = invoke(*run, "--resume", "--scan", "--remat")
    assert isinstance(again.exception, UserError)
    assert "is finished (step 2)" in str(again.exception)


def test_ends_are_alike_within_the_noise_of_seeds_and_only_if_both_learned():
    def compared(jax, unigram_bits=4.8):
        bits = [[Quantity(value, "bits") for value in pair] for pair in zip((2.0, 2.1, 2.2), jax, strict=True)]
        return summarise([ConvergedRecord(seed, *pair) for seed, pair in enumerate(bits)], unigram_bits)

    summary = compared((2.05, 2.1, 2.25))
    assert summary.difference.value == pytest.approx(0.1 / 3)
    assert summary.seed_noise.value == pytest.approx(0.1)
    assert summary.alike
    assert not compared((2.3, 2.4, 2.5)).alike  # 0.3 off: over 2 · 0.1 · √(2 / 3)
    assert not compared((2.05, 2.1, 2.25), unigram_bits=4.2).alike


@pytest.mark.slow
def test_converge_compares_the_ends_of_training(monkeypatch):
    tiny = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8)
    monkeypatch.setattr("torch_baseline.config.GPTConfig.preset", lambda name: tiny)
    result = invoke("converge", "--steps", "2", "--seeds", "2", "--device", "cpu")
    assert result.exit_code == 1, result.output  # two steps learn nothing
    assert "NOT ALIKE tiny, 2 steps: JAX minus torch" in result.output


@pytest.mark.slow
def test_a_sweep_goes_on_without_what_fails():
    sizes = ["--batch-size", "2", "--steps", "4", "--rounds", "1", "--device", "cpu"]
    engines = ["--sweep", "--kernels", "2", "--engines", "jit-4-steps,cudnn", "--together", "2"]
    result = invoke("bench", *sizes, *engines)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert any(line.startswith("cudnn ") and "failed: " in line for line in lines)
    assert any(line.startswith("jit-4-steps ") and "tokens/s" in line for line in lines)
    assert sum(" × " in line for line in lines) == 2


@pytest.mark.slow
def test_bench_compares_the_engines():
    result = invoke("bench", "--batch-size", "1", "--rounds", "1", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert [line.split("|")[1].strip() for line in result.stdout.splitlines()[2:]] == ["torch-eager", "jit-donated"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parity", "--dtype", "float16"], "dtype must be float64, float32 or bfloat16, got 'float16'"),
        (["parity", "--preset", "huge"], "unknown preset 'huge'"),
        (["bench", "--engines", "warp"], "there is no engine 'warp'; there are torch-eager"),
        (["train", "--attention", "flash", "--steps", "1", "--device", "cpu"], "attention must be one of xla, cudnn"),
        (["train", "--data-parallel", "64", "--steps", "1", "--device", "cpu"], "a mesh of 64 × 1 needs 64 devices"),
        (["train", "--dtype", "float16", "--steps", "1", "--device", "cpu"], "no gradient scaler"),
    ],
)
def test_mistakes_are_user_errors(arguments, message):
    result = invoke(*arguments)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


@pytest.mark.slow
def test_a_user_error_is_one_line_and_status_2():
    result = subprocess.run(
        [sys.executable, "-m", "jax_baseline", "parity", "--preset", "huge"],
        capture_output=True,
        text=True,
        check=False,
        env=child_environment(),
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("jax-baseline: unknown preset 'huge'")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("absent", "modules"),
    [
        ({"jax", "torch", "numpy"}, ["hlo", "hlo.lock", "diff.inductor.source"]),
        (
            {"jax", "torch"},
            [
                *("diff.region_diff", "report.hlo_sections", "diff.compiled_programs", "hlo.gpu_target", "lens", "cli"),
                "timing.jax_engine",
            ],
        ),
    ],
)
def test_imports_stay_light(absent, modules):
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(f"jax_baseline.{{name}}")
    print(*(f"{{name}} imports {{heavy}}" for heavy in sorted({absent!r} & sys.modules.keys())))
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, env=child_environment()
    )
    assert result.stdout.strip() == ""


def child_environment():
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
