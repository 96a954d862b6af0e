import os
import subprocess
import sys

import pytest
import torch

from torch_baseline import cli
from torch_baseline.parallel import RankFailed


def command(monkeypatch, capsys, *arguments):
    """Run the command line in this process; return its exit status, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["torch_baseline", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, *capsys.readouterr()


def test_train_resume_and_sample(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    options = ["--preset", "tiny", "--steps", "4", "--batch-size", "2", "--out", str(out), "--device", "cpu"]
    status, stdout, stderr = command(monkeypatch, capsys, "train", *options)
    assert (status, stderr) == (0, "")
    lines = stdout.splitlines()
    assert lines[0].startswith("text    pydoc_data.topics of Python")
    (last_step,) = (line for line in lines if line.startswith("step 4"))
    for part in ("loss", "lr", "grad norm", "tokens/s"):
        assert part in last_step
    assert "bits/byte" in lines[-2]
    assert "unigram entropy 4." in lines[-2]
    assert lines[-1].startswith("4 steps: ")

    status, stdout, stderr = command(monkeypatch, capsys, "train", *options, "--resume")
    assert (status, stdout) == (2, "")
    assert "finished (step 4)" in stderr

    status, stdout, stderr = command(monkeypatch, capsys, "sample", str(out), "--prompt", "def ", "--bytes", "20")
    assert (status, stderr) == (0, "")
    assert stdout.startswith("def ")
    assert len(stdout) > 8
    latin = os.fsdecode(b"caf\xe9")  # a prompt that was typed in another encoding
    assert command(monkeypatch, capsys, "sample", str(out), "--prompt", latin, "--bytes", "1")[0] == 0


def test_the_lowest_learning_rate_follows_the_highest():
    assert cli.settings("tiny", {"lr": 1e-4})[1].min_lr == pytest.approx(1e-5, rel=1e-15)
    assert cli.settings("tiny", {"lr": 3e-3})[1] == cli.settings("tiny", {"lr": None})[1]


def test_a_variable_of_some_scheduler_does_not_silence_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    text = tmp_path / "text"
    text.write_bytes(b"to be or not to be, " * 100)
    options = ["--steps", "1", "--batch-size", "2", "--data", str(text), "--device", "cpu"]
    assert command(monkeypatch, capsys, "train", *options)[1].startswith("text    text")


@pytest.mark.slow
def test_the_module_runs_on_a_file(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"to be or not to be, " * 100)
    options = ["--steps", "1", "--batch-size", "2", "--data", str(text), "--device", "cpu"]
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-m", "torch_baseline", "train", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("text    text, SHA-256")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--preset", "huge"], "unknown preset 'huge'"),
        (["train", "--device", "tpu"], "--device takes auto, cpu or cuda"),
        (["train", "--data", "no/such/file"], "cannot read the data file no/such/file"),
        (["train", "--lr", "-1"], "lr must be positive and finite, got -1.0"),
        (["train", "--lr", "inf"], "lr must be positive and finite, got inf"),
        (["train", "--seed", str(2**64)], f"seed must be below 2^64, got {2**64}"),
        (["train", "--parallel", "ddp", "--processes", "3"], "processes · accumulation = 3 · 1, got 16"),
        (["train", "--out", "x" * 300], "File name too long; use a shorter name"),
        (["train", "--resume"], "--resume needs the folder of the run"),
        (["sample", "no/such/run"], "there is no checkpoint no/such/run"),
        (["sample", "no/such/run", "--prompt", ""], "at least one byte"),
        (["train", "--out", "/proc/nowhere"], "/proc/nowhere cannot be written: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, arguments, message):
    status, stdout, stderr = command(monkeypatch, capsys, *arguments)
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert stderr.startswith("torch_baseline: ")
    assert stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_one_line(tmp_path, monkeypatch, capsys):
    status, stdout, stderr = command(monkeypatch, capsys, "train", "--device", "cuda", "--out", str(tmp_path / "run"))
    assert (status, stdout) == (2, "")
    assert stderr.startswith("torch_baseline: --device cuda was asked for, but")
    assert stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_run_that_diverges_is_one_line(tmp_path, monkeypatch, capsys):
    options = ["--steps", "30", "--batch-size", "2", "--lr", "1e30", "--device", "cpu"]
    status, _, stderr = command(monkeypatch, capsys, "train", *options)
    assert status == 1
    assert stderr.startswith("torch_baseline: step ")
    assert stderr.count("\n") == 1


def test_a_process_that_fails_is_one_line_that_says_what_is_kept(tmp_path, monkeypatch, capsys):
    started = []

    def fail(processes, program):
        started.append((processes, program))
        if len(started) == 2:
            (tmp_path / "last.pt").touch()
        raise RankFailed("rank 1 of 2 (process 7) was ended by SIGKILL; the others were ended", 137)

    monkeypatch.setattr(cli, "launch", fail)
    monkeypatch.delenv("RANK", raising=False)
    options = ["train", "--parallel", "ddp", "--processes", "2", "--out", str(tmp_path)]
    status, stdout, stderr = command(monkeypatch, capsys, *options)
    assert (status, stdout) == (137, "")
    assert stderr.endswith("SIGKILL; the others were ended; nothing is kept without a checkpoint in --out\n")
    assert started == [(2, ["-m", "torch_baseline", *options])]
    assert "has a checkpoint; continue with --resume, with any number" in command(monkeypatch, capsys, *options)[2]
    assert command(monkeypatch, capsys, *options)[2].endswith(f"the checkpoint in {tmp_path} is as it was\n")
    status, _, stderr = command(monkeypatch, capsys, "train", "--processes", "2")
    assert (status, len(started)) == (2, 3)
    assert "--processes 2 needs --parallel" in stderr
