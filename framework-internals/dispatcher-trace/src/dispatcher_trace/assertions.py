"""Assertions on how code is dispatched, for one's own tests.

Each installs the shims for the call (``scope="core"`` by default, about a second); a fixture that holds
:func:`dispatcher_trace.installed` open and hands it over as ``shims`` does so once for many.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from dispatcher_trace.capture.scope import Scope
from dispatcher_trace.capture.shims import Shims, installed
from dispatcher_trace.capture.types import Call
from dispatcher_trace.capture.user_stack import calls_user_code
from dispatcher_trace.recording import record
from dispatcher_trace.trace import Trace

calls_user_code(__file__)

_T = TypeVar("_T")


def assert_no_hidden_copies(
    function: Callable[..., _T],
    *args: Any,
    allow: Collection[str] = (),
    scope: Scope = "core",
    shims: Shims | None = None,
    **kwargs: Any,
) -> _T:
    """Fail when a call copies data although its lines ask for something else: casts, ``.contiguous()``, ``.to()``.

    Args:
        function: called once, with the other arguments.
        *args: for it.
        allow: operators that may copy: as the user's line calls them (``aten::reshape``) or as the copy itself
            (``aten::_to_copy``), with or without overload.
        scope: as :func:`dispatcher_trace.trace` has it.
        shims: installed already.
        **kwargs: for the function.

    Returns:
        What the function returned.

    Raises:
        AssertionError: with a line for each copy: what, from what to what, the line of code.
    """
    __tracebackhide__ = True
    with _recorded(shims, scope) as walk:
        result = function(*args, **kwargs)
    copies = [
        finding
        for finding in walk.findings
        if finding.kind == "copy" and not (_named(finding.cause, allow) or _named(finding.operator, allow))
    ]
    if copies:
        count = "1 hidden copy" if len(copies) == 1 else f"{len(copies)} hidden copies"
        raise AssertionError("\n  ".join([f"{count}:", *map(str, copies)]))
    return result


def assert_dispatch(
    function: Callable[..., _T],
    operator: str,
    *args: Any,
    keys: Sequence[str],
    scope: Scope = "core",
    shims: Shims | None = None,
    **kwargs: Any,
) -> _T:
    """Fail unless an operator is called and visits exactly these keys, in this order.

    Args:
        function: called once, with the other arguments.
        operator: ``aten::mm``; without an overload any of its overloads will do.
        *args: for the function.
        keys: ``["AutogradCPU", "CPU"]``; one call of the operator that visits them is enough.
        scope: as :func:`dispatcher_trace.trace` has it.
        shims: installed already.
        **kwargs: for the function.

    Returns:
        What the function returned.

    Raises:
        AssertionError: with the keys that the operator visited, or the operators that were called instead.
    """
    __tracebackhide__ = True
    with _recorded(shims, scope) as walk:
        result = function(*args, **kwargs)
    every = walk.all_calls
    called = [call for call in every if _named(call.operator, (operator,))]
    if not called:
        others = ", ".join(dict.fromkeys(call.operator for call in every)) or "no operator at all"
        raise AssertionError(f"{operator} was not called; called were: {others}")
    if not any(list(call.path) == list(keys) for call in called):
        seen = [f"{_path(call)}: {call.title}" for call in called]
        raise AssertionError("\n  ".join([f"{operator} never visited {' → '.join(keys)}, but:", *dict.fromkeys(seen)]))
    return result


@contextmanager
def _recorded(shims: Shims | None, scope: Scope) -> Iterator[Trace]:
    if shims is None:
        with installed(scope) as own, record(own, kernels=False) as walk:
            yield walk
    else:
        with record(shims, kernels=False) as walk:
            yield walk


def _named(operator: str, names: Collection[str]) -> bool:
    return operator in names or operator.partition(".")[0] in names


def _path(call: Call) -> str:
    return " → ".join(call.path)
