"""Differences between two traces."""

import json

import pytest
import torch

from dispatcher_trace import Shims, Trace, differences, record
from dispatcher_trace.capture.profile import matching_positions
from dispatcher_trace.render.compare import load_calls


def _matmul(
    shims: Shims, *, autocast: bool = False, dtype: torch.dtype = torch.float32, inference: bool = False
) -> Trace:
    a = torch.ones(2, 2, dtype=dtype)
    with (
        record(shims, kernels=False) as t,
        torch.inference_mode(inference),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        a @ a
    return t


def test_a_trace_does_not_differ_from_itself_through_json(shims: Shims) -> None:
    t = _matmul(shims)
    again = load_calls(json.loads(json.dumps(t.to_json())))
    assert differences(t.calls, again) == []


def test_calls_of_one_side(shims: Shims) -> None:
    found = differences(_matmul(shims).calls, _matmul(shims, autocast=True).calls)
    assert {item.kind for item in found} >= {"keys", "only in B"}
    keys = next(item for item in found if item.kind == "keys")
    assert keys.operator == "aten::matmul"
    assert keys.detail == "AutogradCPU | AutocastCPU"
    assert "aten::to.dtype" in {item.operator for item in found if item.kind == "only in B"}
    turned = differences(_matmul(shims, autocast=True).calls, _matmul(shims).calls)
    assert {item.kind for item in turned} >= {"keys", "only in A"}


def test_other_tensors_and_other_keys(shims: Shims) -> None:
    plain = _matmul(shims)
    dtypes = differences(plain.calls, _matmul(shims, dtype=torch.float64).calls)
    assert {item.kind for item in dtypes} == {"tensors"}
    assert "f32[2, 2], f32[2, 2] | f64[2, 2], f64[2, 2]" in str(dtypes[0])
    inference = differences(plain.calls, _matmul(shims, inference=True).calls)
    assert [item.detail for item in inference if item.operator == "aten::mm"] == ["AutogradCPU → CPU | CPU"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not a trace"),
        ({"calls": []}, "not a trace"),
        ({"calls": [], "schema_version": 1}, "schema version 1, expected"),
    ],
)
def test_other_documents_are_refused(document: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_calls(document)  # type: ignore[arg-type]


def test_calls_that_were_counted_another_number_of_times(shims: Shims) -> None:
    def looped(times: int) -> Trace:
        x = torch.ones(2)
        with record(shims, kernels=False, max_hops=20) as t:
            for _ in range(times):
                x.sin()
        return t

    assert differences(looped(60).calls, looped(60).calls) == []
    (times,) = differences(looped(60).calls, looped(70).calls)
    assert (times.kind, times.operator) == ("times", "aten::sin")
    ours, theirs = map(int, times.detail.split(" | "))
    assert theirs - ours == 10


def test_a_call_more_in_a_long_loop_is_one_difference() -> None:
    def pairs(a: str, b: str) -> list[tuple[int, int]]:
        return matching_positions(a, b)

    assert pairs("abc", "abc") == [(0, 0), (1, 1), (2, 2)]
    assert pairs("", "a") == []
    assert pairs("xabc", "abc") == [(1, 0), (2, 1), (3, 2)]
    assert pairs("axbc", "abyc") == [(0, 0), (2, 1), (3, 3)]
    assert len(pairs("s" + "a" * 20_000, "a" * 20_000)) == 20_000  # every position with every other one takes minutes
