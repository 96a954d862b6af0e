"""DTensors: rows sharded over two processes give what one process gives."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from rmsnorm_fused import rms_norm

rank, meeting, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
x, residual, weight = (torch.randn(shape, dtype=torch.float64) for shape in ((4, 6, 16), (4, 6, 16), (16,)))

def gradients(x, weight, residual):
    y, s = rms_norm(x, weight, residual=residual, eps=1e-6, backend=backend)
    (y.square().sum() + s.sum()).backward()
    return y.detach(), x.grad, weight.grad

alone = gradients(x.clone().requires_grad_(), weight.clone().requires_grad_(), residual)
for dim in range(3):
    together = gradients(
        distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_(),
        distribute_tensor(weight, mesh, [Replicate()]).requires_grad_(),
        distribute_tensor(residual, mesh, [Shard(dim)]),
    )
    # Rows may be sharded, a row may not: it is gathered first.
    assert together[0].placements[0] == (Shard(dim) if dim < 2 else Replicate()), together[0].placements
    for one, other in zip(alone, together, strict=True):  # some 40 roundings of terms no 20 times as large as a result
        torch.testing.assert_close(other.full_tensor(), one, rtol=0, atol=1e-13 * one.abs().max().item())
dist.destroy_process_group()
# DTensor keeps the group and with it gloo's threads, which may abort a Python that shuts down (pytorch#179291).
os._exit(0)
"""


@pytest.mark.slow
def test_two_processes_share_the_rows(tmp_path):
    programs = [[sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "meeting"), "cpp"] for rank in range(2)]
    processes = [subprocess.Popen(program, stderr=subprocess.PIPE, text=True) for program in programs]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
