"""Two checks: whether the dispatch tables are restored, and what common advice on the dispatcher yields."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from benchkit import Quantity
from benchkit.run import Run
from dispatcher_trace.capture import dispatcher
from dispatcher_trace.capture.shims import installed
from dispatcher_trace.recording import record


def record_restored(run: Run, before: Mapping[str, str]) -> None:
    """Record whether the tables are as before, and are so again after a trace whose code raises.

    Args:
        run: Where the record goes.
        before: The dispatcher's dumps before the first shims were installed.
    """
    after = dispatcher.dumps()
    with suppress(IndexError), installed("core") as shims, record(shims, kernels=False):
        torch.ones(2).select(0, 5)
    run.record(
        "restored",
        values={"operators": Quantity(len(before), "")},
        data={"equal": after == before, "equal_after_exception": dispatcher.dumps() == before},
    )


@contextmanager
def show_dispatch_trace() -> Iterator[Callable[[], str]]:
    """Start a process that adds two tensors with ``TORCH_SHOW_DISPATCH_TRACE=1``.

    Yields:
        A function that waits for the process and returns what it printed.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", "import torch; torch.ones(2) + 1"],
        env={**os.environ, "TORCH_SHOW_DISPATCH_TRACE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def printed() -> str:
        output, _ = child.communicate()
        if child.returncode:
            raise RuntimeError(f"a process that adds two tensors ended with status {child.returncode}: {output}")
        return output

    with child:
        try:
            yield printed
        finally:
            child.kill()


def record_claims(run: Run, printed: str) -> None:
    """Record what two tools that notes on the dispatcher recommend do in this build of torch.

    Args:
        run: Where the records go.
        printed: The output of the process of :func:`show_dispatch_trace`.
    """
    name = "_dispatch_print_registrations"
    run.record("claim", {"claim": f"torch._C.{name}"}, data={"exists": hasattr(torch._C, name)})
    lines = [line for line in printed.splitlines() if "op=" in line]
    run.record("claim", {"claim": "TORCH_SHOW_DISPATCH_TRACE"}, data={"lines": len(lines)})
