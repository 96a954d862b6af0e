"""Training in several processes under torchrun: DDP (each has the whole model) or FSDP2 (each has a shard)."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchkit import UserError
from torch_baseline.config import TrainConfig
from torch_baseline.model import GPT

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

Kind = Literal["none", "ddp", "fsdp"]

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# How gloo says that another process has ended. torchrun knows it too and ends this one within the seconds; a traceback
# would hide which of them was first.
_LOST = re.compile(r"(?:closed|reset) by peer|Broken pipe", re.IGNORECASE)
_UNTIL_ENDED = 5.0

# Bytes of gradients up to which DDP exchanges them all after the backward pass. While NCCL runs, products of matrices
# wait for its multiprocessors, and over NVLink the exchange takes a few milliseconds: on two H100, gpt2-124m takes
# 65.2 ms a step so, and 66.3 with torch's buckets of 25 MiB. The model is then compiled whole, as in a single process.
# Of larger models most is exchanged beside the backward pass.
_AT_ONCE = 500 << 20

# Bytes of weights that FSDP gathers at once, at least. Each gathering takes the host as long as a small block the GPU.
_GATHERED = 100 << 20

# torchrun kills a process that is still there so many seconds after it was asked to end.
_UNTIL_KILLED = 30 - _UNTIL_ENDED


class RankFailed(UserError):
    """A process of several has ended before its work was done; the others have been ended.

    Attributes:
        status: Exit status of the first that failed, as a shell gives it: 128 + the number of a signal that ended it.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def launch(processes: int, program: Sequence[str]) -> None:
    """Run a Python program in several processes of this machine under torchrun, and wait for them.

    torchrun looks after the processes: when one fails, it ends the others, those that wait for it too, at the latest
    after 30 seconds.

    Args:
        processes: Number of processes.
        program: What follows ``python``: a file, or ``-m`` and a module, and the arguments.

    Raises:
        RankFailed: If a process fails; one line names the first.
        KeyboardInterrupt: After an interrupt, when the processes have ended.
        SystemExit: After another signal that asks this process to end, likewise.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # torchrun would log a page about a failure, of which the line below is what matters.
    torchruns = logging.getLogger("torch.distributed.elastic")
    torchruns.addHandler(logging.NullHandler())
    torchruns.propagate = False
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)(*program)
    except ChildFailedError as error:
        raise _first_failure(error.failures, processes) from None
    except SignalException as asked:
        if asked.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + asked.sigval) from None


def _first_failure(failures: Mapping[int, ProcessFailure], processes: int) -> RankFailed:
    """Name the rank that failed first: before one with a status one that was killed, whose end the others noticed.

    Those that torchrun ended because of it are among the failures, too.
    """
    earliest = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, bool, int]:
        failure = failures[rank]
        ended_by_torchrun = failure.exitcode == -signal.SIGTERM or failure.timestamp > earliest + _UNTIL_KILLED
        return ended_by_torchrun, failure.exitcode >= 0, failure.timestamp

    rank = min(failures, key=order)
    code = failures[rank].exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    where = f"rank {rank} of {processes} (process {failures[rank].pid})"
    return RankFailed(f"{where} {how}; the others were ended", code if code >= 0 else 128 - code)


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them.

    Attributes:
        kind: How the model is distributed.
        rank: Rank of this process, from 0.
        size: Number of processes.
        device: Device of this process.
    """

    kind: Kind
    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def shard_weights(self, model: GPT) -> None:
        """Let each process keep a part of every weight under FSDP; before the model's optimizer is made."""
        if self.kind == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            # By default the processes would be a mesh of GPUs wherever torch sees one.
            mesh = init_device_mesh(self.device.type, (self.size,))
            for blocks in _grouped(model.blocks):
                fully_shard(blocks, mesh=mesh)
            fully_shard(model, mesh=mesh)

    def wrap(self, model: GPT) -> nn.Module:
        """Return the module to call in a training step; parameters keep their names in ``model`` itself.

        Call it when the optimizer is made, which may change the dtype of weights: DDP's buckets have that dtype.
        """
        if self.kind != "ddp":
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        bucket = _AT_ONCE >> 20 if self._exchanges_at_once(model) else None  # in MiB; None is torch's choice
        wrapped = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, bucket_cap_mb=bucket)
        # The buffers are constants. Sending them would be the first thing of every step, and the GPU would wait for the
        # host meanwhile. The argument of this name is deprecated in torch 2.13, and the one that replaces it is new.
        wrapped.broadcast_buffers = False
        return wrapped

    def compile(self, model: GPT) -> None:
        """Compile the model: whole, or in parts where processes exchange gradients or weights beside them.

        Args:
            model: The model that :meth:`wrap` was called with. DDP's hooks run outside of what is compiled.
        """
        # Splitting what is compiled where DDP's buckets end would undo fusions.
        torch._dynamo.config.optimize_ddp = False
        if self.size == 1 or self._exchanges_at_once(model):
            model.compile()
        else:
            model.compile_parts()

    def _exchanges_at_once(self, model: GPT) -> bool:
        return self.kind == "ddp" and _parameter_bytes([model]) <= _AT_ONCE

    def meet(self) -> None:
        """Wait until all processes have come here. Their devices are not asked to do anything."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(()))

    def anywhere(self, value: bool) -> bool:
        """Return whether the value is true in any process. Their devices are not asked to do anything."""
        total = torch.tensor(float(value))
        dist.all_reduce(total)
        return bool(total)

    def shard(self, x_BT: Tensor) -> Tensor:
        """Return this process's rows of a batch."""
        return x_BT.chunk(self.size)[self.rank]

    def mean(self, value: Tensor) -> Tensor:
        """Return the average of a value over all processes."""
        if self.size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total / self.size

    def gather(self, row: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return the rows of all processes, one below the other."""
        rows: list[NDArray[np.uint32]] = [row] * self.size
        dist.all_gather_object(rows, row)
        return np.stack(rows)


def _grouped(blocks: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Consecutive blocks whose weights are gathered, and their gradients exchanged, together."""
    groups: list[list[nn.Module]] = [[]]
    for block in blocks:
        if _parameter_bytes(groups[-1]) >= _GATHERED:
            groups.append([])
        groups[-1].append(block)
    return groups


def _parameter_bytes(blocks: Iterable[nn.Module]) -> int:
    return sum(parameter.nbytes for block in blocks for parameter in block.parameters())


def started_by_torchrun() -> bool:
    """Whether this process is one of several: a scheduler may set some of torchrun's variables, too."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def is_first_process() -> bool:
    """Whether this process is alone, or the first of several."""
    return not started_by_torchrun() or os.environ["RANK"] == "0"


def require_equal_shares(config: TrainConfig, processes: int) -> None:
    """Check that every process gets as many sequences of each micro-batch.

    Raises:
        UserError: If the batch is not divisible.
    """
    if config.batch_size % (processes * config.accumulation):
        raise UserError(
            f"batch_size must be a multiple of processes · accumulation = {processes} · {config.accumulation}, "
            f"got {config.batch_size}"
        )


@contextmanager
def join_world(config: TrainConfig, device: str) -> Iterator[World]:
    """Join the process group that torchrun prepared, and leave it at the end of the block.

    Args:
        config: ``parallel``, ``batch_size`` and ``accumulation`` are used.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL, one GPU per process).

    Raises:
        UserError: If ``parallel`` does not fit the way this process was started, or the batch is not divisible.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if config.parallel == "none":
        if size > 1:
            raise UserError(f"torchrun started {size} processes, but parallel is none; add --parallel ddp or fsdp")
        yield World("none", 0, 1, torch.device(device))
        return
    if not started_by_torchrun():
        raise UserError(
            f"parallel {config.parallel} needs several processes: "
            f"--processes 2, or torchrun --nproc-per-node 2 -m torch_baseline train --parallel {config.parallel} …"
        )
    require_equal_shares(config, size)
    _end_with_torchrun()
    own = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group("cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo")
    try:
        yield World(config.parallel, dist.get_rank(), size, own)
    except RuntimeError as error:
        if _LOST.search(str(error)):
            time.sleep(_UNTIL_ENDED)
        raise
    finally:
        dist.destroy_process_group()
        # A gloo thread, of which a run on GPUs has one too, releases the tensors of a collective some time after it has
        # finished, and takes the interpreter's lock for that. During Python's shutdown the process would abort
        # (pytorch/pytorch#179291). While DDP's reducer is deleted, as the last that holds the group, it would wait for
        # ever: the reducer waits for the thread and keeps the lock. So the threads get a moment to finish.
        time.sleep(0.1)


def _end_with_torchrun() -> None:
    """Ask the kernel to end this process when torchrun is killed, which then cannot end it. Linux alone knows how."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def synchronise_gradients(model: nn.Module, on: bool) -> None:
    """Set whether the next backward pass exchanges gradients, which only a step's last micro-batch has to."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = on
    elif _is_fsdp(model):
        model.set_requires_gradient_sync(on)


def release_gathered(model: nn.Module) -> None:
    """Free what FSDP gathered for a forward pass without a backward pass, so that parameters are shards again."""
    if _is_fsdp(model):
        model.reshard()


def whole(value: Tensor) -> Tensor:
    """Return the full tensor of one that may be sharded; all processes must call it."""
    return value.full_tensor() if _is_spread(value) else value


def spread_like(value: Tensor, like: Tensor) -> Tensor:
    """Return a full tensor on the device of ``like``, and sharded like it if ``like`` is sharded."""
    value = value.to(like.device)
    if not _is_spread(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements)


# The packages of sharded tensors and modules take seconds to import (they import sympy), and a single process does not
# need them.


def _is_spread(value: Tensor) -> TypeGuard[DTensor]:
    if not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _is_fsdp(model: nn.Module) -> TypeGuard[FSDPModule]:
    if not dist.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)
