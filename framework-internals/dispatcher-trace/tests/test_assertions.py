"""The assertions for users' tests: what passes, and the message of a failure."""

import copy
from collections.abc import Callable

import pytest
import torch

from dispatcher_trace import Shims, assert_dispatch, assert_no_hidden_copies


def test_without_shims_they_are_installed_for_the_call() -> None:
    result = assert_no_hidden_copies(torch.add, torch.ones(2), torch.ones(2), alpha=2)
    assert torch.equal(result, torch.full((2,), 3.0))


def test_hidden_copies_are_named_with_their_lines(shims: Shims) -> None:
    def attention(q: torch.Tensor) -> torch.Tensor:
        return q.transpose(0, 1).reshape(-1) * torch.ones(12, dtype=torch.float64)

    with pytest.raises(AssertionError) as failure:
        assert_no_hidden_copies(attention, torch.ones(3, 4), shims=shims)
    assert_no_hidden_copies(attention, torch.ones(3, 4), shims=shims, allow=("aten::reshape", "aten::_to_copy"))
    head, *lines = str(failure.value).splitlines()
    assert head == "2 hidden copies:"
    assert "aten::clone under aten::reshape" in lines[0]
    assert "test_assertions.py" in lines[0]
    assert lines[0].endswith("in attention")
    assert "cast to f64" in lines[1]


def test_copies_that_the_line_asks_for_are_not_hidden(shims: Shims) -> None:
    asking: list[Callable[[torch.Tensor], object]] = [
        lambda x: x.t().contiguous(),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.to("meta"),
        lambda x: x.t().clone(),
        lambda x: copy.deepcopy(x),
    ]
    for function in asking:
        assert_no_hidden_copies(function, torch.ones(3, 4), shims=shims)


def test_dispatch(shims: Shims) -> None:
    a = torch.ones(2, 2)
    assert_dispatch(torch.matmul, "aten::mm", a, a, keys=["AutogradCPU", "CPU"], shims=shims)
    assert_dispatch(torch.add, "aten::add", a, a, keys=["AutogradCPU", "CPU"], shims=shims)
    with pytest.raises(AssertionError, match="aten::bmm was not called; called were: aten::matmul, aten::mm"):
        assert_dispatch(torch.matmul, "aten::bmm", a, a, keys=["CPU"], shims=shims)
    with pytest.raises(AssertionError) as failure:
        assert_dispatch(torch.matmul, "aten::mm", a, a, keys=["AutocastCPU"], shims=shims)
    head, line = str(failure.value).splitlines()
    assert head == "aten::mm never visited AutocastCPU, but:"
    assert line.strip().startswith("AutogradCPU → CPU: ")


def test_an_exception_of_the_function_passes(shims: Shims) -> None:
    def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        assert_no_hidden_copies(broken, shims=shims)
