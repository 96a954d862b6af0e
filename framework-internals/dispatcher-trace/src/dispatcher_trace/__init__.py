"""The annotated walk of a call through PyTorch's dispatcher.

What a block calls, hop by hop, as text::

    from dispatcher_trace import trace

    with trace() as t:
        a @ b
    print(t.to_markdown())
"""

from dispatcher_trace.assertions import assert_dispatch, assert_no_hidden_copies
from dispatcher_trace.compare import Difference, differences
from dispatcher_trace.findings import Finding
from dispatcher_trace.records import Argument, Call, Hop, Kernel, NativeFrame, NativeStep, TensorFact
from dispatcher_trace.shim import Shims, installed
from dispatcher_trace.trace import Trace, record, table_of, trace

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
