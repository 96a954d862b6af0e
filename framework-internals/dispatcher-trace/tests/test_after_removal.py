"""What a removed installation leaves behind for Python modes, which the dispatch tables do not show."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatcher_trace import installed


def test_fake_tensors_find_torchs_own_python_kernels_afterwards() -> None:
    with installed("all"):
        pass
    with FakeTensorMode():
        x = torch.empty(3, 5, 24, requires_grad=True)
        made = torch.ops.aten.new_empty_strided(x, [3, 5], [5, 1])
        viewed = torch.ops.prims.view_of(x.detach())
    assert made.shape == (3, 5)
    assert viewed.shape == x.shape
