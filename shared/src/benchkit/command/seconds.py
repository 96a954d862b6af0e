"""A time as an option of a command."""

from __future__ import annotations

import math
from typing import Any

import typer

LEAST = 0.01


def seconds_option(*, help: str) -> Any:
    """An option that takes a finite number of seconds, at least ``LEAST``; any other is a line and status 2."""
    return typer.Option(help=help, callback=_checked)


def _checked(seconds: float) -> float:
    if not LEAST <= seconds < math.inf:
        raise typer.BadParameter(f"expected a finite number of seconds, at least {LEAST:g}, got {seconds:g}")
    return seconds
