"""What the traced program could notice of a trace: locks, memory, warnings, its own code that runs, the stack."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import warm_python
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dispatcher_trace import installed, record, trace
from dispatcher_trace.capture import shims as shims_module
from dispatcher_trace.capture.shims import _CONSTRUCTORS, _uninterrupted

_OF_CONSTRUCTORS = tuple(itertools.chain.from_iterable(_CONSTRUCTORS.values()))
_OPERATORS = ("aten::add.Tensor", "aten::mul.Tensor", "aten::mm", "aten::ones", "aten::empty.memory_format")


def _traced(run: Callable[[], object], operators: Iterable[str] = _OPERATORS) -> Any:
    with installed("all", only=operators) as shims, record(shims, kernels=False):
        return run()


# -- locks -------------------------------------------------------------------------------------------------------------

_ON_THREADS = """
import faulthandler, sys, threading
import torch
from dispatcher_trace import installed, record
faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-4)

def autocast():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
    for _ in range(10):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(2, 4))

def draw():
    for _ in range(150):
        torch.multinomial(torch.ones(5), 3, replacement=True)
        torch.bernoulli(torch.full((3,), 0.5))

clear = torch.clear_autocast_cache
with installed("core") as shims, record(shims, kernels=False):
    threads = [threading.Thread(target=run, daemon=True) for run in (autocast, draw) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
assert torch.clear_autocast_cache is clear
"""


def test_threads_whose_kernels_hold_a_lock_of_torchs_do_not_wait_for_each_other_for_ever() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = warm_python.run(["-c", _ON_THREADS], env=environment)
    assert done.returncode == 0, done.stderr


_COLLECTIVES = """
import faulthandler, os, sys
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from dispatcher_trace import installed, record
faulthandler.dump_traceback_later(90, exit=True)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
with installed("core") as shims, record(shims, kernels=False) as t:
    gathered = collectives.all_gather_tensor(torch.ones(2) + rank, 0, dist.group.WORLD) + 0
assert gathered.tolist() == [1, 1, 2, 2]
assert any("wait_tensor" in note for note in t.notes)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_collective_that_copies_on_a_thread_of_its_own_comes_to_its_end(tmp_path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _COLLECTIVES, str(rank), str(tmp_path / "store")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate()[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)


# -- memory and warnings -----------------------------------------------------------------------------------------------


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_from_before_the_trace_is_collected_in_it() -> None:
    cycle = _Cycle()
    gone = weakref.ref(cycle)
    with installed("core", only=_OPERATORS):
        del cycle
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("change", [gc.enable, gc.disable])
@pytest.mark.parametrize("before", [True, False])
def test_the_program_has_the_last_word_on_garbage_collection(change: Callable[[], None], before: bool) -> None:
    try:
        (gc.enable if before else gc.disable)()
        with installed("core", only=_OPERATORS):
            assert gc.isenabled() == before
            change()
        assert gc.isenabled() == (change is gc.enable)
    finally:
        gc.enable()


def test_an_exception_that_was_caught_keeps_no_tensor() -> None:
    def run() -> bool:
        x = torch.ones(3, 4)
        gone = weakref.ref(x)
        try:
            torch.mm(x, x)
        except RuntimeError:
            del x
        return gone() is None

    gc.disable()
    try:
        assert _traced(run)
    finally:
        gc.enable()


def test_a_warning_is_given_as_often_as_without_the_tracer() -> None:
    code = "for k in range(3):\n    warnings.warn('again')\n    torch.nn.Parameter(torch.ones(1))\n"

    def run() -> int:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("default")
            exec(code, {"__name__": "of_a_user", "warnings": warnings, "torch": torch})
        return len(given)

    assert (run(), _traced(run)) == (1, 1)


# -- the program's own code --------------------------------------------------------------------------------------------


class _Sized(torch.Tensor):
    """Answers itself what its sizes and its device are; ``log`` has each question."""

    log: list[str]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Sized:
        self: _Sized = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dispatch_sizes_strides_policy="sizes", dispatch_device=True
        )
        self.log = []
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args[0].log.append(str(func))
        if str(func) != "aten.mul.Tensor":
            raise AssertionError(f"{func} is not expected")
        return torch.ones(())


def test_a_subclass_is_not_asked_for_its_sizes() -> None:
    def run() -> list[str]:
        x = _Sized(torch.ones(2))
        torch.ops.aten.mul.Tensor(x, x)
        return x.log

    assert _traced(run) == ["aten.mul.Tensor"]


class _Odd(torch.Tensor):
    """Raises where it is asked what it is."""

    def _refuse(self, *_: object) -> None:
        raise AssertionError("the recorder asked")

    shape = dtype = device = grad_fn = _base = _version = property(_refuse)  # type: ignore[assignment]
    stride = _refuse  # type: ignore[assignment]


def test_what_a_subclass_has_in_place_of_torchs_properties_is_not_asked() -> None:
    x = torch.ones(2).as_subclass(_Odd)
    result = _traced(lambda: torch.mul(x, x))
    assert type(result) is _Odd
    assert result.tolist() == [1, 1]


class _Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.name = ctx._sequence_nr = "of a user"
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def test_a_node_may_have_a_name_of_its_own() -> None:
    x = torch.ones(2, requires_grad=True)
    _traced(lambda: _Named.apply(x).backward(torch.ones(2)))
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]


class _Plain(torch.Tensor):
    pass


@pytest.mark.parametrize("given", [(2, 3), ([1.0, 2.0],), (torch.ones(2),), (np.ones(2),)])
def test_a_subclass_without_a_constructor_of_its_own(given: tuple[Any, ...]) -> None:
    made = _traced(lambda: _Plain(*given), _OF_CONSTRUCTORS)
    assert type(made) is _Plain
    assert made.shape == _Plain(*given).shape


def test_what_the_program_puts_in_place_of_torchs_functions_is_called_and_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []

    def made() -> tuple[list[str], dict[str, int]]:
        with installed("core", only=["aten::detach"]) as shims, record(shims, kernels=False) as t:
            torch.nn.Parameter(torch.ones(2))
        return [call.operator for call in t.calls], dict(t.unrecorded)

    alone = made()

    def replaced(name: str, function: Callable[..., Any]) -> Any:
        def of_the_program(*args: Any) -> Any:
            called.append(name)
            return function(*args)

        return of_the_program

    def run() -> Any:
        x = torch.ones(2).as_subclass(_Plain)
        inside = staticmethod(replaced("inside", torch.Tensor._make_subclass))
        torch.Tensor._make_subclass = inside
        torch.nn.Parameter(torch.ones(2))
        return x, inside

    before = replaced("before", torch.Tensor.as_subclass)
    monkeypatch.setattr(torch.Tensor, "as_subclass", before)
    x, inside = _traced(run, _OF_CONSTRUCTORS)
    assert type(x) is _Plain
    assert called == ["before", "inside"]
    assert torch.Tensor.as_subclass is before
    assert vars(torch.Tensor)["_make_subclass"] is inside
    assert made() == alone  # though what was the tracer's is called, too
    del torch.Tensor._make_subclass


def test_each_number_of_a_program_is_a_tensor_of_its_own() -> None:
    x = torch.ones(2, requires_grad=True)

    def run() -> list[str]:
        with torch.profiler.profile() as profile:
            first, second = x * 3, x * 3
            assert first.grad_fn._saved_other is not second.grad_fn._saved_other
        return [event.name for event in profile.events() if event.name.startswith("aten::")]

    assert _traced(run) == run()


def test_a_function_mode_does_not_see_the_tracer() -> None:
    class Count(TorchFunctionMode):
        def __init__(self) -> None:
            self.called: list[str] = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.called.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    def run() -> list[str]:
        x = torch.ones(2, requires_grad=True)
        y = x**3 * 2
        with Count() as count:  # autograd's engine keeps the mode, torch.autograd.backward would take it off
            torch.autograd.Variable._execution_engine.run_backward(
                (y,), (torch.ones(2),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        return count.called

    assert _traced(run) == run()


def test_a_dispatch_mode_around_fake_tensors_does_not_see_the_tracer() -> None:
    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.called: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.called.append(str(func))
            return func(*args, **(kwargs or {}))

    def run() -> list[str]:
        with Count() as count, FakeTensorMode():
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        return count.called

    assert run() == run() == _traced(run) == ["aten.ones.default", "aten.ones.default", "aten.mm.default"]


def test_torchs_lists_of_functions_do_not_have_the_tracers() -> None:
    torch.overrides._get_overridable_functions.cache_clear()
    torch.overrides._get_tensor_methods.cache_clear()
    shims_module._list_overridable_functions.cache_clear()
    assert _traced(lambda: torch.overrides.resolve_name(torch.Tensor.add)) == "torch.Tensor.add"
    assert torch.overrides.resolve_name(torch.Tensor.as_subclass) == "torch.Tensor.as_subclass"


def test_an_exception_without_a_text_passes() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    library = torch.library.Library("dispatcher_trace_silent", "DEF")
    library.define("fail(Tensor x) -> Tensor")

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise Silent

    library.impl("fail", fail, "CPU")
    with (
        installed("core", only=["dispatcher_trace_silent::fail"]) as shims,
        pytest.raises(Silent),
        record(shims, kernels=False) as t,
    ):
        torch.ops.dispatcher_trace_silent.fail(torch.ones(1))
    assert t.hops[-1].error == "Silent"


def test_a_kernel_that_is_a_partial_keeps_what_it_binds() -> None:
    library = torch.library.Library("dispatcher_trace_partial", "DEF")
    library.define("make(Tensor x) -> Tensor")

    def make(x: torch.Tensor, size: int = 1, *, more: int = 0) -> torch.Tensor:
        return x.new_empty(size + more)

    library.impl("make", functools.partial(make, size=4, more=1), "Meta")
    library.impl("make", functools.partial(make, more=4), "CPU")

    def sizes() -> tuple[object, object]:
        plain = torch.ops.dispatcher_trace_partial.make(torch.ones(2)).shape
        with FakeTensorMode():
            return plain, torch.ops.dispatcher_trace_partial.make(torch.ones(2)).shape

    assert _traced(sizes, ["dispatcher_trace_partial::make"]) == ((5,), (5,))
    assert sizes() == ((5,), (5,))


def test_a_kernel_of_cpp_is_not_run_to_find_out_what_it_is() -> None:
    library, state = torch.library.Library("dispatcher_trace_cpp", "DEF"), torch.zeros(2)
    library.define("add_to_state(Tensor x) -> Tensor")
    library.impl("add_to_state", state.add_, "CPU")
    _traced(lambda: None, ["dispatcher_trace_cpp::add_to_state"])
    assert state._version == 0
    torch.ops.dispatcher_trace_cpp.add_to_state(torch.ones(2))
    assert state.tolist() == [1, 1]


def test_arguments_may_have_the_names_of_a_factorys() -> None:
    library = torch.library.Library("dispatcher_trace_names", "DEF")
    library.define("load(Tensor x, str device, int[] layout, int[] dtype) -> Tensor")
    library.impl("load", lambda x, *_: x * 2, "CPU")
    with installed("core", only=["dispatcher_trace_names::load"]) as shims, record(shims, kernels=False) as t:
        torch.ops.dispatcher_trace_names.load(torch.ones(2), "disk 3", [1, 2], [4])
    assert [call.path for call in t.calls] == [("AutogradCPU", "CPU")]
    assert "device='disk 3'" in t.calls[0].title


@pytest.mark.usefixtures("few_operators")
def test_an_operator_that_the_code_defines_is_traced() -> None:
    with trace(scope="core", kernels=False) as t:
        library = torch.library.Library("dispatcher_trace_defined", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CPU")
        torch.ops.dispatcher_trace_defined.twice(torch.ones(2))
    call = t.calls[-1]
    assert call.operator == "dispatcher_trace_defined::twice"
    assert [inner.operator for inner in call.hops[-1].calls] == ["aten::add.Tensor"]


def test_a_kernel_that_still_runs_when_the_trace_ends() -> None:
    entered, ended = threading.Event(), threading.Event()
    library = torch.library.Library("dispatcher_trace_waits", "DEF")
    library.define("wait(Tensor x) -> Tensor")

    def wait(x: torch.Tensor) -> torch.Tensor:
        entered.set()
        ended.wait()
        return x + x

    library.impl("wait", wait, "CPU")
    x = torch.ones(2)
    thread = threading.Thread(target=lambda: torch.ops.dispatcher_trace_waits.wait(x))
    with installed("core", only=["dispatcher_trace_waits::wait"]) as shims:
        with record(shims, kernels=False) as t:
            thread.start()
            entered.wait()
        spans = [event for event in t.to_perfetto()["traceEvents"] if event["ph"] == "X"]
        ended.set()
        thread.join()
    assert spans
    assert all(event["dur"] >= 0 for event in spans)
    assert t.findings == []


# -- stack and signals -------------------------------------------------------------------------------------------------


def test_code_that_nearly_reaches_the_limit_of_recursion_runs() -> None:
    x = torch.ones(2, 2)

    def fits(depth: int) -> bool:
        try:
            return bool(torch.mm(x, x) is None) if depth == 0 else fits(depth - 1)
        except RecursionError:
            return True

    def deepest() -> int:
        return next(depth for depth in range(sys.getrecursionlimit(), 0, -1) if not fits(depth))

    depth, limit = deepest(), sys.getrecursionlimit()
    assert _traced(lambda: fits(depth)) is False
    assert sys.getrecursionlimit() == limit


def test_every_signal_that_waited_is_handled() -> None:
    received: list[int] = []

    def handler(number: int, frame: object) -> None:
        received.append(number)
        raise InterruptedError(number)

    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    earlier = [signal.signal(number, handler) for number in numbers]
    try:
        with pytest.raises(InterruptedError), _uninterrupted():  # noqa: PT012
            for number in numbers:
                signal.raise_signal(number)
            assert received == []
        assert received == list(numbers)
    finally:
        for number, before in zip(numbers, earlier, strict=True):
            signal.signal(number, before)


@pytest.mark.usefixtures("few_operators")
def test_a_trace_that_another_thread_ends() -> None:
    def suspended() -> Iterator[None]:
        with trace(scope="core", kernels=False):
            yield

    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    before = torch._C._dispatch_dump_table("aten::add.Tensor")
    generator, errors = suspended(), []
    next(generator)

    def close() -> None:
        try:
            generator.close()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, handler)
    assert errors == []
    assert torch._C._dispatch_dump_table("aten::add.Tensor") == before
