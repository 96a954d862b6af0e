"""Python modes after the shims are removed. The dispatch tables do not show this state."""

import torch
import torch._dynamo  # which registers a hundred operators: outside of the trace that is fast
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatcher_trace import trace


@torch.library.custom_op("dispatcher_trace_removed::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    return x + x


@_twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_twice.register_autograd(lambda ctx, gradient: gradient + gradient)


def test_a_custom_operator_is_traced_and_works_as_before_afterwards() -> None:
    x = torch.ones(3, requires_grad=True)
    with trace(kernels=False) as t:
        _twice(x).sum().backward()
        with FakeTensorMode():
            assert _twice(torch.empty(3)).shape == (3,)
    own = next(call for call in t.calls if call.operator == "dispatcher_trace_removed::twice")
    assert own.path == ("AutogradCPU", "CPU")
    assert [call.operator for call in own.hops[1].calls] == ["aten::add.Tensor"]
    assert own.hops[1].where.startswith("tests/test_after_removal.py:")
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    with FakeTensorMode():  # which finds torch's own Python kernels
        x = torch.empty(3, 5, 24, requires_grad=True)
        made = torch.ops.aten.new_empty_strided(x, [3, 5], [5, 1])
        viewed = torch.ops.prims.view_of(x.detach())
    assert (made.shape, viewed.shape) == ((3, 5), x.shape)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")  # AOTAutograd's is the compiled call
    torch.library.opcheck(_twice, (torch.ones(3, requires_grad=True),), test_utils=tests)
    compiled = torch.compile(lambda y: _twice(y) + 1, backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.ones(3, requires_grad=True)
    compiled(x).sum().backward()
    assert torch.equal(compiled(x), torch.full((3,), 3.0))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 2.0))
