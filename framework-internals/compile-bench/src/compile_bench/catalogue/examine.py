"""Run a cause on this torch: does it happen as stated, and is the mended program whole and equal?"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from compile_bench.capture.collector import Collector, settings, user_code_filter
from compile_bench.capture.eager_frames import EagerWatch
from compile_bench.capture.trace import CompileTrace
from compile_bench.catalogue.cause import Cause, Repro


@dataclass(frozen=True)
class Outcome:
    """What came of a cause.

    Attributes:
        happens: whether it breaks, recompiles or runs eagerly as stated.
        seen: the reasons of breaks, or the guards of recompilations; what ran eagerly.
        registry: numbers of the breaks in PyTorch's published list.
        whole: whether the mended program compiled into one graph, without recompiling.
        equal: whether outputs agreed; None where they are not compared.
        error: what went wrong with the mended program; empty if nothing did.
    """

    happens: bool
    seen: tuple[str, ...]
    registry: tuple[str, ...]
    whole: bool
    equal: bool | None
    error: str = ""

    @property
    def as_stated(self) -> bool:
        """Whether the cause happens and its fix mends it."""
        return self.happens and self.whole and self.equal is not False


def examine(cause: Cause) -> Outcome:
    """Run both programs of a cause, compiled with the ``eager`` backend."""
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)
    # The repros are the model here, and what they write and warn of is no news.
    quiet = (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()))
    with quiet[0], quiet[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen, registry = _broken(cause, cause.make())
        outputs, error = _fixed(cause, cause.make())
        happens = any(re.search(cause.pattern, each) for each in seen)
        if error or outputs is None:
            return Outcome(happens, seen, registry, False, None, error)
        equal = _agree(_eager(cause.make()), outputs) if cause.equal else None
    return Outcome(happens, seen, registry, True, equal)


def _broken(cause: Cause, repro: Repro) -> tuple[tuple[str, ...], tuple[str, ...]]:
    torch.compiler.reset()
    torch.manual_seed(0)
    compiled: Any = torch.compile(repro.broken, backend="eager", **cause.options)
    function = getattr(compiled, repro.method) if repro.method else compiled
    with Collector() as collector:
        for index, arguments in enumerate(repro.calls):
            with _around(repro, index):
                function(*arguments)
    trace = collector.trace(_USER_CODE)
    registry = tuple(sorted({each.registry for each in trace.breaks if each.registry}))
    if cause.kind == "break":
        return tuple(dict.fromkeys(each.reason for each in trace.breaks)), registry
    if cause.kind == "recompile":
        return tuple(dict.fromkeys(_anywhere(each.guard) for each in trace.recompiles)), registry
    return _silent(repro, function, trace), registry


def _anywhere(guard: str) -> str:
    """A guard without what is this process's or this machine's: objects' numbers, addresses and files of code."""
    return re.sub(r"\b\d{9,}\b", "N", re.sub(r"(<code object \w+) at [^>]*>", r"\1>", guard))


# Here the catalogue's own files are the user's.
_USER_CODE = user_code_filter(launcher=False)


def _silent(repro: Repro, function: Any, trace: CompileTrace) -> tuple[str, ...]:
    """What the last call computed outside any graph."""
    holder = repro.broken if isinstance(repro.broken, nn.Module) else _Holder(function)
    watch = EagerWatch([holder], _USER_CODE)
    step = function if isinstance(repro.broken, nn.Module) else holder
    found = watch.run(lambda: step(*repro.calls[-1]))
    limits = tuple(each.reason for each in trace.breaks if each.category == "recompile limit")
    empty = {(each.file, each.line) for each in trace.empty}
    said = [
        "did nothing with tensors when first called"
        if (each.frame.file, each.frame.line) in empty
        else f"torch.compile(model) compiles forward, not {each.frame.function}"
        for each in found
    ]
    return limits or tuple(said)


class _Holder(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _fixed(cause: Cause, repro: Repro) -> tuple[list[Any] | None, str]:
    torch.compiler.reset()
    torch.manual_seed(0)
    outputs = []
    calls = repro.calls if repro.fixed_calls is None else repro.fixed_calls
    with settings(cause.settings):
        compiled: Any = torch.compile(repro.fixed, backend="eager", fullgraph=True)
        with Collector() as collector:
            for index, arguments in enumerate(calls):
                # What differs from call to call is what the mended program is spared.
                with _around(repro, 0 if cause.kind == "recompile" and repro.fixed_calls is None else index):
                    try:
                        outputs.append(pytree.tree_map(_detached, compiled(*arguments)))
                    except Exception as error:  # whatever Dynamo raises with fullgraph=True
                        return None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    again = collector.trace(_USER_CODE).recompiles
    return outputs, f"recompiled: {again[0].guard}" if again else ""


def _eager(repro: Repro) -> list[Any]:
    torch.manual_seed(0)
    function = getattr(repro.broken, repro.method) if repro.method else repro.broken
    outputs = []
    for index, arguments in enumerate(repro.calls):
        with _around(repro, index):
            outputs.append(pytree.tree_map(_detached, function(*arguments)))
    return outputs


def _around(repro: Repro, index: int) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if repro.around is None else repro.around(index)


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _agree(eager: Sequence[Any], fixed: Sequence[Any]) -> bool:
    try:
        # dtype and shape too; the tolerance is torch's own for the dtype.
        torch.testing.assert_close(list(fixed), list(eager))
    except AssertionError:
        return False
    return True
