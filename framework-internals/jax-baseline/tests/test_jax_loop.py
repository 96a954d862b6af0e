"""The loop: what it reaches, what it leaves behind, and that nothing of a run is lost or different after a kill."""

import json
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch

from benchkit import UserError
from jax_baseline.gpt import interchange, loop
from jax_baseline.gpt.transfer import open_torch_checkpoint, to_torch
from torch_baseline import checkpoint as torch_checkpoints
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.loop import BEST, LAST, NonFiniteError
from torch_baseline.records import StepLog, ValidationLog
from torch_baseline.train import train as torch_train

MODEL = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=12)
CONFIG = TrainConfig(
    steps=6, batch_size=4, warmup=2, eval_batches=2, eval_interval=3, checkpoint_interval=2, ema_decay=0.9
)


def losses(logs):
    return [log.loss for log in logs if isinstance(log, StepLog)]


def weights(state):
    return {**to_torch(state.params, MODEL), **{f"ema {k}": v for k, v in to_torch(state.ema, MODEL).items()}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupts, with its folder."""
    folder = tmp_path_factory.mktemp("whole")
    logs = []
    return loop.train(MODEL, replace(CONFIG, out=folder), report=logs.append), logs, folder


def test_a_run_learns_validates_and_describes_itself(whole):
    outcome, logs, folder = whole
    assert [log.step for log in logs if isinstance(log, StepLog)] == [1, 2, 3, 4, 5, 6]
    assert [log.step for log in logs if isinstance(log, ValidationLog)] == [3, 6]
    assert losses(logs)[-1] < losses(logs)[0]
    assert outcome.summary.ema_bits > outcome.summary.bits  # the average lags behind
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    described = json.loads((folder / "run.json").read_text())
    assert described["framework"].startswith("jax ")
    assert described["execution"]["attention"] == "xla"
    assert described["summary"]["steps"] == 6


def test_the_loop_is_torchs_loop():
    config = replace(CONFIG, accumulation=2, dtype="float64")
    theirs, ours = [], []
    summary = torch_train(MODEL, config, report=theirs.append)
    outcome = loop.train(MODEL, config, report=ours.append)
    for one, other in zip(theirs[1:], ours[1:], strict=True):
        assert type(one) is type(other)
        if isinstance(one, StepLog):
            assert (other.step, other.lr) == (one.step, one.lr)
            assert (other.loss, other.gradient_norm) == pytest.approx((one.loss, one.gradient_norm), rel=1e-12)
        else:
            assert (other.step, other.best) == (one.step, one.best)
            assert (other.bits, other.ema_bits) == pytest.approx((one.bits, one.ema_bits), rel=1e-12)
    assert outcome.summary.best_bits == pytest.approx(summary.best_bits, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("execution", [loop.Execution(steps_per_dispatch=2), loop.Execution(scan=True, remat=True)])
def test_execution_changes_rounding_alone(execution):
    config, plain, logs = replace(CONFIG, dtype="float64"), [], []
    loop.train(MODEL, config, report=plain.append)
    loop.train(MODEL, config, execution=execution, report=logs.append)
    assert losses(logs) == pytest.approx(losses(plain), rel=1e-12)


class Interrupted(Exception):
    pass


def interrupt_after(step, logs):
    def report(event):
        logs.append(event)
        if isinstance(event, StepLog) and event.step == step:
            raise Interrupted

    return report


@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_interrupted_run_resumes_bit_for_bit(whole, tmp_path, scan):
    """Also one that scans over stacked blocks: a checkpoint has them one by one."""
    outcome, logs, _ = whole
    config, stopped, resumed = replace(CONFIG, out=tmp_path), [], []
    model = replace(MODEL, n_layer=2 if scan else 1)
    with pytest.raises(Interrupted):
        loop.train(model, config, execution=loop.Execution(scan=scan), report=interrupt_after(5, stopped))
    again = loop.train(model, config, resume=True, execution=loop.Execution(scan=scan), report=resumed.append)
    assert resumed[0].step == 4
    assert losses(resumed) == losses(stopped)[4:5] + losses(resumed)[1:]
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 3, 4, 5, 6, 6]
    if not scan:
        assert losses(resumed) == losses(logs)[4:]
        for name, array in weights(again.state).items():
            np.testing.assert_array_equal(array, weights(outcome.state)[name], err_msg=name)


def test_a_run_in_the_format_of_an_earlier_version_is_left_alone(tmp_path):
    (tmp_path / "last").mkdir()
    with pytest.raises(UserError, match="holds a run of an earlier version"):
        loop.train(MODEL, replace(CONFIG, out=tmp_path))


@pytest.mark.parametrize(
    "execution", [loop.Execution(), pytest.param(loop.Execution(steps_per_dispatch=3), marks=pytest.mark.slow)]
)
def test_a_number_that_is_not_finite_is_named(execution):
    config = replace(CONFIG, lr=1e30, min_lr=1e30, warmup=0, clip=0.0)
    with pytest.raises(NonFiniteError, match=r"step 2: the loss is .*(finite|is not).*those before this step"):
        loop.train(MODEL, config, execution=execution)


def test_a_validation_that_is_not_finite_ends_the_run(monkeypatch):
    validations = iter((2.0, math.nan))  # of the weights and of their average
    monkeypatch.setattr(loop.JaxTrainer, "validation_loss", lambda self, *, averaged: next(validations))
    message = "step 1: the validation loss of the averaged weights is nan; they are finite, the loss alone is not"
    with pytest.raises(NonFiniteError, match=message):
        loop.train(MODEL, replace(CONFIG, eval_interval=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "no gradient scaler"),
        ({"parallel": "ddp"}, "give JAX a mesh"),
        ({"deterministic": True}, "xla_gpu_deterministic_ops"),
    ],
)
def test_what_the_loop_does_not_have_it_refuses(change, message):
    with pytest.raises((UserError, ValueError), match=message):
        loop.train(MODEL, replace(CONFIG, **change))


def test_a_run_goes_on_in_the_other_framework(tmp_path):
    config = replace(CONFIG, dtype="float64", steps=8, eval_interval=0, checkpoint_interval=2, out=tmp_path / "torch")
    everything = []
    torch_train(MODEL, config, report=everything.append)
    half = replace(config, out=tmp_path / "half")
    with pytest.raises(Interrupted):
        torch_train(MODEL, half, report=interrupt_after(3, []))
    in_jax, rest = [], []
    with pytest.raises(Interrupted):
        loop.train(MODEL, half, resume=True, report=interrupt_after(6, in_jax))
    torch_train(MODEL, half, resume=True, report=rest.append)
    assert (in_jax[0].step, rest[0].step) == (2, 4)
    assert losses(in_jax) == pytest.approx(losses(everything)[2:6], rel=1e-12)
    assert losses(rest) == pytest.approx(losses(everything)[4:], rel=1e-12)
    ours, theirs = (torch_checkpoints.load(run.out / LAST) for run in (half, config))
    assert ours.step == theirs.step == 8
    assert torch.equal(ours.rng["cpu"], theirs.rng["cpu"])  # JAX draws nothing and keeps them
    with jax.enable_x64(True):
        model, settings, state = interchange.open_torch_run(half.out / LAST)
    assert (model, settings.steps, int(state.step)) == (MODEL, 8, 8)


def test_best_weights_are_the_averaged_ones(whole):
    config, params = open_torch_checkpoint(whole[2] / BEST, averaged=True)
    assert config == MODEL
    np.testing.assert_array_equal(params.norm, whole[0].state.ema.norm)  # the last validation was the best
