"""Assertions on how code is dispatched, for use in tests.

Each assertion installs the shims (``scope="core"`` by default, about a second). A fixture that enters
:func:`dispatcher_trace.installed` once can pass its shims to many assertions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from dispatcher_trace.capture.key_sets import Scope, watched_keys
from dispatcher_trace.capture.shims import Shims, installed
from dispatcher_trace.capture.user_stack import calls_user_code
from dispatcher_trace.recording import record, refuse_unrun
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
    """Fail if a call makes hidden copies: casts, ``.contiguous()``, ``.to()``.

    A copy is hidden if the source line that causes it asks for something else.

    Args:
        function: Function to call, once.
        *args: Its arguments.
        allow: Operators that may copy, with or without overload: the operator that the source line calls
            (``aten::reshape``) or the copy itself (``aten::_to_copy``).
        scope: Which keys to watch; see :func:`dispatcher_trace.trace`.
        shims: Shims that are already installed; None to install them for this call.
        **kwargs: Keyword arguments of the function.

    Returns:
        The result of the function.

    Raises:
        AssertionError: With a line for each copy: the operator, the tensors and the source line.
        UserError: If the function returns a generator or a coroutine, which has not run.
    """
    __tracebackhide__ = True
    allow = (allow,) if isinstance(allow, str) else allow
    with _recorded(shims, scope) as trace:
        result = function(*args, **kwargs)
    refuse_unrun(result)
    copies = [
        finding
        for finding in trace.findings
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
    """Fail unless some call of an operator visits exactly these keys, in this order.

    Args:
        function: Function to call, once.
        operator: ``aten::add.Tensor``, or ``aten::add`` for any overload.
        *args: Arguments of the function.
        keys: Keys that one call of the operator must visit: ``["AutogradCPU", "CPU"]``.
        scope: Which keys to watch; see :func:`dispatcher_trace.trace`.
        shims: Shims that are already installed; None to install them for this call.
        **kwargs: Keyword arguments of the function.

    Returns:
        The result of the function.

    Raises:
        AssertionError: With the keys that the operator visited, or the operators that were called instead.
        ValueError: If the scope does not watch one of the keys, so that no call can be seen to visit it.
    """
    __tracebackhide__ = True
    keys = (keys,) if isinstance(keys, str) else keys
    _check_watched(keys, scope if shims is None else shims.scope)
    with _recorded(shims, scope) as trace:
        result = function(*args, **kwargs)
    every = trace.all_calls
    called = [call for call in every if _named(call.operator, (operator,))]
    if not called:
        others = ", ".join(dict.fromkeys(call.operator for call in every)) or "no operator at all"
        raise AssertionError(f"{operator} was not called; called were: {others}")
    if not any(list(call.path) == list(keys) for call in called):
        seen = [f"{' → '.join(call.path)}: {call.title}" for call in called]
        raise AssertionError("\n  ".join([f"{operator} never visited {' → '.join(keys)}, but:", *dict.fromkeys(seen)]))
    return result


@contextmanager
def _recorded(shims: Shims | None, scope: Scope) -> Iterator[Trace]:
    with (
        nullcontext(shims) if shims else installed(scope) as active,
        record(active, kernels=False, max_hops=None) as trace,  # a hop that was dropped might have the copy
    ):
        yield trace


def _check_watched(keys: Sequence[str], scope: Scope) -> None:
    watched = watched_keys(scope)
    if unseen := [key for key in keys if key not in watched]:
        raised = f"; {names} needs scope='all'" if (names := ", ".join(watched_keys("all") & {*unseen})) else ""
        raise ValueError(
            f"keys: a trace with scope={scope!r} on this machine does not watch {', '.join(unseen)}{raised}; it "
            f"watches {', '.join(sorted(watched))}"
        )


def _named(operator: str, names: Collection[str]) -> bool:
    return operator in names or operator.partition(".")[0] in names
