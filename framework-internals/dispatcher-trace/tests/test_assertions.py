"""The assertions for users' tests: what passes, and the message of a failure."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from benchkit import UserError
from dispatcher_trace import Shims, Trace, assert_dispatch, assert_no_hidden_copies, assertions, record
from dispatcher_trace.capture.recorder import MAX_HOPS


@pytest.mark.usefixtures("few_operators")
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


def test_what_has_not_run_is_not_free_of_copies(shims: Shims) -> None:
    async def attention(q: torch.Tensor) -> torch.Tensor:
        return q.t().reshape(-1)

    with pytest.raises(UserError, match="returned a coroutine, which has not run"):
        assert_no_hidden_copies(attention, torch.ones(3, 4), shims=shims)
    with pytest.raises(UserError, match="returned a generator, which has not run"):
        assert_no_hidden_copies(lambda x: (row.t().reshape(-1) for row in x), torch.ones(2, 3, 4), shims=shims)


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


def test_no_hop_is_dropped_that_might_have_the_copy(shims: Shims, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[int | None] = []

    def spied(shims: Shims, **options: Any) -> AbstractContextManager[Trace]:
        budgets.append(options.get("max_hops", MAX_HOPS))
        return record(shims, **options)

    monkeypatch.setattr(assertions, "record", spied)
    assert_no_hidden_copies(torch.sin, torch.ones(2), shims=shims)
    assert budgets == [None]


def test_one_name_may_stand_without_a_list(shims: Shims) -> None:
    x = torch.ones(3, 4)
    assert_no_hidden_copies(lambda: x.t().reshape(-1), allow="aten::reshape", shims=shims)
    with pytest.raises(AssertionError):  # the operator's name is a part of this one
        assert_no_hidden_copies(lambda: x.t().reshape(-1), allow="aten::reshape_as", shims=shims)
    assert_dispatch(torch.empty_strided, "aten::empty_strided", (2,), (1,), keys=["BackendSelect", "CPU"], shims=shims)
    with torch.inference_mode():
        assert_dispatch(torch.sin, "aten::sin", torch.ones(2), keys="CPU", shims=shims)


def test_keys_that_the_scope_does_not_watch_are_named(shims: Shims) -> None:
    with pytest.raises(ValueError, match=r"scope='core' .* does not watch FuncTorchBatched; .* needs scope='all'"):
        assert_dispatch(torch.vmap(torch.sin), "aten::sin", torch.ones(2), keys=["FuncTorchBatched"], shims=shims)
    with pytest.raises(ValueError, match="does not watch AutogradCpu; it watches ADInplaceOrView"):
        assert_dispatch(torch.sin, "aten::sin", torch.ones(2), keys=["AutogradCpu", "CPU"], shims=shims)
