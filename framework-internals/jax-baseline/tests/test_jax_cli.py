"""Every command of the README, and what they say when something is wrong."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from benchkit import UserError
from jax_baseline.cli import app
from jax_baseline.parity import Comparison, Deviation

SMALL = ["--steps", "3", "--batch-size", "2"]


def invoke(*arguments):
    return CliRunner().invoke(app, [*arguments])


def test_parity_gives_a_verdict():
    result = invoke("parity", "--preset", "tiny", *SMALL, "--dtype", "float32", "--seed", "1", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "PARITY tiny, 3 steps, seed 1, float32: all within bounds" in result.output


def test_no_parity_is_exit_status_1(monkeypatch):
    found = Deviation(0.5, 0.0, 0.0, 0.0, "norm.weight", "norm.weight")
    equal = Deviation(0.0, 0.0, 0.0, 0.0, "norm.weight", "norm.weight")
    monkeypatch.setattr(
        "jax_baseline.parity.run",
        lambda setup: Comparison("float32", (5.0,), (5.5,), (5.0,), (found,), (equal,)),
    )
    result = invoke("parity", "--steps", "1", "--device", "cpu")
    assert result.exit_code == 1
    assert "NO PARITY tiny, 1 steps, seed 0, float32: step 0: the loss off by 5.0e-01" in result.output


def test_train_prints_losses_and_validation():
    result = invoke("train", "--preset", "tiny", "--steps", "2", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "step 2  loss" in result.output
    assert "bits per held-out byte; unigram entropy" in result.output


def test_bench_compares_the_engines():
    result = invoke("bench", "--batch-size", "1", "--rounds", "1", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert [line.split("|")[1].strip() for line in result.output.splitlines()[2:]] == ["torch eager", "jax"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parity", "--dtype", "float16"], "dtype must be float64, float32 or bfloat16, got 'float16'"),
        (["parity", "--preset", "huge"], "unknown preset 'huge'"),
        (["train", "--dtype", "float16", "--steps", "1", "--device", "cpu"], "no gradient scaler"),
    ],
)
def test_mistakes_are_user_errors(arguments, message):
    result = invoke(*arguments)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


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
    ("module", "absent"),
    [
        ("jax_baseline.hlo", {"jax", "torch", "numpy"}),
        ("jax_baseline.hlo.lock", {"jax", "torch", "numpy"}),
        ("jax_baseline.inductor_source", {"jax", "torch", "numpy"}),
        ("jax_baseline.region_diff", {"jax", "torch"}),
        ("jax_baseline.hlo_findings", {"jax", "torch"}),
        ("jax_baseline.compiled_sides", {"jax", "torch"}),
        ("jax_baseline.gpu_target", {"jax", "torch"}),
        ("jax_baseline.lens", {"jax", "torch"}),
        ("jax_baseline.cli", {"jax", "torch"}),
        ("jax_baseline.worker", {"jax", "torch"}),
        ("jax_baseline.bench", {"jax", "torch"}),
    ],
)
def test_imports_stay_light(module, absent):
    code = f"import sys, {module}; print(*sorted({absent!r} & sys.modules.keys()))"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, env=child_environment()
    )
    assert result.stdout.strip() == ""


def child_environment():
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
