"""Installing and removing shims: tables, results and the process are the same afterwards."""

import gc
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dispatcher_trace import Shims, installed, record, trace
from dispatcher_trace.capture import dispatcher


def test_tables_are_restored_and_only_shimmed_cells_change() -> None:
    before = dispatcher.dumps()
    with installed("all") as shims:
        during = dispatcher.dumps()
        tables = shims.tables
        assert shims.count > 10_000
    changed = {
        (operator, line.partition(":")[0])
        for operator in before
        for line, old in zip(during[operator].splitlines(), before[operator].splitlines(), strict=True)
        if line != old
    }
    assert len(changed) == shims.count
    assert not any(tables[operator][key].fallthrough for operator, key in changed)
    assert dispatcher.dumps() == before
    assert "_make_subclass" not in vars(torch.Tensor)
    assert "as_subclass" not in vars(torch.Tensor)


@pytest.mark.usefixtures("few_operators")
def test_tables_are_restored_when_the_code_raises() -> None:
    before = dispatcher.dumps()
    with pytest.raises(IndexError), trace(scope="core", kernels=False) as t:  # noqa: PT012
        torch.ones(2) + 1
        torch.ones(2).select(0, 5)
    assert dispatcher.dumps() == before
    assert t.calls[-1].hops[0].error.startswith("IndexError")


def _time_out(number: int, frame: object) -> None:
    raise TimeoutError


@pytest.mark.parametrize(
    ("number", "handler", "error"),
    [
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),  # a process in a background has another handler
        (signal.SIGALRM, _time_out, TimeoutError),
    ],
)
def test_a_signal_during_the_removal_is_handled_after_it(
    number: signal.Signals, handler: Callable[..., None], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = "aten::add.Tensor"
    before, remove, earlier = torch._C._dispatch_dump_table(operator), Shims.remove, signal.signal(number, handler)

    def interrupted(shims: Shims) -> None:
        signal.raise_signal(number)
        remove(shims)

    monkeypatch.setattr(Shims, "remove", interrupted)
    with pytest.raises(error), installed("core", only=[operator]):
        assert torch._C._dispatch_dump_table(operator) != before
    assert torch._C._dispatch_dump_table(operator) == before
    assert signal.signal(number, earlier) is handler
    monkeypatch.undo()
    with installed("core", only=[operator]):
        pass
    assert torch._C._dispatch_dump_table(operator) == before


@pytest.mark.parametrize("inside", [False, True])
def test_a_signal_while_torch_converts_a_number_is_not_lost(inside: bool) -> None:
    operators, x = ["aten::add.Tensor"], torch.ones(2)
    handler = (lambda *_: None) if inside else _time_out
    earlier = signal.signal(signal.SIGALRM, handler)
    gc.disable()  # Python drops what a handler raises in a callback of the collector, traced or not; Dynamo has one
    try:
        with installed("core", only=operators) as shims, record(shims, kernels=False):
            assert signal.getsignal(signal.SIGALRM) is handler
            if inside:
                assert signal.signal(signal.SIGALRM, _time_out) is handler
                handler = _time_out
            for attempt in range(40):
                with pytest.raises(TimeoutError):  # noqa: PT012
                    signal.setitimer(signal.ITIMER_REAL, 0.001 + attempt / 1e5)
                    for _ in range(3_000):
                        x + 1
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
        gc.enable()


def test_nested_use_is_refused_and_leaves_the_outer_trace_alone() -> None:
    with installed("core", only=["aten::add.Tensor"]) as shims, record(shims, kernels=False) as t:
        with pytest.raises(RuntimeError, match="a trace is active already"), trace(scope="core"):
            pass
        torch.ones(2) + torch.ones(2)
    assert t.calls[-1].operator == "aten::add.Tensor"


def test_use_on_another_thread_is_refused() -> None:
    raised: list[BaseException] = []

    def other() -> None:
        try:
            with trace(scope="core"):
                pass
        except RuntimeError as error:
            raised.append(error)

    with installed("core", only=["aten::add.Tensor"]):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "other" not in str(raised[0]).split(";")[0]
    assert "a trace is active already" in str(raised[0])


def test_an_unknown_scope_is_refused_and_nothing_stays() -> None:
    with pytest.raises(ValueError, match="scope takes 'all' or 'core', got 'wide'"), installed("wide"):  # type: ignore[arg-type]
        pass
    with installed("core", only=["aten::add.Tensor"]) as shims:
        # AutogradOther, AutogradNestedTensor, and for each backend its own key and its autograd key
        assert shims.count == (6 if torch.cuda.is_available() else 4)


def test_threads_that_make_parameters_get_their_results() -> None:
    """To make a parameter takes shims out of the tables, while other threads are about to enter them."""
    x = torch.full((3,), 2.0)

    def products(thread: int) -> list[float]:
        return [
            float((torch.nn.Parameter(x, requires_grad=False) * (thread + number / 64)).sum()) for number in range(40)
        ]

    used = ["aten::detach", "aten::mul.Tensor", "aten::sum"]
    with installed("core", only=used) as shims, record(shims, kernels=False), ThreadPoolExecutor(6) as threads:
        results = list(threads.map(products, range(12)))
    assert results == [[6.0 * (thread + number / 64) for number in range(40)] for thread in range(12)]
