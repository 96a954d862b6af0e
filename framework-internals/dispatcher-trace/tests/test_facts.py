"""Tensor facts, effects, source lines and findings."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import typing_extensions
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import swap_tensors  # a name of before the trace

from dispatcher_trace import Trace
from dispatcher_trace.capture.types import Argument, Call
from dispatcher_trace.render.text import key_line

from .conftest import Traced


def _effects(t: Trace) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(hop.operator, hop.key, hop.effects) for hop in t.hops if hop.effects]


def test_a_view_shares_its_storage_and_the_hop_that_made_it_says_so(traced: Traced) -> None:
    x = torch.ones(3, 4)
    t = traced(lambda: x.t())
    assert _effects(t) == [("aten::as_strided", "CPU", ("$1 aliases the memory of $0 (s0)",))]
    (call,) = t.calls
    (given,), (made,) = call.hops[0].arguments[0].tensors, call.hops[0].results[0].tensors
    assert given.storage == made.storage == "s0"
    assert (given.strides, made.strides) == ((4, 1), (1, 4))


def test_a_new_result_has_a_new_storage(traced: Traced) -> None:
    x = torch.ones(3, 4)
    t = traced(lambda: x + x)
    assert t.calls[0].hops[0].results[0].tensors[0].storage not in ("", "s0")
    assert _effects(t) == []


def test_an_in_place_operator_bumps_the_version_where_the_counter_is(traced: Traced) -> None:
    x = torch.ones(3)
    version = x._version
    t = traced(lambda: x.mul_(x))
    assert _effects(t) == [("aten::mul_.Tensor", "ADInplaceOrView", ("the version of $0 went up",))]
    assert t.hops[0].arguments[0].tensors[0].version == version
    assert t.hops[0].results[0].tensors[0].version == version + 1


def test_inference_tensors_have_no_version(traced: Traced) -> None:
    def inside() -> torch.Tensor:
        with torch.inference_mode():
            return torch.ones(3) * 2

    t = traced(inside)
    assert t.calls[-1].hops[0].tensors[0].version is None
    assert t.agreement[0] == t.agreement[1]
    assert "ADInplaceOrView" not in {hop.key for hop in t.hops}  # a number is an inference tensor there, too


def test_gradients_are_added_in_place_as_without_the_tracer(traced: Traced) -> None:
    x = torch.ones(3, requires_grad=True)
    t = traced(lambda: (x * x + x * x).sum().backward())
    accumulated = [call.operator for call in t.calls if call.hops[0].node and "add" in call.operator]
    assert set(accumulated) == {"aten::add_.Tensor"}


def test_the_backward_is_linked_to_the_forward_and_its_line(traced: Traced) -> None:
    x = torch.ones(4, 4, requires_grad=True)

    def step() -> None:
        y = x @ x  # the line
        y.sum().backward()

    t = traced(step)
    made = next(hop for hop in t.hops if hop.operator == "aten::mm" and hop.made_node)
    backward = [call for call in t.all_calls if call.operator == "aten::mm" and call.hops[0].node]
    assert len(backward) == 2
    assert {call.forward for call in backward} == {made.number}
    assert all(call.forward_source.endswith("in step") for call in backward)
    line = next(call for call in t.calls if call.operator == "aten::matmul").source
    assert {call.forward_source for call in backward} == {line}
    assert line.startswith("tests/test_facts.py:")


def test_a_view_in_the_forward_is_linked_too(traced: Traced) -> None:
    x = torch.ones(4, 4, requires_grad=True)
    t = traced(lambda: (x.t() * 2).sum().backward())
    backward = next(call for call in t.calls if call.hops[0].node.startswith("TBackward0"))
    assert t.hops[backward.forward - 1].operator == "aten::t"


@pytest.mark.parametrize(
    ("write", "node"),
    [
        (torch.Tensor.relu_, "ReluBackward0"),
        (lambda y: y[1:].exp_(), "CopySlices"),
        (lambda y: torch._foreach_mul_([y], 2), "MulBackward1"),
    ],
)
def test_an_operator_in_place_is_linked_too(traced: Traced, write: Callable[[torch.Tensor], object], node: str) -> None:
    x = torch.ones(4, requires_grad=True)

    def step() -> None:
        y = x * 2
        write(y)
        y.sum().backward()

    t = traced(step)
    backward = next(call for call in t.calls if call.hops[0].node.startswith(node))
    assert t.hops[backward.forward - 1].made_node == backward.hops[0].node


@pytest.mark.parametrize(
    ("function", "cause", "operator", "detail"),
    [
        (lambda x: x.t().reshape(-1), "aten::reshape", "aten::clone", "strides (1, 3) laid out as"),
        (lambda x: x + x.double(), "aten::add.Tensor", "aten::_to_copy", "cast to f64"),
        (lambda x: nn.Flatten(0)(x.t()), "aten::flatten.using_ints", "aten::clone", "laid out as"),
    ],
)
def test_hidden_copies(
    traced: Traced, function: Callable[[torch.Tensor], object], cause: str, operator: str, detail: str
) -> None:
    x = torch.ones(2, 3)
    (found,) = traced(lambda: function(x)).findings
    assert (found.kind, found.cause, found.operator) == ("copy", cause, operator)
    assert detail in found.detail
    assert found.source.startswith("tests/test_facts.py:")
    assert str(found).startswith(f"copy: {operator} under {cause} (hop ")


def test_autocasts_casts_are_found_under_the_operator_that_was_called(traced: Traced) -> None:
    a, b = torch.ones(4, 4), torch.ones(4, 4)

    def cast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            a @ b

    found = traced(cast).findings
    assert [(item.cause, item.operator) for item in found] == [("aten::matmul", "aten::_to_copy")] * 2


@pytest.mark.parametrize("function", [lambda x: x.sum().item(), torch.nonzero, lambda x: bool((x > 0).all())])
def test_values_read_on_the_host(traced: Traced, function: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(2, 3)
    (found,) = traced(lambda: function(x)).findings
    assert found.kind == "synchronisation"
    assert "on a GPU this would wait for it" in found.detail


@pytest.mark.parametrize(
    "function",
    [
        torch.bincount,
        torch.unique,
        torch.unique_consecutive,
        lambda x: torch.unique(x, dim=0),
        lambda x: torch.unique_consecutive(x, dim=0),
    ],
)
def test_a_result_whose_size_depends_on_data_waits(traced: Traced, function: Callable[[torch.Tensor], object]) -> None:
    x = torch.tensor([1, 2, 2])
    assert [found.kind for found in traced(lambda: function(x)).findings] == ["synchronisation"]


def test_a_wrong_prediction_is_a_finding(traced: Traced) -> None:
    t = traced(lambda: torch.ones(2).exp())
    t.calls[-1].missed = ("CUDA",)
    (found,) = t.findings
    assert (found.kind, found.operator) == ("prediction", "aten::exp")
    assert found.detail == "visited AutogradCPU → CPU; the table predicts AutogradCPU → CPU → CUDA"


def test_a_wrong_prediction_with_a_known_cause_is_none(traced: Traced) -> None:
    t = traced(lambda: torch.tensor([1.0, 2.0]))
    assert [call.operator for call in t.all_calls if not call.agrees] == ["aten::detach_"]  # written by hand
    assert t.findings == []


def _on_devices(call: Call, source: str, target: str, *, pinned: bool) -> None:
    """Turn a call on the CPU into a transfer between devices: only the devices of the tensors differ."""
    for hop in (hop for inner in call.walk() for hop in inner.hops):
        to_target = {"self"} if hop.operator == "aten::copy_" else set()
        hop.arguments = tuple(
            _moved(argument, target if argument.name in to_target else source, pinned=pinned)
            for argument in hop.arguments
        )
        hop.results = tuple(_moved(result, target, pinned=pinned) for result in hop.results)


def _moved(argument: Argument, device: str, *, pinned: bool) -> Argument:
    facts = tuple(replace(fact, device=device, pinned=pinned and device == "cpu") for fact in argument.tensors)
    return replace(argument, tensors=facts)


@pytest.mark.parametrize(
    ("function", "source", "target", "pinned", "kinds"),
    [
        (lambda x: torch.empty(3).copy_(x), "cuda:0", "cpu", False, ["synchronisation"]),
        (lambda x: torch.empty(3).copy_(x), "cuda:0", "cpu", True, []),
        (lambda x: torch.empty(3).copy_(x), "cpu", "cuda:0", False, ["synchronisation"]),
        (lambda x: torch.empty(3).copy_(x), "cpu", "cuda:0", True, ["synchronisation"]),
        (lambda x: torch.empty(3).copy_(x, non_blocking=True), "cpu", "cuda:0", True, []),
        (lambda x: torch.empty(3).copy_(x), "cuda:0", "cuda:1", False, []),
        (lambda x: x.to("cpu", copy=True), "cuda:0", "cpu", False, ["synchronisation"]),
        (lambda x: x.to("cpu", copy=True), "cuda:0", "cpu", True, []),
        (lambda x: x.to("cpu", copy=True), "cpu", "cuda:0", False, ["synchronisation"]),
        (lambda x: x.to("cpu", copy=True, non_blocking=True), "cpu", "cuda:0", True, []),
    ],
)
def test_a_copy_between_gpu_and_host_waits_unless_it_is_non_blocking_and_can_be(
    traced: Traced,
    function: Callable[[torch.Tensor], object],
    source: str,
    target: str,
    pinned: bool,
    kinds: list[str],
) -> None:
    x = torch.ones(3)
    t = traced(lambda: function(x))
    _on_devices(t.calls[-1], source, target, pinned=pinned)
    assert [found.kind for found in t.findings] == kinds
    said = "to the host, which waits" if target == "cpu" else "to the GPU and waits"
    assert all(said in found.detail for found in t.findings if found.kind == "synchronisation")


def test_the_key_set_is_shown_as_an_equation(traced: Traced) -> None:
    a = torch.ones(2, requires_grad=True)
    t = traced(lambda: a + a)
    text = t.to_markdown()
    carried = "{AutocastCPU, AutogradCPU, ADInplaceOrView, CPU}"
    assert f"keys {{AutogradCPU, CPU}} = self, other {carried} − fallthrough {{" in text
    assert key_line(t.hops[0]).startswith(f"   keys {{AutogradCPU, CPU}} = self, other {carried} ∪ thread {{")
    assert "Autocast of other devices" in text
    assert "− fallthrough {ADInplaceOrView, BackendSelect}; as predicted" in text
    assert "Evidence: " in text


def test_keys_that_all_arguments_share_are_said_once(traced: Traced) -> None:
    with torch.inference_mode():
        made_there = torch.ones(2)
    a = torch.ones(2)
    t = traced(lambda: torch.where(a > 0, a, made_there))
    hop = next(hop for hop in t.hops if hop.operator == "aten::where.self")
    shared, own = "all arguments {AutocastCPU, CPU}", "condition, self {AutogradCPU, ADInplaceOrView}"
    assert f" = {shared} ∪ {own} ∪ thread {{" in key_line(hop)


def test_a_deprecated_functions_wrapper_is_not_the_users_line(traced: Traced) -> None:
    old = typing_extensions.deprecated("use relu")(torch.nn.functional.relu)
    with pytest.warns(DeprecationWarning, match="use relu"):
        t = traced(lambda: old(torch.ones(3)))
    assert [call.source.partition(":")[0] for call in t.calls] == ["tests/test_facts.py"] * 2


def test_a_reason_that_is_not_the_dispatchers_rule(traced: Traced) -> None:
    x = torch.ones(2, requires_grad=True)

    def function() -> None:
        torch.ops.aten.sin.default.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), x)
        with enable_python_dispatcher():
            torch.sin(x)

    passed, chosen = (call.hops[0].why.partition(";")[0] for call in traced(function).calls[:2])
    assert passed == "CPU is the highest key of the set that the caller passed, which lacks AutogradCPU"
    assert chosen.startswith("torch's Python dispatcher chose ")


def test_tensors_can_be_swapped(traced: Traced) -> None:
    a, b = torch.zeros(2), torch.ones(3)

    def function() -> None:
        torch.add(a, a[:1])
        torch.add(b, 1)
        swap_tensors(a, b)
        torch.add(a, 1)

    calls = traced(function).calls
    assert (a.shape, b.shape) == ((3,), (2,))
    assert calls[-1].hops[0].tensors[0].shape == (3,)
    assert calls[-1].hops[0].tensors[0].label not in {
        fact.label for call in calls[:-1] for fact in call.hops[0].tensors
    }


def test_the_nodes_of_two_threads_are_not_mixed_up(traced: Traced) -> None:
    results: dict[str, torch.Tensor] = {}

    def first() -> None:
        results["first"] = torch.ones(2, requires_grad=True).sin()

    def second() -> None:
        y = results["second"] = torch.ones(2, requires_grad=True).sin()
        y.backward(torch.ones(2))

    def run() -> None:
        for function in (first, second):  # each thread numbers its nodes from 0
            thread = threading.Thread(target=function)
            thread.start()
            thread.join()
        results["first"].backward(torch.ones(2))

    nodes = [call for call in traced(run).calls if call.hops[0].node.startswith("SinBackward0") and "cos" in call.title]
    assert [call.forward_source.rpartition(" ")[2] for call in nodes] == ["second", ""]  # two made one of that name
