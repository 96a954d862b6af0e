"""Meshes of forced CPU devices, in a process of their own, and two processes that train as one."""

import json
import os
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchkit import UserError
from benchkit.processes import RemoteObject
from jax_baseline.gpt.sharding import make_mesh, state_sharding
from jax_baseline.gpt.train import initial_state
from jax_baseline.parity.gpt.meshes import MeshTrial
from torch_baseline import checkpoint as checkpoints
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.model import parameter_shapes

MODEL = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 12}
TRAINING = {"steps": 5, "batch_size": 8, "warmup": 2, "lr": 1e-3, "min_lr": 1e-4}
FLOOR = 8 * 5.5 * float(np.finfo(np.float32).eps)  # of a loss near 5.5 nats, as parity's


@pytest.fixture(scope="module")
def trial():
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
    }
    with RemoteObject(MeshTrial, {"model": MODEL, "training": TRAINING}, environment=environment) as made:
        yield made


@pytest.fixture(scope="module")
def alone(trial):
    return trial.call("run", data=1, fsdp=1)


@pytest.mark.parametrize(
    ("data", "fsdp", "collectives"),
    [
        pytest.param(4, 1, {"all-reduce"}, marks=pytest.mark.slow),
        pytest.param(1, 4, {"all-reduce", "all-gather"}, marks=pytest.mark.slow),
        (2, 2, {"all-reduce", "all-gather"}),
    ],
)
def test_meshes_train_as_one_device_does(trial, alone, data, fsdp, collectives):
    found = trial.call("run", data=data, fsdp=fsdp)
    assert np.abs(np.array(found.losses) - alone.losses).max() <= FLOOR
    assert collectives <= found.collectives.keys()
    # Shares of what fsdp divides, and whole what it does not.
    assert found.state_bytes <= alone.state_bytes / fsdp * 1.05
    assert alone.collectives == {}


TWO = """
import json, sys, jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
from pathlib import Path
from jax_baseline.gpt.loop import Execution, train
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.records import StepLog
logs = []
training = TrainConfig(**json.loads(sys.argv[4]), out=Path(sys.argv[5]))
train(GPTConfig(**json.loads(sys.argv[3])), training, execution=Execution(data=1, fsdp=2), report=logs.append)
print(json.dumps([log.loss for log in logs if isinstance(log, StepLog)]), flush=True)
"""


def two_processes(training, folder):
    """Start both processes of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    arguments = [json.dumps(MODEL), json.dumps(training), str(folder)]
    return [
        subprocess.Popen(
            [sys.executable, "-c", TWO, str(port), str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]


@pytest.mark.slow
def test_two_processes_end_after_the_same_step_when_one_gets_sigterm(tmp_path):
    """A process that ended alone left the other waiting for ever."""
    training = {**TRAINING, "steps": 100_000, "eval_interval": 0, "checkpoint_interval": 0}
    children = two_processes(training, tmp_path)
    try:
        metrics = tmp_path / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
            assert [child.poll() for child in children] == [None, None]
            time.sleep(0.1)
        children[1].terminate()
        errors = [child.communicate()[1] for child in children]
    finally:
        for child in children:
            child.kill()
    ends = {line.partition("after step ")[2] for text in errors for line in text.splitlines() if "Terminated: " in line}
    assert len(ends) == 1, errors
    assert checkpoints.load(tmp_path / "last.pt").step == int(next(iter(ends)).partition(";")[0])


@pytest.mark.slow
def test_two_processes_train_as_one_device_does(alone, tmp_path):
    seen = []
    for child in two_processes(TRAINING, tmp_path):
        output, errors = child.communicate()
        assert child.returncode == 0, errors
        seen.append(json.loads(output.splitlines()[-1]))
    assert seen[0] == seen[1]
    assert np.abs(np.array(seen[0]) - alone.losses).max() <= FLOOR
    saved = checkpoints.load(tmp_path / "last.pt")  # the shares of both
    assert saved.step == TRAINING["steps"]
    assert {name: tuple(array.shape) for name, array in saved.model.items()} == parameter_shapes(GPTConfig(**MODEL))


@pytest.mark.slow
def test_two_processes_name_a_gradient_that_is_not_finite(tmp_path):
    """Each has a share of the weights only."""
    for child in two_processes({**TRAINING, "lr": 1e30, "warmup": 0}, tmp_path):
        _, errors = child.communicate()
        assert "NonFiniteError: step 2: the loss is nan" in errors
        assert "parameters are finite, the gradient of " in errors


@pytest.mark.parametrize("scan", [False, True])
def test_shares_leave_the_axis_of_layers_whole(scan):
    state = jax.eval_shape(lambda: initial_state(GPTConfig(**MODEL), TrainConfig(**TRAINING), scan=scan))
    found = state_sharding(state, jax.sharding.AbstractMesh((1, 2), ("data", "fsdp")))
    blocks = found.params.blocks if scan else found.params.blocks[0]
    specs = {"qkv": blocks.qkv.spec, "norm": blocks.attention_norm.spec, "embedding": found.params.embedding.spec}
    layers = (None,) if scan else ()
    assert specs == {
        "qkv": PartitionSpec(*layers, "fsdp"),
        "norm": PartitionSpec(*layers, "fsdp"),
        "embedding": PartitionSpec("fsdp"),
    }


def test_too_few_devices_is_one_line():
    with pytest.raises(UserError, match=r"a mesh of 3 × 7 needs 21 devices, there are 1 \(cpu\)"):
        make_mesh(3, 7, jax.devices("cpu")[:1])


@pytest.mark.multi_gpu
@pytest.mark.timeout(200, method="thread")  # NCCL waits for ever
def test_two_gpus_train_as_one_does():
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two CUDA GPUs that JAX sees")
    arguments = {"model": MODEL, "training": TRAINING}
    with RemoteObject(MeshTrial, arguments, limit=100) as trial:
        alone = trial.call("run", data=1, fsdp=1)
        for data, fsdp in ((2, 1), (1, 2)):
            found = trial.call("run", data=data, fsdp=fsdp)
            assert np.abs(np.array(found.losses) - alone.losses).max() <= FLOOR
