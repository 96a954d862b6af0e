"""Several processes train one model, started by torchrun: DDP (a whole model each) or FSDP2 (a share of it each)."""

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
    """This process among the others.

    Attributes:
        kind: how the model is spread.
        rank: this process, from 0.
        size: number of processes.
        device: of this process.
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
        """Return what to call for a training step; parameters keep their names in ``model`` itself."""
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
    """Join the processes that torchrun started, and leave them again.

    Args:
        config: its ``parallel``, and the batch that is to be divided.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL, one GPU a process).

    Raises:
        UserError: if ``parallel`` and the way this process was started do not go together, or the batch does not
            divide.
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
            # A thread of gloo lets go of a collective's tensors some time after the collective is done. Where that
            # falls into Python's shutdown it aborts a process that has done all its work (pytorch/pytorch#179291), and
            # torch's caches of layouts keep the group, which would wait for its threads, alive. So they get a moment.
            time.sleep(0.1)


def synchronise_gradients(model: nn.Module, on: bool) -> None:
    """Say, before a forward pass, whether its backward exchanges gradients: only a step's last micro-batch has to."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = on
    elif _is_fsdp(model):
        model.set_requires_gradient_sync(on)


def release_gathered(model: nn.Module) -> None:
    """Let go of what FSDP gathered for a forward pass that no backward pass followed: parameters are shares again."""
    if _is_fsdp(model):
        model.reshard()


def whole(value: Tensor) -> Tensor:
    """Return all of a tensor that may be spread over processes; all of them must call it."""
    return value.full_tensor() if _is_spread(value) else value


def spread_like(value: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor on the device of another and, if that is spread over processes, spread as it is."""
    value = value.to(like.device)
    if not _is_spread(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements)


# Sharded tensors and modules live in packages that take seconds to import (they bring sympy), so that a single process
# does not ask for them.


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
