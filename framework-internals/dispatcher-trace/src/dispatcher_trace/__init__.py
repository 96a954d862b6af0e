"""Trace a call through PyTorch's dispatcher, hop by hop.

Print what a block calls::

    from dispatcher_trace import trace

    with trace() as t:
        a @ b
    print(t.to_markdown())
"""

from dispatcher_trace.assertions import assert_dispatch, assert_no_hidden_copies
from dispatcher_trace.capture.dispatcher import table_of
from dispatcher_trace.capture.shims import Shims, installed
from dispatcher_trace.capture.types import Argument, Call, Hop, Kernel, NativeFrame, NativeStep, TensorFact
from dispatcher_trace.explain.findings import Finding
from dispatcher_trace.recording import record, trace
from dispatcher_trace.render.compare import Difference, differences
from dispatcher_trace.trace import Trace

__all__ = [
    "Argument",
    "Call",
    "Difference",
    "Finding",
    "Hop",
    "Kernel",
    "NativeFrame",
    "NativeStep",
    "Shims",
    "TensorFact",
    "Trace",
    "assert_dispatch",
    "assert_no_hidden_copies",
    "differences",
    "installed",
    "record",
    "table_of",
    "trace",
]
