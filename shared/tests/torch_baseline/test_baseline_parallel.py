"""Two processes on one machine (gloo) against one process."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchkit import UserError
from torch_baseline import checkpoint as checkpoints
from torch_baseline import loop, parallel
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.model import GPT
from torch_baseline.parallel import join_world
from torch_baseline.train import train

TORCHRUNS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}

NEEDS_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.loop import Terminated
from torch_baseline.train import train

def die(event):
    if [os.environ["RANK"], str(getattr(event, "step", ""))] == sys.argv[4].split(":"):
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[4] == "hangs" and getattr(event, "step", 0) == 4:
        time.sleep(600)
    if sys.argv[4] == "waits" and getattr(event, "step", 0) == 2 and not os.path.exists(sys.argv[2] + "/asked"):
        time.sleep(0.1)
        die(event)

try:
    train(
        GPTConfig(n_layer=2, n_head=3, n_embd=48, block_size=32),
        TrainConfig(steps=5, batch_size=8, accumulation=2, warmup=2, eval_batches=2, ema_decay=0.9, dtype="float64",
                    checkpoint_interval=3, parallel=sys.argv[1], out=Path(sys.argv[2]), compile="compile" in sys.argv),
        device=sys.argv[3],
        resume="resume" in sys.argv,
        report=die,
    )
except Terminated as ended:
    Path(sys.argv[2], "ended by " + os.environ["RANK"]).write_text(str(ended))
    sys.exit(128 + signal.SIGTERM)
"""

LAUNCH = """
import sys
from benchkit.command import one_line_errors
from torch_baseline.parallel import launch

with one_line_errors("train"):
    launch(2, sys.argv[1:])
"""


def start_two(tmp_path, kind, out, device, dies, *more):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(script), kind, str(out), device, dies, *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_two(tmp_path, kind, out, device="cpu", *more, dies=":"):
    with start_two(tmp_path, kind, out, device, dies, *more) as processes:
        _, told = processes.communicate()
    assert (processes.returncode == 0) == (dies == ":"), told
    return told


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    config = TrainConfig(
        steps=5,
        batch_size=8,
        accumulation=2,
        warmup=2,
        eval_batches=2,
        ema_decay=0.9,
        dtype="float64",
        checkpoint_interval=3,
        out=out,
    )
    train(GPTConfig(n_layer=2, n_head=3, n_embd=48, block_size=32), config)
    return out


def losses(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] if line["event"] == "StepLog" else line["bits"] for line in lines]


def assert_same_run(out, alone):
    # float64 and the same sums in another order: 256 positions a step give about 256·u = 3e-14; Adam's quotient m/√v,
    # near ±1 in the first steps whatever the gradient's size, hands a gradient's relative error on, 5 steps add it up.
    np.testing.assert_allclose(losses(out), losses(alone), rtol=2e-12)
    ours, theirs = (checkpoints.load(folder / "last.pt") for folder in (out, alone))
    assert ours.step == theirs.step == 5
    for part in ("model", "ema"):
        for name, value in getattr(theirs, part).items():
            torch.testing.assert_close(getattr(ours, part)[name], value, rtol=0, atol=1e-10)
    assert ours.optimizer.keys() == theirs.optimizer.keys()
    for name, state in theirs.optimizer.items():
        for key, value in state.items():
            torch.testing.assert_close(ours.optimizer[name][key], value, rtol=1e-9, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("compile",)], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_take_the_steps_of_one(alone, tmp_path, kind, more):
    run_two(tmp_path, kind, tmp_path / kind, "cpu", *more)
    assert_same_run(tmp_path / kind, alone)


def resume_alone(alone, out):
    saved = checkpoints.load(alone / "last.pt")
    train(GPTConfig(**saved.model_config), TrainConfig(**{**saved.train_config, "out": out}), resume=True)


@pytest.mark.slow  # engines/test_ranks.py has two ranks that take a step, and one that dies
def test_a_rank_that_dies_ends_the_run_with_one_line_and_another_number_of_processes_goes_on(alone, tmp_path):
    out = tmp_path / "run"
    told = run_two(tmp_path, "fsdp", out, dies="1:4").splitlines()
    assert len(told) == 1, told
    assert told[0].startswith("train: rank 1 of 2 (process ")
    assert told[0].endswith(") was ended by SIGKILL; the others were ended")
    assert checkpoints.load(out / "last.pt").step == 3
    resume_alone(alone, out)
    assert_same_run(out, alone)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_ranks_that_wait_end_with_what_started_them(tmp_path, number, status):
    out = tmp_path / "run"
    with start_two(tmp_path, "ddp", out, "cpu", "hangs") as processes:
        while processes.poll() is None and not (out / "last.pt").exists():
            time.sleep(0.1)
        processes.send_signal(number)
        _, told = processes.communicate()  # which returns when the ranks have closed their outputs, too
    assert (processes.returncode, told) == (status, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.multi_gpu, NEEDS_TWO_GPUS])]
)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_processes_that_are_asked_to_end_save_the_same_step(kind, device, alone, tmp_path):
    out = tmp_path / "run"
    with start_two(tmp_path, kind, out, device, "waits") as processes:
        while not (out / "metrics.jsonl").exists() or len(losses(out)) < 2:
            time.sleep(0.1)
        processes.send_signal(signal.SIGTERM)
        time.sleep(0.5)  # until torchrun has handed it on
        (out / "asked").touch()
        _, told = processes.communicate()
    assert (processes.returncode, told) == (143, "")
    for rank in "01":
        assert (out / f"ended by {rank}").read_text().startswith("ended by SIGTERM after step 2; ")
    assert checkpoints.load(out / "last.pt").step == 2
    resume_alone(alone, out)
    assert_same_run(out, alone)


@pytest.mark.slow
def test_a_run_goes_on_with_more_processes(alone, tmp_path):
    out = tmp_path / "run"
    run_two(tmp_path, "ddp", out, dies="0:4")
    assert checkpoints.load(out / "last.pt").step == 3
    run_two(tmp_path, "fsdp", out, "cpu", "resume")
    assert_same_run(out, alone)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@NEEDS_TWO_GPUS
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_gpus_take_the_steps_of_one(alone, tmp_path, kind):
    run_two(tmp_path, kind, tmp_path / kind, "cuda")
    assert_same_run(tmp_path / kind, alone)


def test_processes_and_settings_must_go_together(monkeypatch):
    config = TrainConfig(parallel="ddp", batch_size=6)
    for name in TORCHRUNS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")  # a scheduler's, by itself
    with pytest.raises(UserError, match="--processes 2, or torchrun --nproc-per-node 2"), join_world(config, "cpu"):
        pass
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="torchrun started 4 processes"), join_world(TrainConfig(), "cpu"):
        pass
    for name in TORCHRUNS - {"WORLD_SIZE"}:
        monkeypatch.setenv(name, "0")
    with (
        pytest.raises(UserError, match=r"multiple of processes · accumulation = 4 · 1, got 6"),
        join_world(config, "cpu"),
    ):
        pass


def test_processes_of_other_settings_or_another_text_do_not_train_together():
    """A command may have started each; with another rate, their weights would drift apart."""
    model, corpus = GPTConfig(), SimpleNamespace(sha256="ab")
    rows = []

    def processes(config, text, out):
        place = SimpleNamespace(about={}, gather=lambda row: rows.append(row) or np.stack(rows))
        loop._require_same_settings(place, model, replace(config, out=out), text, resume=False)

    processes(TrainConfig(), corpus, Path("here"))
    processes(TrainConfig(), corpus, Path("there"))
    with pytest.raises(UserError, match=r"the processes differ in lr, data; start all of them with the same options"):
        processes(TrainConfig(lr=0.1), SimpleNamespace(sha256="cd"), None)


@pytest.mark.parametrize(
    ("failures", "said", "status"),
    [
        ({0: (2, 100), 1: (-15, 100)}, "rank 0 .* ended with status 2", 2),  # torchrun ends the others
        ({0: (2, 100), 1: (-9, 130)}, "rank 0 .* ended with status 2", 2),  # and kills one that does not end
        ({0: (1, 100), 1: (-9, 101)}, "rank 1 .* was ended by SIGKILL", 137),  # whose end rank 0 noticed
        ({0: (1, 101), 1: (1, 100)}, "rank 1 .* ended with status 1", 1),
    ],
)
def test_the_rank_that_failed_first_is_named(failures, said, status):
    ended = {rank: SimpleNamespace(exitcode=code, timestamp=when, pid=7) for rank, (code, when) in failures.items()}
    failed = parallel._first_failure(ended, 2)
    assert re.match(said, str(failed))
    assert failed.status == status


def test_a_step_under_ddp_exchanges_gradients_alone(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        buffers, sent = _take_steps_under_ddp(monkeypatch)
        assert buffers
        assert not sent
    finally:
        dist.destroy_process_group()


def _take_steps_under_ddp(monkeypatch):
    """Return the buffers and what was sent of them. The wrapped model ends here: it may not outlive the group."""
    model = GPT(GPTConfig(vocab_size=32, n_layer=1, n_head=1, n_embd=8, block_size=4))
    wrapped = parallel.World("ddp", 0, 2, torch.device("cpu")).wrap(model)
    sent = []
    monkeypatch.setattr(dist, "_broadcast_coalesced", lambda *arguments: sent.append(arguments))
    for _ in range(2):
        wrapped(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)).backward()
    return list(model.buffers()), sent


def test_blocks_are_gathered_together_until_they_are_large(monkeypatch):
    monkeypatch.setattr(parallel, "_GATHERED", 4 * 8 * 4 * 2)  # the bytes of two layers of float32
    layers = [torch.nn.Linear(4, 8, bias=False) for _ in range(5)]
    wide = torch.nn.Linear(8, 16, bias=False)
    assert parallel._grouped([*layers, wide]) == [layers[:2], layers[2:4], [layers[4], wide]]
    assert parallel._grouped([wide, layers[0]]) == [[wide], [layers[0]]]
