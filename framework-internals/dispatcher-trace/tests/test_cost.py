"""Slopes, operators' own times, and their pairing with a trace."""

from typing import Any

import pytest
import torch

from dispatcher_trace import Shims, record
from dispatcher_trace.capture.profile import Profile, profiled
from dispatcher_trace.explain import operator_cost
from dispatcher_trace.measure import hop_cost


def test_a_disturbed_batch_does_not_move_the_slope() -> None:
    clean = {n: 7e-6 + n * 2e-6 for n in (50, 100, 150, 200, 300, 400)}
    assert hop_cost.theil_sen(clean) == pytest.approx(2e-6)
    assert hop_cost.theil_sen({**clean, 150: clean[150] + 1.0}) == pytest.approx(2e-6, rel=0.05)


def test_every_hop_that_is_named_is_measured() -> None:
    costs = hop_cost.hop_costs(rounds=2)
    assert set(costs) == set(hop_cost._DIFFERENCES)
    assert all(figure.unit == "s" and figure.samples == 2 for figure in costs.values())


def _event(name: str, start: float, duration: float, identity: int) -> dict[str, Any]:
    args = {"External id": identity}
    return {"cat": "cpu_op", "name": name, "ts": start, "dur": duration, "tid": 1, "args": args}


def test_own_time_is_without_what_was_called(shims: Shims) -> None:
    a = torch.ones(2, 2)
    with record(shims, kernels=False) as trace:
        a @ a
    events = [_event("aten::matmul", 0, 100, 1), _event("aten::mm", 10, 80, 2)]
    first, second = operator_cost.operator_costs(Profile(events), trace.all_calls)
    assert (first.operator, second.operator) == ("aten::mm", "aten::matmul")
    assert (first.seconds, second.seconds) == pytest.approx((80e-6, 20e-6))
    assert (first.share, second.share) == pytest.approx((0.8, 0.2))
    assert first.shapes == "f32[2, 2], f32[2, 2]"
    assert "test_cost.py" in first.stack[0]
    line = "80.0 %  80.0 µs  aten::mm, 1 call; most in (f32[2, 2], f32[2, 2]), tests/test_cost.py"
    assert line in operator_cost.table([first])


def test_device_time_counts_where_there_is_any(shims: Shims) -> None:
    a = torch.ones(2, 2)
    with record(shims, kernels=False) as trace:
        a @ a
    events = [
        _event("aten::matmul", 0, 100, 1),
        _event("aten::mm", 10, 80, 2),
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 20, "args": {"correlation": 9, "External id": 2}},
        {"cat": "kernel", "name": "k", "ts": 40, "dur": 30, "args": {"correlation": 9}},
    ]
    first, second = operator_cost.operator_costs(Profile(events), trace.all_calls)
    assert (first.operator, first.seconds, second.seconds) == ("aten::mm", pytest.approx(30e-6), 0.0)


def test_a_real_profile_pairs_with_its_trace(shims: Shims) -> None:
    a = torch.randn(64, 64)

    def program() -> torch.Tensor:
        return torch.softmax(a @ a, -1)

    program()
    with profiled() as untraced:
        program()
    with record(shims, kernels=False) as trace:
        program()
    costs = operator_cost.operator_costs(untraced, trace.all_calls)
    assert {item.operator for item in costs} >= {"aten::mm", "aten::_softmax"}
    assert all(item.shapes and item.stack for item in costs)
    assert sum(item.share for item in costs) == pytest.approx(1)


def test_of_many_tensors_the_first_are_shown() -> None:
    few = "f32[2, 3], bf16[4], f32[], i64[5, 6, 7], f32[8]"
    assert operator_cost.first_shapes(few) == few
    assert operator_cost.first_shapes(f"{few}, f32[9, 9]") == "f32[2, 3], bf16[4], f32[], i64[5, 6, 7] and 2 more"
    assert operator_cost.first_shapes("") == ""
