"""What survives: a kill at any moment, a damaged file, a resume with other settings."""

import dataclasses
import json
import math
import os
import pickle
import signal
import sys
import textwrap
import zipfile

import pytest
import torch
import warm_python

from benchkit import UserError
from torch_baseline import checkpoint as checkpoints
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.loop import Terminated
from torch_baseline.records import StepLog
from torch_baseline.sample import model_from_checkpoint, sample_bytes
from torch_baseline.train import train

# Dropout in the activation: torch's generator then decides about the weights, and its state has to come back.
SCRIPT = textwrap.dedent(
    """
    import os, signal, sys, torch
    from pathlib import Path
    from torch_baseline.config import GPTConfig, TrainConfig
    from torch_baseline.model import bias_gelu
    from torch_baseline.records import StepLog
    from torch_baseline.train import train

    mode, out = sys.argv[1:]
    if mode == "kill-in-write":
        fsync, calls = os.fsync, []
        def die_at_the_second_checkpoint(handle):
            if os.readlink(f"/proc/self/fd/{handle}").endswith("last.pt.partial"):
                calls.append(handle)
                if len(calls) == 2:
                    os.ftruncate(handle, 1000)
                    os.kill(os.getpid(), signal.SIGKILL)
            fsync(handle)
        os.fsync = die_at_the_second_checkpoint

    def report(event):
        if mode == "kill" and isinstance(event, StepLog) and event.step == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    train(
        GPTConfig(n_layer=2, n_head=3, n_embd=48, block_size=32),
        TrainConfig(steps=11, batch_size=4, accumulation=2, warmup=2, eval_interval=11, eval_batches=2,
                    checkpoint_interval=3, ema_decay=0.9, out=Path(out)),
        resume=mode == "resume",
        report=report,
        parts={"activation": lambda x, bias: torch.nn.functional.dropout(bias_gelu(x, bias), 0.1)},
    )
    """
)


def run(mode, out):
    return warm_python.run(["-W", "error", "-c", SCRIPT, mode, out], env={**os.environ, "OMP_NUM_THREADS": "1"})


def run_here(monkeypatch, mode, out):
    """The same in this process, whose generators have been used already."""
    monkeypatch.setattr(sys, "argv", ["script", mode, str(out)])
    exec(SCRIPT, {})


def contents(out, name="last.pt"):
    """The whole state, and the losses on the way to it."""
    state = dataclasses.asdict(checkpoints.load(out / name))
    state["train_config"].pop("out")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "tokens_per_second")
    return state, [{key: value for key, value in line.items() if key not in timed} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the other processes: the number decides the order of sums
    with pytest.MonkeyPatch.context() as patch:
        run_here(patch, "run", out)
    torch.set_num_threads(threads)
    return out


@pytest.mark.parametrize(("how", "last_whole"), [pytest.param("kill", 6, marks=pytest.mark.slow), ("kill-in-write", 3)])
def test_a_killed_run_resumes_bit_for_bit(uninterrupted, tmp_path, monkeypatch, how, last_whole, assert_same):
    assert run(how, tmp_path).returncode == -signal.SIGKILL
    assert checkpoints.load(tmp_path / "last.pt").step == last_whole
    run_here(monkeypatch, "resume", tmp_path)
    for name in ("last.pt", "best.pt"):
        assert_same(contents(tmp_path, name), contents(uninterrupted, name))
    assert not (tmp_path / "last.pt.partial").exists()


class Interrupted(Exception):
    pass


def test_an_interrupted_float16_run_resumes_with_its_scale(tmp_path, small, assert_same):
    config = TrainConfig(
        steps=8, batch_size=4, warmup=2, dtype="float16", checkpoint_interval=3, eval_batches=2, out=tmp_path / "whole"
    )
    train(small, config)

    def stop(event):
        if isinstance(event, StepLog) and event.step == 5:
            raise Interrupted

    config = dataclasses.replace(config, out=tmp_path / "stopped")
    with pytest.raises(Interrupted):
        train(small, config, report=stop)
    train(small, config, resume=True)
    whole = contents(tmp_path / "whole")
    assert whole[0]["scaler"]["_growth_tracker"] == 8
    assert_same(contents(tmp_path / "stopped"), whole)


def test_sigterm_finishes_the_step_and_keeps_it(tmp_path, small, assert_same):
    def end_at_3(event):
        if isinstance(event, StepLog) and event.step == 3:
            signal.raise_signal(signal.SIGTERM)

    config = TrainConfig(steps=6, batch_size=4, warmup=2, checkpoint_interval=0, eval_batches=2, out=tmp_path / "ended")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated, match=r"after step 3; .* has a checkpoint; continue with --resume"):
        train(small, config, report=end_at_3)
    assert signal.getsignal(signal.SIGTERM) == before
    train(small, config, resume=True)
    whole = dataclasses.replace(config, out=tmp_path / "whole")
    train(small, whole)
    assert_same(contents(tmp_path / "ended")[0], contents(tmp_path / "whole")[0])
    with pytest.raises(Terminated, match="nothing is kept without --out"):
        train(small, dataclasses.replace(config, out=None), report=end_at_3)


@pytest.mark.parametrize("position", [0.0, 0.3, 0.6, 0.999])
def test_a_flipped_bit_is_refused(uninterrupted, tmp_path, position):
    raw = bytearray((uninterrupted / "last.pt").read_bytes())
    with zipfile.ZipFile(uninterrupted / "last.pt") as archive:
        # Inside the data of the member at that place: archive padding carries nothing to damage.
        start = [member.header_offset for member in archive.infolist()][int(position * len(archive.infolist()))]
    header = (
        30
        + int.from_bytes(raw[start + 26 : start + 28], "little")
        + int.from_bytes(raw[start + 28 : start + 30], "little")
    )
    raw[start + header] ^= 4
    damaged = tmp_path / "last.pt"
    damaged.write_bytes(raw)
    with pytest.raises(UserError, match=r"last\.pt cannot be read \(BadZipFile: Bad CRC-32"):
        checkpoints.load(damaged)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        pytest.param(38, 0x10, id="a tensor that is marked as a folder, of which torch reads nothing"),
        pytest.param(46, 0x80, id="a name that is no UTF-8"),
    ],
)
def test_damage_to_the_directory_changes_no_weight(uninterrupted, tmp_path, field, change):
    raw = bytearray((uninterrupted / "last.pt").read_bytes())
    with zipfile.ZipFile(uninterrupted / "last.pt") as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size).filename
    entry = raw.rindex(largest.encode()) - 46  # in the directory, which is at the end
    raw[entry + field] ^= change
    damaged = tmp_path / "last.pt"
    damaged.write_bytes(raw)
    whole = checkpoints.load(uninterrupted / "last.pt")
    if field == 46:
        with pytest.raises(UserError, match=r"last\.pt cannot be read"):
            checkpoints.load(damaged)
    else:
        loaded = checkpoints.load(damaged)
        assert all(torch.equal(loaded.model[name], weight) for name, weight in whole.model.items())


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_a_cut_file_is_refused(uninterrupted, tmp_path, size):
    cut = tmp_path / "last.pt"
    cut.write_bytes((uninterrupted / "last.pt").read_bytes()[:size])
    with pytest.raises(UserError, match=r"last\.pt cannot be read"):
        checkpoints.load(cut)


def test_other_files_are_refused_and_run_no_code(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    torch.save({"format": 1, "model": Trap()}, tmp_path / "trap.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Trap()))
    torch.save({"format": 99}, tmp_path / "other.pt")
    for name, reason in (("trap", "cannot be read"), ("plain", "cannot be read"), ("other", "is not a checkpoint")):
        with pytest.raises(UserError, match=reason):
            checkpoints.load(tmp_path / f"{name}.pt")
    assert not (tmp_path / "sprung").exists()
    with pytest.raises(UserError, match="there is no checkpoint"):
        checkpoints.load(tmp_path / "missing.pt")


@pytest.mark.parametrize(
    ("model_changes", "changes", "message"),
    [
        ({"n_head": 2}, {}, r"n_head=3 \(model\), this run asks for n_head=2"),
        ({}, {"lr": 0.1}, r"lr=0.003 \(training\), this run asks for lr=0.1"),
        ({}, {"steps": 12}, "steps=11"),
        ({}, {}, r"trained on data with SHA-256"),
    ],
)
def test_another_run_is_refused(uninterrupted, model_changes, changes, message):
    saved = checkpoints.load(uninterrupted / "last.pt")
    config = TrainConfig(**{**saved.train_config, "out": uninterrupted, **changes})
    with pytest.raises(UserError, match=message):
        checkpoints.require_same_run(saved, GPTConfig(**{**saved.model_config, **model_changes}), config, "0" * 64)


@pytest.mark.parametrize("part", ["model", "ema", "optimizer"])
@pytest.mark.parametrize(
    ("change", "received"),
    [(lambda tensor: tensor[:1], r"received one of shape \[1"), (lambda tensor: None, "received none")],
)
def test_tensors_of_another_model_are_refused(uninterrupted, part, change, received):
    saved = checkpoints.load(uninterrupted / "last.pt")
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.model.items()}
    checkpoints.require_shapes(saved, shapes)
    tensors = dict(getattr(saved, part))
    name, first = next(iter(tensors.items()))
    changed = change(saved.model[name])
    tensors[name] = {**first, "exp_avg": changed} if part == "optimizer" and changed is not None else changed
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(UserError, match=received):
        checkpoints.require_shapes(dataclasses.replace(saved, **{part: kept}), shapes)


def test_where_and_how_often_may_change(uninterrupted, tmp_path):
    saved = checkpoints.load(uninterrupted / "last.pt")
    config = TrainConfig(**{**saved.train_config, "out": tmp_path, "eval_interval": 1, "compile": True})
    checkpoints.require_same_run(saved, GPTConfig(**saved.model_config), config, saved.data_sha256)


def test_a_failed_write_keeps_what_was_there(uninterrupted, tmp_path, monkeypatch):
    saved = checkpoints.load(uninterrupted / "last.pt")
    checkpoints.save(tmp_path / "last.pt", saved)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write the checkpoint .*No space left on device"):
        checkpoints.save(tmp_path / "last.pt", dataclasses.replace(saved, step=99))
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]
    assert checkpoints.load(tmp_path / "last.pt").step == 11


def test_a_write_that_torch_turns_into_another_error_has_its_reason_and_remedy(uninterrupted, tmp_path, monkeypatch):
    def too_large(content, file):
        try:
            raise OSError(27, "File too large")
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    saved = checkpoints.load(uninterrupted / "last.pt")
    monkeypatch.setattr(torch, "save", too_large)
    with pytest.raises(
        UserError, match=r"last\.pt \(File too large; raise the limit .*\); the one before is unchanged"
    ):
        checkpoints.save(tmp_path / "last.pt", saved)


def test_resuming_needs_a_run(tmp_path, small):
    with pytest.raises(UserError, match="needs the folder of the run"):
        train(small, TrainConfig(), resume=True)
    with pytest.raises(UserError, match="there is no checkpoint"):
        train(small, TrainConfig(out=tmp_path), resume=True)


def test_a_checkpoint_writes_text(uninterrupted):
    saved = checkpoints.load(uninterrupted / "best.pt")
    model = model_from_checkpoint(saved)
    name = "blocks.1.mlp.up.weight"
    assert torch.equal(dict(model.named_parameters())[name], saved.ema[name])
    assert torch.equal(dict(model_from_checkpoint(saved, averaged=False).named_parameters())[name], saved.model[name])

    def written(**options):
        return bytes(sample_bytes(model, b"The ", 40, **{"temperature": 1.0, "seed": 0, **options}))

    assert written() == written() != written(seed=1)
    # Without temperature every byte is the likeliest after the window that the model sees.
    greedy = written(temperature=0)
    window = torch.tensor([list((b"The " + greedy)[-33:-1])])
    assert model(window)[0, -1].argmax() == greedy[-1]
    with pytest.raises(ValueError, match="at least one byte"):
        next(sample_bytes(model, b"", 1, temperature=1.0, seed=0))
    with pytest.raises(ValueError, match="must not be negative"):
        next(sample_bytes(model, b"x", 1, temperature=-1.0, seed=0))
    for small in (1e-40, 1e-46, 5e-324):  # of float32 and float64 the least, and what float32 rounds to 0
        assert written(temperature=small) == greedy
    with pytest.raises(ValueError, match="must not be negative, got nan"):
        next(sample_bytes(model, b"x", 1, temperature=math.nan, seed=0))
