"""Training in several processes under torchrun: DDP (each has the whole model) or FSDP2 (each has a shard)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchkit import UserError
from torch_baseline.config import TrainConfig
from torch_baseline.model import GPT

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

Kind = Literal["none", "ddp", "fsdp"]


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

    def wrap(self, model: GPT) -> nn.Module:
        """Return the module to call in a training step; parameters keep their names in ``model`` itself."""
        if self.kind == "ddp":
            return DistributedDataParallel(model, device_ids=[self.device] if self.device.type == "cuda" else None)
        if self.kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        return model

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
    if "RANK" not in os.environ:
        raise UserError(
            f"parallel {config.parallel} needs several processes: "
            f"torchrun --nproc-per-node 2 -m torch_baseline train --parallel {config.parallel} …"
        )
    if config.batch_size % (size * config.accumulation):
        raise UserError(
            f"batch_size must be a multiple of processes · accumulation = {size} · {config.accumulation}, "
            f"got {config.batch_size}"
        )
    own = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if own.type == "cuda" else "gloo")
    try:
        yield World(config.parallel, dist.get_rank(), size, own)
    finally:
        dist.destroy_process_group()
        if own.type == "cpu":
            # A gloo thread releases the tensors of a collective some time after it has finished. If that happens during
            # Python's shutdown, the process aborts (pytorch/pytorch#179291). The group would wait for its threads, but
            # torch's caches of layouts keep it alive. So the threads get a moment to finish.
            time.sleep(0.1)


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
