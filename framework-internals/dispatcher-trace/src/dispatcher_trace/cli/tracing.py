"""Trace one call of the user's code, time its operators in a second run, and print the trace in a format."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch

from benchkit import UserError, numbers
from dispatcher_trace.capture.dispatcher import near_names
from dispatcher_trace.capture.key_sets import Scope
from dispatcher_trace.capture.profile import ENDED, profiled
from dispatcher_trace.capture.user_stack import raised
from dispatcher_trace.cli.conditions import Conditions
from dispatcher_trace.explain import operator_cost
from dispatcher_trace.recording import trace
from dispatcher_trace.render.outline import Shown, matching, shortened
from dispatcher_trace.render.text import found_text, tree
from dispatcher_trace.trace import Trace

_SECONDS_BETWEEN = 10.0


def record_call(
    function: Callable[..., Any],
    tensors: Mapping[str, torch.Tensor],
    conditions: Conditions,
    scope: Scope,
    *,
    native: bool,
    costs: bool,
    max_hops: int | None,
) -> tuple[Trace, str, UserError | KeyboardInterrupt | None]:
    """Trace a call of a function.

    Args:
        function: The function.
        tensors: Its arguments.
        conditions: The conditions of the call.
        scope: Which keys to watch.
        native: Whether to single-step CPU kernels.
        costs: Whether to time the operators in a second run.
        max_hops: As for :func:`dispatcher_trace.trace`.

    Returns:
        The trace, up to the exception if the traced call raises or is interrupted; the table of operator costs, empty
        without ``costs`` and after an exception; and the error that names the exception.

    Raises:
        UserError: If the user's code raises outside of the traced call, or before its first operator; the message
            names the run.
    """
    on_gpu = conditions.device == "cuda"
    recorded: Trace | None = None
    try:
        with _user_errors("the traced code"):
            call = conditions.prepare(function, tensors)
            with (
                trace(scope=scope, kernels=on_gpu, native=native, max_hops=max_hops) as recorded,
                _progress(recorded),
            ):
                call()
                if on_gpu:
                    torch.cuda.synchronize()
    except (UserError, KeyboardInterrupt) as error:
        if recorded is None or not recorded.calls:
            raise
        return recorded, "", error
    if not costs:
        return recorded, "", None
    # After the trace: gradients, caches and optimizer state of an earlier run would change its operators.
    what = "the second, untraced run for --cost (leave --cost out if the code runs only once)"
    with _user_errors(what), profiled() as profile:
        call()
    table = operator_cost.table(operator_cost.operator_costs(profile, recorded.all_calls)) if profile.events else ENDED
    return recorded, f"\n{table}\n", None


@contextmanager
def _progress(recorded: Trace) -> Iterator[None]:
    """Print the number of hops on standard error from time to time while the block runs."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(_SECONDS_BETWEEN):
            print(f"dispatcher-trace: {numbers.count(recorded.hop_count)} hops so far", file=sys.__stderr__, flush=True)

    thread = threading.Thread(target=report, name="dispatcher_trace progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _user_errors(what: str) -> Iterator[None]:
    """Turn what the user's code raises inside the block into one line that names the run."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{what} raised {raised(error, shortened)}") from error


class Format(StrEnum):
    """The formats."""

    markdown = "markdown"
    tree = "tree"
    findings = "findings"
    json = "json"
    html = "html"
    perfetto = "perfetto"


def as_text(recorded: Trace, form: Format, title: str, shown: Shown, *, full: bool) -> str:
    """The trace in one format.

    Args:
        recorded: The trace.
        form: The format.
        title: Heading of the HTML page.
        shown: The part that is printed where a person reads the format.
        full: Whether Markdown has the tree and the reasons below the summary.

    Raises:
        UserError: If ``shown.only`` names no call of the trace.
    """
    if shown.only and not matching(recorded.calls, shown.only):
        called = list(dict.fromkeys(call.operator for call in recorded.all_calls))
        raise UserError(f"--only {shown.only}: no such call in the trace{near_names(shown.only, called)}")
    if not recorded.calls and form in (Format.tree, Format.findings):
        return "".join(f"{note}\n" for note in recorded.notes)
    match form:
        case Format.json:
            return _json(recorded.to_json())
        case Format.perfetto:
            return _json(recorded.to_perfetto())
        case Format.html:
            return recorded.to_html(title)
        case Format.tree:
            return tree(recorded.calls, shown, failed=bool(recorded.error)) + "\n"
        case Format.findings:
            incomplete = f"{recorded.kept_note()}\n" if recorded.dropped else ""  # "no findings" may then be wrong
            return f"{found_text(recorded.calls, shown)}\n{incomplete}"
        case Format.markdown:
            return recorded.to_markdown(shown) if full else recorded.summary()


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
