"""The backward on autograd's own thread, compared with the profiler and with a run without shims."""

from collections import Counter

import pytest
import torch

from dispatcher_trace import installed, record
from dispatcher_trace.capture import profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]


def test_backward_on_autograds_thread_is_recorded_and_bit_equal() -> None:
    def step() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        a, b = (
            torch.randn(256, 256, generator=generator).to("cuda", torch.bfloat16).requires_grad_() for _ in range(2)
        )
        loss = ((a + b) @ b).float().softmax(-1).pow(2).sum() / 3
        loss.backward()
        assert a.grad is not None
        assert b.grad is not None
        return [loss.detach(), a.grad, b.grad]

    step()
    with profile.profiled() as profiled:
        expected = step()
    operators = Counter(profile.operator_names(profiled.events))
    with installed("all") as shims, record(shims) as t:
        result = step()
    assert all(map(torch.equal, result, expected))
    ours = Counter(call.operator.partition(".")[0] for call in t.all_calls)
    assert ours == operators
    threads = {hop.thread for hop in t.hops}
    assert "main" in threads
    workers = {hop.thread for hop in t.hops if hop.node.startswith("MmBackward0")}
    assert len(workers) == 1
    assert workers.pop().startswith("autograd worker")
    backward = [call for call in t.all_calls if call.operator == "aten::mm" and call.hops[0].node]
    assert len(backward) == 2
    assert all(call.kernels for call in backward)
    assert t.match is not None
    assert t.match.untied_kernels == 0
