"""Long traces: what is kept and what is counted, and the end of a trace that raised."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dispatcher_trace import Shims, Trace, installed, record
from dispatcher_trace.capture.recorder import Recorder
from dispatcher_trace.render.by_line import summarize

_HUNDRED, _GROWS = "dispatcher_trace_long::hundred", "dispatcher_trace_long::grows"
_TIMES = "dispatcher_trace_long::times"
OPERATORS = ("aten::add.Tensor", "aten::sin", "aten::select.int", _HUNDRED, _GROWS, _TIMES)


@torch.library.custom_op(_HUNDRED, mutates_args=())
def _hundred(x: torch.Tensor) -> torch.Tensor:
    return _loop(100, x)


@torch.library.custom_op(_TIMES, mutates_args=())
def _times(x: torch.Tensor, times: int) -> torch.Tensor:
    return _loop(times, x)


@torch.library.custom_op(_GROWS, mutates_args=())
def _grows(x: torch.Tensor) -> torch.Tensor:
    for size in range(1, 200):
        _loop(1, torch.ones(size))
    return x + x


@pytest.fixture(scope="module")
def shims() -> Iterator[Shims]:
    with installed("core", only=OPERATORS) as shims:
        yield shims


def _loop(times: int, x: torch.Tensor) -> torch.Tensor:
    for _ in range(times):
        x = x + x
    return x


def _recorded(shims: Shims, run, **options) -> Trace:
    with record(shims, kernels=False, **options) as t:
        run()
    return t


@pytest.mark.parametrize("max_hops", [-1, 2.5, "3"])
def test_a_number_of_hops_that_is_none_is_refused_before_the_code_runs(shims: Shims, max_hops: Any) -> None:
    ran: list[int] = []
    with pytest.raises(ValueError, match=f"0 or None for every hop, got {max_hops!r}"):
        _recorded(shims, lambda: ran.append(1), max_hops=max_hops)
    assert not ran


def test_no_limit_keeps_every_hop(shims: Shims) -> None:
    for max_hops in (0, None):
        t = _recorded(shims, lambda: [torch.ones(2) + 1 for _ in range(30)], max_hops=max_hops)
        assert (len(t.calls), t.counted, t.dropped) == (30, 0, 0)


def test_calls_alike_are_counted_and_the_last_ones_are_kept(shims: Shims) -> None:
    x = torch.ones(2)
    whole = _recorded(shims, lambda: _loop(100, x), max_hops=None)
    t = _recorded(shims, lambda: _loop(100, x), max_hops=20)
    assert t.hop_count == whole.hop_count == 200
    assert len(t.hops) < 60
    assert t.counted + len(t.hops) == 200
    assert sum(1 + call.alike for call in t.calls) == 100
    assert t.hops[-1].number == 200  # the end is there
    assert [hop.number for hop in t.hops] == sorted(hop.number for hop in t.hops)
    assert any("--max-hops" in note for note in t.notes)
    assert not any("--max-hops" in note for note in whole.notes)
    assert summarize(t.calls)[0].hops == 200


def test_loops_of_several_lengths_are_counted_each_with_its_own(shims: Shims) -> None:
    x = torch.ones(2)
    t = _recorded(shims, lambda: [_times(x, times) for times in (9, 4, 9, 4, 7, 4) * 4], max_hops=20)
    assert t.counted
    assert not t.dropped
    assert summarize(t.calls)[0].calls == 24 + 4 * (9 + 4 + 9 + 4 + 7 + 4)


def test_threads_count_one_by_one(shims: Shims) -> None:
    x, interval = torch.ones(2), sys.getswitchinterval()

    def run(_: int) -> None:
        for _ in range(60):
            (x * 0.5 + 1).select(0, 0).sin()

    sys.setswitchinterval(1e-6)
    try:
        with record(shims, kernels=False, max_hops=20) as t, ThreadPoolExecutor(8) as threads:
            list(threads.map(run, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert t.hop_count == 8 * 60 * (2 + 3 + 2)  # add, select with the views' key, sin
    assert t.counted + t.dropped + len(t.hops) == t.hop_count


def test_views_that_are_gone_leave_nothing(shims: Shims) -> None:
    x = torch.ones(200)
    shims.recorder = recorder = Recorder()
    window = x[:1]
    for end in range(1, 200):
        window = x[:end]  # the one before lives until here
        window.sin()
    shims.recorder = None
    assert max(len(owners) for _, owners in recorder._storages.values()) < 10


def test_calls_that_differ_are_kept(shims: Shims) -> None:
    def run() -> None:
        _loop(50, torch.ones(2))
        _loop(50, torch.ones(2, dtype=torch.float64))
        _loop(50, torch.ones(3))
        torch.ones(2).sin()

    t = _recorded(shims, run, max_hops=10)
    kept = {(call.operator, call.shapes) for call in t.calls}
    assert {("aten::add.Tensor", f"{each}, {each}") for each in ("f32[2]", "f64[2]", "f32[3]")} <= kept
    assert ("aten::sin", "f32[2]") in kept
    assert t.dropped == 0


def test_calls_of_ever_new_kinds_end_at_twice_the_budget(shims: Shims) -> None:
    def run() -> None:
        for size in range(1, 200):
            _loop(1, torch.ones(size))

    t = _recorded(shims, run, max_hops=20)
    assert len(t.hops) < 100
    assert t.dropped + t.counted + len(t.hops) == t.hop_count == 398
    assert t.calls[-1].shapes == "f32[199], f32[199]"


def test_the_call_that_raises_is_kept_and_its_exception_is_printed_once(shims: Shims) -> None:
    message = "index 5 out of range"
    with pytest.raises(IndexError), record(shims, kernels=False, max_hops=20) as t:  # noqa: PT012
        y = _loop(100, torch.ones(2))
        y.select(0, 5)
    assert t.calls[-1].operator == "aten::select.int"
    assert t.calls[-1].hops[0].error
    assert t.summary().count(message) <= 1
    shown = t.to_markdown()
    assert shown.count(t.calls[-1].hops[-1].error) == 1
    assert "what hop" in next(note for note in t.notes if note.startswith("The traced code raised"))


def test_an_exception_that_the_code_caught_did_not_end_it(shims: Shims) -> None:
    def run() -> None:
        with contextlib.suppress(IndexError):
            torch.ones(2).select(0, 5)

    t = _recorded(shims, run)
    assert "raised and caught at hop" in t.summary()
    assert "The trace ends there" not in t.summary()


def test_a_nested_repeat_is_counted_inside_its_call(shims: Shims) -> None:
    (call,) = _recorded(shims, lambda: _hundred(torch.ones(2)), max_hops=10).calls[-1:]
    assert call.path == ("AutogradCPU", "CPU")
    assert sum(1 + inner.alike for inner in call.hops[-1].calls) == 100


def test_a_tensor_is_captured_anew_where_anything_of_it_changed(shims: Shims) -> None:
    x = torch.ones(2, 3)

    def run() -> None:
        for change in (lambda: x.zero_(), lambda: x.t_(), lambda: x.resize_(4), lambda: x.requires_grad_()):
            torch.sin(x)
            change()
        torch.sin(x)
        x.data = torch.ones(4, dtype=torch.float64)
        torch.sin(x)

    facts = [call.hops[0].tensors[0] for call in _recorded(shims, run).calls if call.operator == "aten::sin"]
    assert len({fact.label for fact in facts}) == 1
    assert [(fact.shape, fact.strides, fact.dtype) for fact in facts] == [
        ((2, 3), (3, 1), "f32"),
        ((2, 3), (3, 1), "f32"),
        ((3, 2), (1, 3), "f32"),
        ((4,), (1,), "f32"),
        ((4,), (1,), "f32"),
        ((4,), (1,), "f64"),
    ]
    versions = [fact.version for fact in facts]
    assert versions[0] == 0
    assert versions[1] == 1
    assert facts[-1].storage != facts[-2].storage


def test_a_recorder_keeps_less_than_a_kilobyte_of_python_objects_for_each_hop(shims: Shims) -> None:
    import tracemalloc

    x = torch.ones(2)
    _recorded(shims, lambda: _loop(10, x))
    tracemalloc.start()
    try:
        shims.recorder = recorder = Recorder()
        _loop(300, x)
        shims.recorder = None
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / recorder.hop_count() < 1024


def test_a_kept_call_is_whole_and_no_finding_comes_from_what_was_dropped(shims: Shims) -> None:
    def run() -> None:
        for size in range(1, 100):
            _loop(1, torch.ones(size))

    t = _recorded(shims, run, max_hops=20)
    assert t.dropped
    assert {call.path for call in t.all_calls} == {("AutogradCPU", "CPU")}
    assert t.findings == []


def test_one_long_call_of_ever_new_kinds_is_bounded_too(shims: Shims) -> None:
    t = _recorded(shims, lambda: _grows(torch.ones(2)), max_hops=20)
    assert t.dropped
    assert len(t.hops) < 100
    assert t.findings == []


@pytest.mark.parametrize("place", ["_kind", "Recorder.leave", "Recorder.text_of_error"])
def test_what_follows_an_interrupt_in_the_recorder_is_recorded(
    place: str, shims: Shims, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    x = torch.ones(2)
    with record(shims, kernels=False, max_hops=4) as t:
        _loop(5, x)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt, IndexError):
            patch.setattr(f"dispatcher_trace.capture.recorder.{place}", interrupted)
            _loop(5, x)
            x.select(0, 5)
        x.sin()
    assert t.calls[-1].operator == "aten::sin"
    assert t.calls[-1].path == ("AutogradCPU", "CPU")
