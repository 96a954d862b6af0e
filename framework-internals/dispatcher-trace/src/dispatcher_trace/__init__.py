"""The annotated walk of a call through PyTorch's dispatcher.

from dispatcher_trace import trace

with trace() as t:
a @ b
print(t.to_markdown())
"""

from dispatcher_trace.records import Argument, Call, Hop, Kernel, TensorFact
from dispatcher_trace.shim import Shims, installed
from dispatcher_trace.trace import Trace, record, table_of, trace

__all__ = [
    "Argument",
    "Call",
    "Hop",
    "Kernel",
    "Shims",
    "TensorFact",
    "Trace",
    "installed",
    "record",
    "table_of",
    "trace",
]
