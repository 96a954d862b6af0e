"""Progress of long work: a bar or a spinner on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import length_hint
from typing import TYPE_CHECKING, ClassVar, TypeVar

from benchkit.command.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

# Without a terminal: seconds until the first line, and from one line to the next. Shorter work prints nothing.
_FIRST_LINE, _NEXT_LINE = 10.0, 30.0


@contextmanager
def track(items: Iterable[T], description: str, *, total: int | None = None) -> Iterator[Iterator[T]]:
    """Show how many items are done while the block runs; yields an iterator over them.

    Args:
        items: The items.
        description: Text beside the bar, or at the start of a line.
        total: Number of items, if ``items`` has no length.
    """

    def counted() -> Iterator[T]:
        for item in items:
            yield item
            advance()

    with _shown(description, total or length_hint(items) or None) as advance:
        yield counted()


@contextmanager
def working(description: str) -> Iterator[None]:
    """Show the elapsed time while the block runs."""
    with _shown(description, None):
        yield


@contextmanager
def _shown(description: str, total: int | None) -> Iterator[Callable[[], None]]:
    """Show progress on standard error, because standard output may be piped; yields what counts an item.

    A library that only calls operators has no need of rich, which is therefore imported for a terminal alone.
    """
    console = _terminal()
    if console is None:
        lines = _Lines(description, total)
        with lines.printed():
            yield lines.advance
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn())
    with Progress(*columns, MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)


def _terminal() -> Console | None:
    """The terminal behind standard error; None if there is none, or without rich, which draws on it."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    console = Console(stderr=True)
    return console if console.is_terminal else None


class _Lines:
    """Prints a line now and then from a thread, so that one long item does not look like a hang.

    Of work within work only the innermost prints, with the name of the outermost: others would say the same again.
    """

    _active: ClassVar[list[_Lines]] = []

    def __init__(self, description: str, total: int | None) -> None:
        self._description, self._total = printable(description), total
        self._start, self._done, self._ended = time.monotonic(), 0, threading.Event()

    def advance(self) -> None:
        self._done += 1

    @contextmanager
    def printed(self) -> Iterator[None]:
        thread = threading.Thread(target=self._print_until_the_end, name="progress", daemon=True)
        try:
            self._active.append(self)
            thread.start()
            yield
        finally:
            # A signal may raise after any of these calls. The entry goes first, and a thread without one ends.
            if self in self._active:
                self._active.remove(self)
            self._ended.set()
            if thread.is_alive():
                thread.join()

    def _print_until_the_end(self) -> None:
        wait, name = _FIRST_LINE, ""
        while not self._ended.wait(wait):
            wait = _NEXT_LINE
            active = tuple(self._active)
            if self not in active:
                break
            if active[-1] is self:
                outermost = active[0]
                name = self._description if outermost is self else f"{outermost._description}, {self._description}"
                self._print(name, "")
        if name:
            self._print(name, "ended after ")

    def _print(self, name: str, state: str) -> None:
        counted = "" if self._total is None else f"{self._done} of {self._total}, "
        line = f"{name}: {counted}{state}{time.monotonic() - self._start:.0f} s\n"
        print(line, end="", file=sys.stderr, flush=True)  # the end of a line by itself would come after another's line
