import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from benchkit import UserError
from torch_baseline import checkpoint as checkpoints
from torch_baseline import data, throughput
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.loop import NonFiniteError
from torch_baseline.model import GPT, bias_gelu, causal_attention, init_numpy
from torch_baseline.optim import make_optimizer
from torch_baseline.parallel import World
from torch_baseline.records import RunFiles, Start, StepLog, ValidationLog
from torch_baseline.train import Learner, deterministic_algorithms, make_train_step, train, validate

ALONE = World("none", 0, 1, torch.device("cpu"))
SHORT = TrainConfig(steps=6, batch_size=4, warmup=2, eval_interval=3, eval_batches=2)


def tokens(batch_size, block_size=32, step=0):
    return tuple(
        torch.from_numpy(part) for part in data.batch(data.load_corpus().train, 0, step, batch_size, block_size)
    )


def gradients_of(model_config, config, x, y, weights):
    """What one step leaves in .grad, without the update's clipping."""
    model = GPT(model_config)
    if config.dtype == "float64":
        model.double()
    model.load_numpy(weights)
    make_train_step(model, make_optimizer(model, config), config)(x, y)
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


def test_it_learns_more_than_frequencies(small):
    config = TrainConfig(steps=150, batch_size=16, warmup=10, eval_interval=0, eval_batches=20)
    summary = train(small, config)
    assert summary.bits < summary.unigram_bits - 0.5
    assert summary.best_bits == summary.bits
    assert 4 < summary.unigram_bits < 5


def test_every_event_is_reported_once(small):
    events = []
    summary = train(small, dataclasses.replace(SHORT, ema_decay=0.5), report=events.append)
    assert isinstance(events[0], Start)
    steps = [event for event in events if isinstance(event, StepLog)]
    assert [event.step for event in steps] == [1, 2, 3, 4, 5, 6]
    assert [event.lr for event in steps[:3]] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert all(
        event.mfu is None and event.tokens_per_second * event.seconds == pytest.approx(4 * 32) for event in steps
    )
    validations = [event for event in events if isinstance(event, ValidationLog)]
    assert [event.step for event in validations] == [3, 6]
    assert summary.bits == validations[-1].bits
    assert summary.ema_bits == validations[-1].ema_bits != summary.bits
    assert summary.tokens_per_second > 0
    assert summary.mfu is None


def test_compiling_is_not_counted_as_training(small, monkeypatch):
    """Eight steps at a time, and one at a time where something is due sooner: two functions, two compilations."""
    now = 0.0
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now)
    clock = throughput.Throughput(small, SHORT, None)
    for steps, seconds in ((8, 100.0), (8, 4.0), (1, 100.0), (1, 0.5), (8, 4.0)):
        now += seconds
        clock.lap(steps)
    assert clock.total_rate() == pytest.approx(17 * SHORT.batch_size * small.block_size / 8.5)


def test_validation_is_the_mean_over_its_batches(small):
    model = GPT(small).double()
    held_out = data.load_corpus().validation
    config = dataclasses.replace(SHORT, dtype="float64")
    # An equal number of bytes in every batch: the mean of means is the mean.
    x, y = (
        torch.from_numpy(np.concatenate(part))
        for part in zip(*data.validation_batches(held_out, 4, 32, 2), strict=True)
    )
    assert validate(model, held_out, config, 32, ALONE) == pytest.approx(model(x, y).item(), rel=1e-14)


def test_validation_leaves_the_training_state_untouched(small, assert_same):
    model = GPT(small, activation=_dropping)
    config = dataclasses.replace(SHORT, ema_decay=0.9)
    optimizer = make_optimizer(model, config)
    step = make_train_step(model, optimizer, config)
    learner = Learner(model, optimizer, step.scaler, None)
    step(*tokens(4))
    before = learner.checkpoint(config, "")
    gradients = [p.grad.clone() for p in model.parameters()]
    model.blocks[0].eval()  # a mode of the user's own, to come back as well
    validate(model, data.load_corpus().validation, config, 32, ALONE)
    assert model.training
    after = learner.checkpoint(config, "")
    assert_same(dataclasses.asdict(before), dataclasses.asdict(after))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_validating_more_often_changes_nothing(small, tmp_path, assert_same):
    for interval in (1, 0):
        out = tmp_path / str(interval)
        train(small, dataclasses.replace(SHORT, eval_interval=interval, out=out, ema_decay=0.9))
    often, seldom = (dataclasses.asdict(checkpoints.load(tmp_path / name / "last.pt")) for name in ("1", "0"))
    for name in ("model", "optimizer", "ema", "rng"):
        assert_same(often[name], seldom[name])


def test_accumulation_is_the_large_batch_in_exact_arithmetic(small):
    x, y = tokens(8)
    weights = init_numpy(small, 0)
    whole = dataclasses.replace(SHORT, batch_size=8, clip=0.0, dtype="float64")
    reference = gradients_of(small, whole, x, y, weights)
    parts = gradients_of(small, dataclasses.replace(whole, accumulation=4), x, y, weights)
    # Both are the same sum over B·T positions, added up in another order: each is within B·T·u of it, relative to the
    # sum of magnitudes, which cancellation makes larger than the result; √(B·T) for terms of random sign.
    positions = x.numel()
    bound = 2 * positions * math.sqrt(positions) * torch.finfo(torch.float64).eps / 2 * reference.norm()
    assert (parts - reference).norm() < bound


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e6])
def test_clipping_scales_the_gradient_to_the_norm(small, clip):
    x, y = tokens(4)
    weights = init_numpy(small, 0)
    config = dataclasses.replace(SHORT, clip=0.0, dtype="float64")
    free = gradients_of(small, config, x, y, weights)
    clipped = gradients_of(small, dataclasses.replace(config, clip=clip), x, y, weights)
    assert free.norm() > 0.01
    # torch divides by norm + 1e-6, so that a zero gradient stays one.
    factor = clip / (free.norm() + 1e-6) if clip == 0.01 else 1.0
    torch.testing.assert_close(clipped, free * factor, rtol=1e-14, atol=0)


def test_the_logged_norm_is_before_clipping(small):
    config = dataclasses.replace(SHORT, clip=0.01)
    model = GPT(small)
    step = make_train_step(model, make_optimizer(model, config), config)
    step(*tokens(4))
    remaining = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert step.gradient_norm.item() > 1
    assert remaining.item() == pytest.approx(0.01, rel=1e-4)


def test_a_nan_in_the_forward_pass_is_named_by_its_step(small):
    calls = []

    def activation(x, bias):
        calls.append(None)
        # Two blocks a step and no validation before: the fifth call is in step 3.
        return bias_gelu(x, bias) * (math.nan if len(calls) == 5 else 1.0)

    with pytest.raises(
        NonFiniteError, match=r"step 3: the loss is nan.*parameters are finite, the gradient of norm.weight"
    ):
        train(small, dataclasses.replace(SHORT, eval_interval=0), parts={"activation": activation})


def test_a_nan_in_a_gradient_is_named_where_it_arose(small):
    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return torch.full_like(gradient, math.nan)

    calls = []

    def attention(q, k, v):
        calls.append(None)
        out = causal_attention(q, k, v)
        return Poison.apply(out) if len(calls) == 4 else out  # the second block of step 2

    with pytest.raises(
        NonFiniteError, match=r"step 2: the loss is \d.*the gradient of blocks.1.attention.qkv.weight is not"
    ):
        train(small, dataclasses.replace(SHORT, eval_interval=0), parts={"attention": attention})


def test_a_nan_in_a_parameter_is_named(small):
    biases = []

    def activation(x, bias):
        biases.append(bias)
        return bias_gelu(x, bias)

    def poison(event):
        if isinstance(event, StepLog) and event.step == 3:
            with torch.no_grad():
                biases[0][5] = math.nan

    with pytest.raises(NonFiniteError, match=r"step 4: .*parameter blocks.0.mlp.bias is not finite"):
        train(small, dataclasses.replace(SHORT, eval_interval=0), parts={"activation": activation}, report=poison)


def test_a_validation_that_is_not_finite_ends_the_run_and_is_never_the_best(small, tmp_path, monkeypatch):
    validations = iter((2.0, 1.5, math.nan))
    monkeypatch.setattr("torch_baseline.train.validate", lambda *arguments: next(validations))
    config = dataclasses.replace(SHORT, eval_interval=1, out=tmp_path)
    message = r"step 3: the validation loss of the weights is nan; parameters and gradients are finite"
    with pytest.raises(NonFiniteError, match=message):
        train(small, config)
    best = checkpoints.load(tmp_path / "best.pt")
    assert (best.step, best.best_loss) == (2, 1.5)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_no_loss_that_is_not_finite_is_noted_as_the_best(small, loss):
    model = GPT(small)
    learner = Learner(model, make_optimizer(model, SHORT), torch.amp.GradScaler("cpu", enabled=False), None)
    assert [learner.note_validation(each) for each in (2.0, loss, 1.5, loss)] == [True, False, True, False]
    assert (learner.best_loss, learner.stale) == (1.5, 1)


def test_float16_skips_an_overflowing_step_and_goes_on(small):
    config = dataclasses.replace(SHORT, dtype="float16")
    model = GPT(small)
    step = make_train_step(model, make_optimizer(model, config), config)
    step(*tokens(4))
    step.scaler.update(2.0**40)  # far beyond float16's 65504: the first gradients overflow
    before = model.to_numpy()
    step(*tokens(4, step=1))
    assert not math.isfinite(step.gradient_norm.item())
    for name, value in model.to_numpy().items():
        np.testing.assert_array_equal(value, before[name])
    assert step.scaler.get_scale() == 2.0**39


def test_float16_gradients_are_clipped_at_their_own_scale(small):
    norms = {}
    for dtype in ("float32", "float16"):
        model = GPT(small)
        config = dataclasses.replace(SHORT, dtype=dtype)
        step = make_train_step(model, make_optimizer(model, config), config)
        step(*tokens(4))
        norms[dtype] = step.gradient_norm.item()
    # Not 65536 times as large; a float16 product of 192 terms is off by at most 192·2⁻¹¹, and by √192 of it at random.
    assert norms["float16"] == pytest.approx(norms["float32"], rel=math.sqrt(192) * 2**-11)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_trains_near_the_full_one(small, dtype):
    losses = {}
    for each in ("float64", "float32", dtype):
        events = []
        train(small, dataclasses.replace(SHORT, eval_interval=0, dtype=each), report=events.append)
        losses[each] = [event.loss for event in events if isinstance(event, StepLog)]
    full, low = (np.abs(np.subtract(losses[each], losses["float64"])).max() for each in ("float32", dtype))
    # The unit roundoffs' ratio (2¹⁶ for bfloat16, 2¹³ for float16) is what the error grows by, with a factor of 4 to
    # spare; float32's own error is at least one rounding of the loss.
    unit = torch.finfo(torch.float32).eps / 2
    ratio = torch.finfo(getattr(torch, dtype)).eps / torch.finfo(torch.float32).eps
    assert 0 < low < 4 * ratio * max(full, unit * losses["float64"][0])


def test_patience_stops_and_the_best_is_kept(small, tmp_path):
    # A learning rate that destroys what the first steps learned.
    config = dataclasses.replace(
        SHORT, steps=40, lr=2.0, min_lr=2.0, warmup=10, eval_interval=1, patience=3, out=tmp_path, clip=0.0
    )
    summary = train(small, config)
    assert summary.stopped_early
    best, last = (checkpoints.load(tmp_path / name) for name in ("best.pt", "last.pt"))
    assert last.step == summary.steps == best.step + 3
    model = GPT(small)
    model.load_numpy({name: value.numpy() for name, value in best.model.items()})
    loss = validate(model, data.load_corpus().validation, config, 32, ALONE)
    assert loss / math.log(2) == pytest.approx(summary.best_bits, rel=1e-15)
    assert summary.best_bits < summary.bits
    with pytest.raises(UserError, match=r"stopped early, after step \d+; with a patience above 3, or 0 for none"):
        train(small, config, resume=True)
    longer = dataclasses.replace(config, patience=5)
    assert train(small, longer, resume=True).steps > summary.steps


def test_a_second_run_in_the_folder_of_one_that_runs_is_refused(small, tmp_path):
    config = dataclasses.replace(SHORT, out=tmp_path)

    def start_another(event):
        for resume in (False, True):  # before its checkpoint is read, which the run here replaces
            with pytest.raises(UserError, match="another run writes to"):
                train(small, config, resume=resume)

    train(small, config, report=start_another)


def test_a_step_of_unequal_micro_batches_is_refused(small):
    config = dataclasses.replace(SHORT, accumulation=4)
    model = GPT(small)
    with pytest.raises(ValueError, match="multiple of accumulation=4, got 10"):
        make_train_step(model, make_optimizer(model, config), config)(*tokens(10))


def test_what_a_run_leaves_behind(small, tmp_path):
    out = tmp_path / "new" / "run"
    summary = train(small, dataclasses.replace(SHORT, out=out))
    described = json.loads((out / "run.json").read_text())
    assert described["summary"] == dataclasses.asdict(summary)
    assert described["start"]["sha256"] == data.load_corpus().sha256
    assert described["training"]["batch_size"] == 4
    assert described["model"]["n_head"] == 3
    whole = torch.__version__
    # The metadata of PyPI's builds leaves the local part out.
    assert described["environment"]["packages"]["torch"] in (whole, whole.partition("+")[0])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "StepLog"] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(UserError, match="already contains a run"):
        train(small, dataclasses.replace(SHORT, out=out))
    (out / "last.pt").unlink()  # as where the run was killed before it wrote the first
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"has best\.pt and metrics\.jsonl of another run, which cannot be resumed"):
        train(small, dataclasses.replace(SHORT, out=out))
    assert (out / "metrics.jsonl").read_bytes() == before


def test_damaged_lines_of_the_metrics_do_not_hinder(tmp_path):
    lines = ['{"step": 1}', "\0\0\0", "[1, 2]", '{"loss": 1.0}', '{"step": 2}', '{"step": 3}', '{"ste']
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\xff")
    RunFiles(tmp_path).forget_after(2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.slow
def test_the_compiled_model_takes_the_same_steps(small):
    losses = []
    for compiled in (False, True):
        events = []
        config = dataclasses.replace(SHORT, steps=3, eval_interval=0, compile=compiled, dtype="float64")
        train(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16), config, report=events.append)
        losses.append([event.loss for event in events if isinstance(event, StepLog)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12)


def test_determinism_is_asked_for_and_given_back():
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        with deterministic_algorithms(True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_two_deterministic_runs_are_equal(small, tmp_path, assert_same):
    for name in ("a", "b"):
        train(
            small, dataclasses.replace(SHORT, deterministic=True, out=tmp_path / name), parts={"activation": _dropping}
        )
    first, second = (dataclasses.asdict(checkpoints.load(tmp_path / name / "last.pt")) for name in ("a", "b"))
    first["train_config"]["out"] = second["train_config"]["out"]
    assert_same(first, second)


def test_a_vocabulary_without_all_bytes_is_refused(small):
    with pytest.raises(ValueError, match="at least 256, got 100"):
        train(dataclasses.replace(small, vocab_size=100), SHORT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_takes_the_same_steps(small):
    losses = []
    for device in ("cpu", "cuda"):
        events = []
        train(small, dataclasses.replace(SHORT, dtype="float64"), device=device, report=events.append)
        losses.append([event.loss for event in events if isinstance(event, StepLog)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-11)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gpu_trains_in_low_precision(small, dtype):
    config = TrainConfig(steps=150, batch_size=16, warmup=10, eval_batches=100, dtype=dtype, deterministic=True)
    summary = train(small, config, device="cuda")
    assert summary.bits < summary.unigram_bits - 0.5


def _dropping(x, bias):
    """An activation that draws from torch's generator, so that its state matters."""
    return torch.nn.functional.dropout(bias_gelu(x, bias), 0.1)
