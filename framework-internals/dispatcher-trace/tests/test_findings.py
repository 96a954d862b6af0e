"""Which copies are hidden, by what the user's line calls; fallbacks; what ran above the dispatcher."""

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from dispatcher_trace import Shims, installed
from dispatcher_trace.capture.types import Call
from dispatcher_trace.explain.findings import findings

from .conftest import Traced

NAMESPACE = "dispatcher_trace_findings"
library = torch.library.Library(NAMESPACE, "DEF")


def _below_autograd(keys: object, x: Tensor) -> Tensor:
    return x.detach() * 3


for name in ("no_derivative", "ends"):
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x.detach() * 2, "CPU")
library.impl("ends", _below_autograd, "AutogradCPU", with_keyset=True)


@pytest.fixture(scope="module")
def shims(usual_operators: list[str]) -> Iterator[Shims]:
    torch.vmap(torch.sin)(torch.ones(2))  # the first use of a transform registers operators of torch's own
    with installed("all", only=[*usual_operators, f"{NAMESPACE}::no_derivative", f"{NAMESPACE}::ends"]) as shims:
        yield shims


X, X64 = torch.ones(3, 4), torch.ones(3, 4, dtype=torch.float64)
cast = X.to


def _backward_of_a_cast() -> None:
    w = torch.ones(3, requires_grad=True)
    (w.to(torch.bfloat16) * 2).sum().backward()


def _assigned() -> None:
    y = torch.zeros(3, 4)
    y[:] = X64


def _backward_of_a_copy_in_place() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.zeros(3, dtype=torch.float64)
    y.copy_(x).sum().backward()


def _backward_of_an_assignment() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.zeros(6, dtype=torch.float64)
    y[:3] = x
    y.sum().backward()


ASKED: dict[str, Callable[[], object]] = {
    "contiguous": lambda: X.t().contiguous(),
    "to": lambda: X.to(torch.bfloat16),
    "to, by name": lambda: X.to(dtype=torch.float64),
    "to, unpacked": lambda: X.to(*(torch.float64,)),
    "half": lambda: X.half(),
    "to meta": lambda: X.to("meta"),
    "inside another call": lambda: torch.relu(X.to(torch.float64)),
    "under another name": lambda: cast(torch.float64),
    "a partial": functools.partial(torch.Tensor.to, X, torch.float64),
    "deepcopy": lambda: copy.deepcopy(X),
    "a module's cast": lambda: nn.Linear(2, 3).to(torch.bfloat16),
    "in an assignment": _assigned,
    "repeat": lambda: X.repeat(2, 2),
    "its backward": _backward_of_a_cast,
    "the backward of copy_": _backward_of_a_copy_in_place,
    "the backward of an assignment": _backward_of_an_assignment,
    "over two lines": lambda: X.t().contiguous().view(-1),
    "clone": lambda: X.clone(),
    "copy_": lambda: torch.empty(3, 4).copy_(X),
    "contiguous already": lambda: X.contiguous(),
    "to its own dtype": lambda: X.to(torch.float32),
    "a view": lambda: X.reshape(-1),
    "a number, which is one element": lambda: X * 2,
}
HIDDEN: dict[str, Callable[[], object]] = {
    "reshape": lambda: X.t().reshape(-1),
    "flatten": lambda: torch.flatten(X.t()),
    "promotion": lambda: X + X64,
    "torch's own contiguous": lambda: nn.MultiheadAttention(8, 2)(*[torch.ones(2, 3, 8)] * 3),
    "an index": lambda: X[torch.tensor([0, 1], dtype=torch.int32)],
}


@pytest.mark.parametrize("name", ASKED)
def test_a_copy_that_the_line_asks_for_is_not_hidden(name: str, traced: Traced) -> None:
    assert [str(found) for found in traced(ASKED[name]).findings if found.kind == "copy"] == []


@pytest.mark.parametrize("name", HIDDEN)
def test_a_copy_that_the_line_does_not_ask_for_is_hidden(name: str, traced: Traced) -> None:
    assert "copy" in [found.kind for found in traced(HIDDEN[name]).findings]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_an_operator_without_batching_rule_is_found(traced: Traced) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    t = traced(lambda: torch.vmap(lambda row: torch.histc(row, 4, -2.0, 2.0))(x))
    (found,) = t.findings
    assert (found.kind, found.operator) == ("vmap fallback", "aten::histc")
    assert "ran 5 times" in found.detail
    assert not traced(lambda: torch.vmap(torch.sin)(x)).findings


def test_a_gradient_that_is_lost_is_found(traced: Traced) -> None:
    no_derivative = torch.ops.dispatcher_trace_findings.no_derivative
    t = traced(lambda: no_derivative(torch.ones(3, requires_grad=True)))
    assert [found.kind for found in t.findings] == ["no gradient"]
    assert not traced(lambda: no_derivative(torch.ones(3))).findings


def test_an_autograd_kernel_that_ends_the_call_is_found(traced: Traced) -> None:
    (found,) = traced(lambda: torch.ops.dispatcher_trace_findings.ends(torch.ones(3))).findings
    assert found.kind == "no redispatch"
    assert "the one at CPU was not reached" in found.detail


def test_a_fallback_to_the_cpu_is_found(traced: Traced) -> None:
    """The trace of a machine with such a device: its kernel is a fallback that calls the operator on the CPU."""
    (call,) = traced(lambda: X.sin()).calls
    hop = call.hops[-1]
    moved = tuple(
        replace(argument, tensors=tuple(replace(fact, device="mps:0") for fact in argument.tensors))
        for argument in hop.arguments
    )
    fallback = replace(hop, key="MPS", predicted="MPS", kind="backend fallback", arguments=moved, calls=[call])
    assert [found.kind for found in findings([Call(call.operator, [fallback])])] == ["CPU fallback"]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8])
def test_quantized_factories_are_predicted(dtype: torch.dtype, traced: Traced) -> None:
    t = traced(lambda: torch.relu(torch.quantize_per_tensor(X, 0.1, 0, dtype)))
    assert all(call.agrees for call in t.all_calls)


class _Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _Subclass(Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


def _under(mode: object, function: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        with mode:  # type: ignore[attr-defined]
            function()

    return run


def test_what_runs_above_the_dispatcher_is_named(traced: Traced) -> None:
    def said(function: Callable[[], object]) -> list[str]:
        return [note for note in traced(function).notes if "above the dispatcher" in note]

    subclass = X.as_subclass(_Subclass)
    begin = "Ran above the dispatcher and may have changed calls: "
    assert said(_under(_Mode(), lambda: X + 1)) == [f"{begin}_Mode.__torch_function__."]
    assert said(lambda: subclass + 1) == [f"{begin}_Subclass.__torch_function__."]
    assert said(_under(torch.device("cpu"), lambda: torch.ones(2)))[0].startswith(f"{begin}a default device (")
    assert said(lambda: X + 1) == []


def test_a_fake_tensor_copies_nothing_and_is_not_read(traced: Traced) -> None:
    def run() -> None:
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
            x = torch.ones(3, 4)
            x.t().reshape(-1)
            torch.nonzero(x)

    assert [str(finding) for finding in traced(run).findings] == []
