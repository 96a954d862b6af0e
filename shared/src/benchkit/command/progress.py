"""Progress bars and spinners on a terminal; without a terminal nothing is printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

T = TypeVar("T")


def _progress() -> Progress:
    # On standard error, because standard output may be piped.
    console = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def track(items: Iterable[T], description: str, *, total: int | None = None) -> Iterator[T]:
    """Iterate with a progress bar on a terminal.

    Args:
        items: The items.
        description: Text beside the bar.
        total: Number of items, if ``items`` has no length.
    """
    with _progress() as progress:
        yield from progress.track(items, total=total, description=description)


@contextmanager
def working(description: str) -> Iterator[None]:
    """Show a spinner and the elapsed time while the block runs, on a terminal."""
    with _progress() as progress:
        progress.add_task(description, total=None)
        yield
