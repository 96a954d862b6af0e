"""Recording a trace: the context managers :func:`trace` and :func:`record`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from benchkit import UserError
from benchkit.timing import unrun
from dispatcher_trace.capture import profile
from dispatcher_trace.capture.key_sets import Scope
from dispatcher_trace.capture.native_step import Stepper
from dispatcher_trace.capture.recorder import MAX_HOPS, Recorder
from dispatcher_trace.capture.shims import WAIT_FOR_THREADS, Shims, installed
from dispatcher_trace.capture.types import Call
from dispatcher_trace.capture.user_stack import calls_user_code, raised
from dispatcher_trace.explain.assemble import calls_of
from dispatcher_trace.trace import Trace

calls_user_code(__file__)


@contextmanager
def record(
    shims: Shims, *, kernels: bool | None = None, native: bool = False, max_hops: int | None = MAX_HOPS
) -> Iterator[Trace]:
    """Record one trace with shims that are already installed, so that several traces share one installation.

    Args:
        shims: What :func:`dispatcher_trace.installed` gave.
        kernels: Whether to run the profiler and put device kernels under their calls. None: where torch sees a GPU.
        native: Whether to single-step CPU kernels, each kind once; see :mod:`dispatcher_trace.capture.native_step`.
        max_hops: Number of hops that are kept in any case. After them, a call that differs from a kept one only in its
            tensors, numbers and times is counted (``Call.alike``) and not kept. 0 or None to keep every hop.

    Raises:
        UserError: If this machine cannot single-step.
        ValueError: If ``max_hops`` is no such number.
        RuntimeError: If a recording is running, or if ``kernels`` is true and another profiler is running.
    """
    if shims.recorder is not None:
        raise RuntimeError("a recording is running already; end its block first")
    if not (max_hops is None or (isinstance(max_hops, int) and max_hops >= 0)):
        raise ValueError(f"max_hops: expected a whole number, 0 or None for every hop, got {max_hops!r}")
    if kernels is None:
        kernels = torch.cuda.is_available()
    recorded = Trace(shims.scope)
    stepper = Stepper() if native else None
    recorder: Recorder | None = None
    profiled: profile.Profile | None = None
    # The trace also has its calls when the traced code raises: it then shows the way to the error.
    try:
        with profile.profiled() if kernels else nullcontext() as profiled:
            recorder = shims.recorder = Recorder(max_hops or None)
            shims.stepper = stepper
            recorded.count = recorder.hop_count
            try:
                yield recorded
            except BaseException as error:
                recorded.error = raised(error)
                raise
            finally:
                shims.recorder = shims.stepper = None
    finally:
        if recorder is not None:
            _hand_over(recorder, recorded, profiled)


def _hand_over(recorder: Recorder, recorded: Trace, profiled: profile.Profile | None) -> None:
    """Give a trace what the recorder has. Its calls are assembled when they are first read: that takes longer."""
    recorder.end()
    total = recorder.hop_count()
    recorded.count = lambda: total
    recorded.unrecorded, recorded.counted, recorded.dropped = recorder.unrecorded, recorder.counted, recorder.dropped
    recorded.above = frozenset(recorder.above)
    recorded.profile_ended = profiled is not None and not profiled.events
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        recorded.waiting = WAIT_FOR_THREADS
    top = recorder.top

    def assemble() -> tuple[list[Call], dict[str, int]]:
        calls, first_hops, unshimmed = calls_of(top)
        if profiled is not None and profiled.events:
            recorded.match = profile.attach_kernels(profiled.events, first_hops, calls)
        return calls, unshimmed

    recorded.assemble_with(assemble)
    if profiled is not None:
        recorded.assemble()


@contextmanager
def trace(
    *,
    scope: Scope = "all",
    kernels: bool | None = None,
    native: bool = False,
    max_hops: int | None = MAX_HOPS,
) -> Iterator[Trace]:
    """Record every hop through the dispatcher that the code of the block causes, on any thread.

    Installing the shims takes three seconds (one second with ``scope="core"``); a hop costs tens of microseconds.
    Results are bit-equal to those without a trace. The dispatch tables are restored when the block ends, also when it
    raises.

    Args:
        scope: Which keys to watch; see :func:`dispatcher_trace.capture.key_sets.watched_keys`.
        kernels: Whether to record device kernels, through the profiler. None: where torch sees a GPU.
        native: Whether to single-step CPU kernels, each kind once. This names the routines below the kernels, and takes
            1 to 15 µs an instruction.
        max_hops: Number of hops that are kept in any case. After them, a call that differs from a kept one only in its
            tensors, numbers and times is counted (``Call.alike``) and not kept. 0 or None to keep every hop.

    Raises:
        UserError: If ``native`` is true and this machine cannot single-step.
        RuntimeError: If a trace is active already, here or on another thread, or if torch lacks an API.
    """
    with installed(scope) as shims, record(shims, kernels=kernels, native=native, max_hops=max_hops) as recorded:
        yield recorded


def refuse_unrun(result: Any) -> None:
    """Raise a UserError if the result of traced code is a generator or the like: its trace says nothing of it."""
    if kind := unrun(result):
        raise UserError(
            f"the traced code returned {kind}, which has not run; trace a function that runs it: list(…) of a "
            "generator, asyncio.run(…) of a coroutine"
        )
