"""Installing and removing shims: tables, results and the process are the same afterwards."""

import signal
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch

from dispatcher_trace import Shims, installed, trace
from dispatcher_trace.capture import dispatcher


def _tables() -> dict[str, str]:
    return {operator: torch._C._dispatch_dump_table(operator) for operator in dispatcher.operators()}


@pytest.mark.parametrize("scope", ["core", "all"])
def test_tables_are_restored_and_only_shimmed_cells_change(scope: str) -> None:
    before = _tables()
    with installed(scope) as shims:  # type: ignore[arg-type]
        during = _tables()
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
    assert _tables() == before
    assert "_make_subclass" not in vars(torch.Tensor)
    assert "as_subclass" not in vars(torch.Tensor)


def test_tables_are_restored_when_the_code_raises() -> None:
    before = _tables()
    with pytest.raises(IndexError), trace(scope="core", kernels=False) as t:  # noqa: PT012
        torch.ones(2) + 1
        torch.ones(2).select(0, 5)
    assert _tables() == before
    assert t.calls[-1].hops[0].error.startswith("IndexError")
    with trace(scope="core", kernels=False) as again:
        torch.ones(2)
    assert again.calls


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler of Ctrl-C, which a process in a shell's background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_during_the_removal_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = "aten::add.Tensor"
    before, handler, remove = torch._C._dispatch_dump_table(operator), signal.getsignal(signal.SIGINT), Shims.remove

    def interrupted(shims: Shims) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(shims)

    monkeypatch.setattr(Shims, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt), installed("core", only=[operator]):
        assert torch._C._dispatch_dump_table(operator) != before
    assert torch._C._dispatch_dump_table(operator) == before
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.undo()
    with installed("core", only=[operator]):
        pass
    assert torch._C._dispatch_dump_table(operator) == before


def test_nested_use_is_refused_and_leaves_the_outer_trace_alone() -> None:
    with trace(scope="core", kernels=False) as t:
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

    with trace(scope="core", kernels=False):
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


def test_a_custom_operator_is_traced() -> None:
    library = torch.library.Library("dispatcher_trace_own", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CPU")
    with trace(scope="core", kernels=False) as t:
        result = torch.ops.dispatcher_trace_own.twice(torch.ones(2))
    library._destroy()
    assert torch.equal(result, torch.full((2,), 2.0))
    own = next(call for call in t.calls if call.operator == "dispatcher_trace_own::twice")
    assert own.hops[-1].key == "CPU"
    assert [call.operator for call in own.hops[-1].calls] == ["aten::add.Tensor"]


def test_installing_makes_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with installed("core"):
            pass
