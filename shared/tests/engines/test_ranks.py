"""An engine in two processes (gloo) against the same step in one, and what a GPU's trace says of a step."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from benchkit import UserError
from engines.kernel_times import GpuTime, gpu_time
from engines.ranks import make_engine
from engines.spec import EngineSpec, bench_config
from engines.torch_engine import TorchEngine

MODEL, TRAINING = bench_config("tiny", batch_size=2, dtype="float64", layers=1, block_size=32)


def engine(training=TRAINING, **devices):
    return make_engine(EngineSpec("torch", compiled=False, **devices), MODEL, training, "cpu")


def rank(number):
    """The process of a rank that this process has started."""
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            if f"RANK={number}".encode() in Path("/proc", child, "environ").read_bytes().split(b"\0"):
                return int(child)
    raise AssertionError(f"no process of rank {number}")


def test_two_ranks_take_the_step_of_one_and_a_rank_that_dies_is_named():
    together, alone = engine(fsdp=2), engine(replace(TRAINING, batch_size=4))
    assert isinstance(alone, TorchEngine)
    # The same sums in another order: 128 positions a step give 128·u = 1.4e-14. Adam's quotient, near ±1 in the first
    # steps whatever the gradient's size, hands a gradient's relative error on.
    assert together.prepare().loss == pytest.approx(alone.prepare().loss, rel=1e-13)
    for step in (1, 2):
        together.run(step)
        alone.run(step)
        assert together.next_loss() == pytest.approx(alone.next_loss(), rel=2e-12)
    assert together.peak_memory() is together.gpu_time(1) is None
    os.kill(rank(1), signal.SIGKILL)
    with pytest.raises(UserError, match=r"rank 1 of 2 \(process \d+\) was ended by SIGKILL"):
        together.run(1)


@pytest.mark.slow
def test_the_reason_of_a_rank_that_fails_is_the_engines():
    with pytest.raises(UserError, match="no_such_module"):
        engine(data=2, parts="no_such_module:parts")


def test_several_processes_take_a_plain_step():
    with pytest.raises(ValueError, match="plain step of the GPT, got torch, data=2, graph=True"):
        EngineSpec("torch", data=2, graph=True)
    with pytest.raises(ValueError, match="got 2 × 2"):
        EngineSpec("torch", data=2, fsdp=2)


def test_communication_that_computing_hides_does_not_count():
    def event(name, start, stop, category="kernel"):
        return {"name": name, "ts": start, "dur": stop - start, "cat": category}

    events = [
        event("gemm", 0, 10),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 5, 18),  # 8 of it alone
        event("Memcpy DtoD", 16, 20, "gpu_memcpy"),
        event("gemm", 30, 40),
        event("nccl:all_reduce", 0, 40, "gpu_user_annotation"),
        {"name": "process_name", "ph": "M"},
    ]
    found = gpu_time(json.loads(json.dumps(events)), steps=2)
    assert found == pytest.approx(GpuTime(computing=12e-6, communicating=3e-6, idle=5e-6))
    assert gpu_time([], steps=2) == GpuTime(0.0, 0.0, 0.0)
