"""Kernels that call operators from worker threads, where a shim on several threads would be a deadlock."""

import os
import sys

import warm_python

_PROGRAM = """
import torch
from torch.nn import functional as F
from dispatcher_trace import installed, record

torch.set_num_threads(2)

def attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 16, 8, generator=generator, requires_grad=True) for _ in range(3))
    F.scaled_dot_product_attention(q, k, v).sum().backward()
    return [q.grad, k.grad, v.grad]

def transposed_convolution():
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((4, 3, 8, 8), (3, 4, 3, 3)))
    with torch.backends.mkldnn.flags(enabled=False):
        F.conv_transpose2d(x, w).sum().backward()
    return [x.grad, w.grad]

expected = attention() + transposed_convolution()
with installed("core") as shims, record(shims, kernels=False):
    traced = attention() + transposed_convolution()
assert all(map(torch.equal, traced, expected))
assert torch.get_num_threads() == 2
"""


def test_such_kernels_run_and_are_bit_equal() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "2"}
    done = warm_python.run(["-c", _PROGRAM], env=environment)
    assert done.returncode == 0, done.stderr
