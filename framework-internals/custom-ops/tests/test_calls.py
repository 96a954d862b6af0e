"""The operators as compiled callables: the fast path, and the calls that are left to torch's own."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import custom_ops
from custom_ops.builds import autograd_nodes, loading
from custom_ops.builds.torch_internals import any_requires_grad, in_cpp
from custom_ops.operators.calls import Calls, calls

ops = torch.ops.custom_ops


@pytest.fixture
def quick() -> Any:
    """Makes a callable from an operator; its second argument replaces torch's own callable."""
    if custom_ops.load().autograd != "compiled nodes":
        pytest.skip("nothing is compiled for this torch")
    return autograd_nodes.operator_call(autograd_nodes.build())


class Recorder:
    """Replaces torch's own callable and counts its calls."""

    def __init__(self, overload: Any) -> None:
        self.call, self.count = in_cpp(overload), 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.count += 1
        return self.call(*arguments, **named)


@pytest.fixture
def recorded(quick: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An operator's callable, and the counter of the calls that it leaves to torch."""

    def make(overload: Any) -> tuple[Any, Recorder]:
        recorder = Recorder(overload)
        monkeypatch.setattr(autograd_nodes, "in_cpp", lambda _: recorder)
        return quick(overload), recorder

    return make


def test_the_short_way_takes_tensors_numbers_and_defaults(recorded: Any) -> None:
    axpb, left = recorded(ops.axpb.default)
    scale, also_left = recorded(ops.scale.default)
    x = torch.arange(3.0)
    assert torch.equal(axpb(x, torch.nn.Parameter(x), 2.0), 3 * x)
    assert torch.equal(scale(x), ops.scale(x))
    assert torch.equal(scale(x, 2.0), 2 * x)
    assert left.count == also_left.count == 0


def test_several_results_are_a_tuple(recorded: Any) -> None:
    backward, left = recorded(ops.bias_gelu_backward.default)
    x, bias = torch.randn(3, 4), torch.randn(4)
    results = backward(x, x, bias)
    assert isinstance(results, tuple)
    assert all(torch.equal(a, b) for a, b in zip(results, ops.bias_gelu_backward(x, x, bias), strict=True))
    assert left.count == 0


def test_the_rest_is_left_to_torch(recorded: Any) -> None:
    axpb, left = recorded(ops.axpb.default)
    x = torch.arange(3.0)

    class Watching(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
            seen.append(function)
            return function(*arguments, **(named or {}))

    class Subclass(Tensor):
        pass

    seen: list[Any] = []
    assert torch.equal(axpb(x, x, alpha=2.0), 3 * x)
    assert torch.equal(axpb(x, x, 2), 3 * x)
    assert type(axpb(x.as_subclass(Subclass), x, 2.0)) is Subclass
    with Watching():
        axpb(x, x, 2.0)
    assert seen == [ops.axpb.default]
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert axpb(fake, fake, 2.0).shape == (3,)
    assert left.count == 5


@pytest.mark.parametrize("arguments", [(), (1.0,), (torch.ones(1),), (torch.ones(1), torch.ones(1), 1.0, 2.0)])
def test_wrong_arguments_are_refused_by_torch(recorded: Any, arguments: tuple[Any, ...]) -> None:
    call, left = recorded(ops.axpb.default)
    with pytest.raises(RuntimeError, match=r"custom_ops::axpb\(\)"):
        call(*arguments)
    assert left.count == 1


def test_an_integer_too_large_for_the_schema_is_refused(recorded: Any) -> None:
    call, left = recorded(torch.ops.custom_ops_kernels.bias_gelu.access)
    x = torch.ones(1, 1)
    assert torch.equal(call(x, x[0], 1), ops.bias_gelu(x, x[0]))
    assert left.count == 0
    with pytest.raises(RuntimeError):
        call(x, x[0], 2**64)
    assert left.count == 1


def test_nothing_is_kept_of_a_call(recorded: Any) -> None:
    call, left = recorded(ops.vector_add.default)
    x = torch.ones(2)
    before = sys.getrefcount(x), sys.getrefcount(call)
    for _ in range(50):
        call(x, x)
        with pytest.raises(RuntimeError, match="like 'a'"):
            call(x, x[:1])
    assert (sys.getrefcount(x), sys.getrefcount(call)) == before
    result = call(x, x)
    last = weakref.ref(result)
    del result
    assert last() is None
    with_call = sys.getrefcount(left)
    del call
    assert sys.getrefcount(left) == with_call - 1


def test_keys_above_the_kernels_see_the_call(quick: Any) -> None:
    call, x = quick(ops.vector_add.default), torch.arange(6.0).view(2, 3)
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
            seen.append(function)
            return function(*arguments, **(named or {}))

    with Watching():
        call(x, x)
    assert seen == [ops.vector_add.default]
    assert torch.equal(torch.func.grad(lambda y: call(y, x).sum())(x), torch.ones_like(x))
    with torch.autocast("cpu"):
        assert call(x.bfloat16(), x).dtype == torch.float32  # the wider of the two: autocast's rule for vector_add
    with torch.inference_mode():
        assert call(x, x).is_inference()


def test_other_threads_run_while_an_operator_does(quick: Any) -> None:
    call, gate, ran = quick(ops.bias_gelu.default), threading.Lock(), threading.Event()
    x, bias = torch.randn(2_000, 2_000), torch.randn(2_000)
    gate.acquire()
    thread = threading.Thread(target=lambda: (gate.acquire(), ran.set()))
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the interpreter is handed on by whoever gives it up, not by the clock
    try:
        gate.release()
        assert not ran.is_set()
        for _ in range(20):
            call(x, bias)
        assert ran.is_set()
    finally:
        sys.setswitchinterval(before)
        thread.join()


def test_the_functions_reach_torch_whole_in_a_trace() -> None:
    x = torch.ones(3)
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda y: custom_ops.axpb(y, y, 2.0))(x)
    assert ops.axpb.default in [node.target for node in traced.graph.nodes]


def test_the_registry_names_the_operators() -> None:
    names = {rules.name for rules in loading.operators()}
    assert names == set(Calls.__annotations__) - {"ready", "load"}
    assert names <= set(vars(calls))


def test_whether_anything_requires_a_gradient_is_asked_of_torch() -> None:
    x = torch.ones(1)
    assert not any_requires_grad(x, 1.0, None)
    assert any_requires_grad(x, x.clone().requires_grad_())
