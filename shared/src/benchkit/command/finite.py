"""A finite number as an option of a command."""

from __future__ import annotations

import math
from typing import Any

import typer

LEAST_SECONDS = 0.01


def seconds_option(*, help: str) -> Any:
    """An option that takes a finite number of seconds, at least ``LEAST_SECONDS``."""
    return finite_option(help=help, least=LEAST_SECONDS, unit=" of seconds")


def finite_option(*, help: str, least: float = 0.0, unit: str = "", panel: str | None = None) -> Any:
    """An option that takes a finite number, or None; any other number is a line and status 2.

    Typer's ``min`` does not do that: whether it lets ``nan`` pass depends on click's version, and it takes ``inf``.

    Args:
        help: What the number means.
        least: The least number that is taken.
        unit: What is counted, as in ``" of seconds"``.
        panel: The panel of the help that shows the option.
    """

    def checked(number: float | None) -> float | None:
        if number is not None and not least <= number < math.inf:
            raise typer.BadParameter(f"expected a finite number{unit}, at least {least:g}, got {number:g}")
        return number

    return typer.Option(help=help, callback=checked, rich_help_panel=panel)
