"""Trace one call of the user's code, and time its operators in a second run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from benchkit import UserError
from benchkit.errors import first_line
from dispatcher_trace.capture.profile import profiled
from dispatcher_trace.capture.scope import Scope
from dispatcher_trace.cli.conditions import Conditions
from dispatcher_trace.explain import operator_cost
from dispatcher_trace.recording import trace
from dispatcher_trace.trace import Trace


def record_call(
    function: Callable[..., Any],
    tensors: Mapping[str, torch.Tensor],
    conditions: Conditions,
    scope: Scope,
    *,
    native: bool,
    costs: bool,
) -> tuple[Trace, str]:
    """Trace a call of a function.

    Args:
        function: The function.
        tensors: Its arguments.
        conditions: The conditions of the call.
        scope: Which keys to watch.
        native: Whether to single-step CPU kernels.
        costs: Whether to time the operators in a second run.

    Returns:
        The trace, and the table of operator costs; empty without ``costs``.

    Raises:
        UserError: If the user's code raises; the message names the run.
    """
    on_gpu = conditions.device == "cuda"
    with _user_errors("the traced code"):
        call = conditions.prepare(function, tensors)
        with trace(scope=scope, kernels=on_gpu, native=native) as recorded:
            call()
            if on_gpu:
                torch.cuda.synchronize()
    if not costs:
        return recorded, ""
    # After the trace: gradients, caches and optimizer state of an earlier run would change its operators.
    what = "the second, untraced run for --cost (leave --cost out if the code runs only once)"
    with _user_errors(what), profiled() as profile:
        call()
    return recorded, f"\n{operator_cost.table(operator_cost.operator_costs(profile, recorded.all_calls))}\n"


@contextmanager
def _user_errors(what: str) -> Iterator[None]:
    """Turn what the user's code raises inside the block into one line that names the run."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{what} raised {first_line(error)}") from error
