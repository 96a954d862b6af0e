"""Runs a cause on the installed torch: does it happen, and is the fixed program one graph with equal outputs?"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from compile_bench.capture.collector import Collector, settings, untimed_guards, user_code_filter
from compile_bench.capture.eager_frames import EagerWatch
from compile_bench.capture.trace import CompileTrace
from compile_bench.catalogue.cause import Cause
from compile_bench.catalogue.programs import Repro
from compile_bench.targets.target import FunctionModel

# The catalogue's files count as user code here.
_USER_CODE = user_code_filter(launcher=False)


@dataclass(frozen=True)
class Outcome:
    """What happened when a cause ran."""

    happens: bool  # whether the broken program breaks, recompiles or runs eagerly as the entry says
    # Reasons of the breaks, guards of the recompilations, or messages about functions that ran eagerly.
    seen: tuple[str, ...]
    registry: tuple[str, ...]  # numbers of the breaks in PyTorch's published list of graph breaks
    whole: bool  # whether the fixed program compiled into one graph, without recompiling
    equal: bool | None  # whether the outputs of both programs agreed; None if they are not compared
    error: str = ""  # error of the fixed program; empty if there was none

    @property
    def as_stated(self) -> bool:
        """Whether the cause happens and its fix works."""
        return self.happens and self.whole and self.equal is not False


def examine(cause: Cause) -> Outcome:
    """Run both programs of a cause, compiled with the ``eager`` backend."""
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)
    # The repros print and warn on purpose.
    quiet = (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()))
    with quiet[0], quiet[1], warnings.catch_warnings(), untimed_guards():
        warnings.simplefilter("ignore")
        seen, registry = _run_broken(cause, cause.make())
        outputs, error = _run_fixed(cause, cause.make())
        happens = any(re.search(cause.pattern, reason) for reason in seen)
        if error or outputs is None:
            return Outcome(happens, seen, registry, False, None, error)
        equal = None
        if cause.equal:
            eager = cause.make()
            function = getattr(eager.broken, eager.method) if eager.method else eager.broken
            equal = _agree(_outputs(function, eager.calls, eager.context), outputs)
    return Outcome(happens, seen, registry, True, equal)


def _run_broken(cause: Cause, repro: Repro) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What PyTorch reports about the broken program, and the registry numbers of its breaks."""
    torch.compiler.reset()
    compiled: Any = torch.compile(repro.broken, backend="eager", **cause.options)
    function = getattr(compiled, repro.method) if repro.method else compiled
    with Collector() as collector:
        _outputs(function, repro.calls, repro.context)
    trace = collector.trace(_USER_CODE)
    registry = tuple(sorted({met.registry for met in trace.breaks if met.registry}))
    if cause.kind == "break":
        return tuple(dict.fromkeys(met.reason for met in trace.breaks)), registry
    if cause.kind == "recompile":
        return tuple(dict.fromkeys(_portable(again.guard) for again in trace.recompiles)), registry
    return _silent(repro, function, trace), registry


def _portable(guard: str) -> str:
    """A guard without what differs between processes and machines: ids of objects, addresses, and paths of code."""
    return re.sub(r"\b\d{9,}\b", "N", re.sub(r"(<code object \w+) at [^>]*>", r"\1>", guard))


def _silent(repro: Repro, function: Callable[..., Any], trace: CompileTrace) -> tuple[str, ...]:
    """Messages about what the last call computed outside any graph."""
    limits = tuple(met.reason for met in trace.breaks if met.category == "recompile limit")
    if limits:
        return limits
    module = repro.broken if isinstance(repro.broken, nn.Module) else FunctionModel(function)
    step = function if isinstance(repro.broken, nn.Module) else module
    eager = EagerWatch([module], _USER_CODE).run(lambda: step(*repro.calls[-1]))
    empty = {(function.file, function.line) for function in trace.empty}
    return tuple(
        "did nothing with tensors when first called"
        if (eager_frame.frame.file, eager_frame.frame.line) in empty
        else f"torch.compile(model) compiles forward, not {eager_frame.frame.function}"
        for eager_frame in eager
    )


def _run_fixed(cause: Cause, repro: Repro) -> tuple[list[Any] | None, str]:
    """Outputs of the compiled fixed program, None if it failed; and its error, empty if it has none."""
    torch.compiler.reset()
    calls = repro.calls if repro.fixed_calls is None else repro.fixed_calls
    # Without other arguments, the fix of a recompilation is to keep the context of all calls the same.
    same_context = cause.kind == "recompile" and repro.fixed_calls is None
    with settings(cause.settings):
        compiled: Any = torch.compile(repro.fixed, backend="eager", fullgraph=True)
        with Collector() as collector:
            try:
                outputs = _outputs(compiled, calls, lambda index: repro.context(0 if same_context else index))
            except Exception as error:  # whatever Dynamo raises with fullgraph=True
                return None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    recompiles = collector.trace(_USER_CODE).recompiles
    return outputs, f"recompiled: {recompiles[0].guard}" if recompiles else ""


def _outputs(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    context: Callable[[int], AbstractContextManager[Any]],
) -> list[Any]:
    """A copy of the output of each call, under seed 0. ``context`` makes the context manager of the n-th call."""
    torch.manual_seed(0)
    outputs = []
    for index, arguments in enumerate(calls):
        with context(index):
            output = function(*arguments)
            outputs.append(pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), output))
    return outputs


def _agree(eager: list[Any], fixed: list[Any]) -> bool:
    try:
        # This compares dtype and shape, too. The tolerance is torch's default for the dtype.
        torch.testing.assert_close(fixed, eager)
    except AssertionError:
        return False
    return True
