"""The command ``dispatcher-trace``."""

from dispatcher_trace.cli.commands import app

__all__ = ["app"]
