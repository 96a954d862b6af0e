"""``python -m dispatcher_trace``: the same as ``dispatcher-trace``."""

from dispatcher_trace.cli import app

app(prog_name="dispatcher-trace")
