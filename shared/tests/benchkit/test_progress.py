"""Progress without a terminal: plain lines for long work, nothing for short work."""

from __future__ import annotations

import gc
import io
import sys
import threading
from contextlib import redirect_stderr

import pytest

from benchkit.command import progress


class Log(io.StringIO):
    """A log that tells when it has its n-th line."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self._lines, self.full = lines, threading.Event()

    def flush(self) -> None:
        super().flush()
        if self.getvalue().count("\n") >= self._lines:
            self.full.set()


@pytest.fixture
def soon(monkeypatch) -> None:
    monkeypatch.setattr(progress, "_FIRST_LINE", 0)
    monkeypatch.setattr(progress, "_NEXT_LINE", 0.001)


def test_long_work_is_a_line_now_and_then_and_one_at_its_end(soon):
    with redirect_stderr(Log(2)) as log, progress.working("timing \x1b[31m[red]x"):
        assert log.full.wait(200)
    lines = log.getvalue().splitlines()
    assert {line.split(": ")[0] for line in lines} == {"timing \\x1b[31m[red]x"}
    assert lines[0].endswith(": 0 s")
    assert lines[-1].split(": ")[1].startswith("ended after ")


def test_a_line_tells_how_many_items_are_done(soon):
    with redirect_stderr(Log(2)) as log, progress.track(["a", "b"], "letters") as letters:
        for item in letters:
            assert item == "a" or log.full.wait(200)
    assert log.getvalue().splitlines()[-1].startswith("letters: 2 of 2, ended after ")


def test_of_work_within_work_the_innermost_prints_with_the_name_of_the_outermost(monkeypatch):
    monkeypatch.setattr(progress, "_FIRST_LINE", 0.001)
    monkeypatch.setattr(progress, "_NEXT_LINE", 0.001)
    outer, inner = progress.working("parity (1 of 9)"), progress.working("in float32")
    with redirect_stderr(Log(8)) as log, outer, inner, progress.track([1], "steps"):
        log.seek(0)
        log.truncate()
        log.full.clear()
        assert log.full.wait(60)
    lines = log.getvalue().splitlines()[2:]  # the two outer ones may have been about to print
    assert {line.partition(": ")[0] for line in lines[:6]} == {"parity (1 of 9), steps"}


def test_short_work_prints_nothing_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_FIRST_LINE", 3600)
    with progress.working("quick"), progress.track(iter([1, 2]), "numbers", total=2) as numbers:
        assert list(numbers) == [1, 2]
    assert "".join(capsys.readouterr()) == ""


def test_an_error_ends_the_lines(soon):
    """Whoever keeps the error keeps its frames, too."""
    failing = progress.working("failing")
    with redirect_stderr(io.StringIO()), pytest.raises(KeyError) as kept, failing, progress.track([1], "item") as items:
        raise KeyError([*items])
    assert kept.value.args == ([1],)
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_a_signal_at_any_moment_leaves_no_line_behind(soon):
    """Later work would print under the name of what a signal ended. Handlers run where a call begins or has ended; in
    the midst of threading's own calls they may leave a lock as no one should.
    """

    def interrupted(moment: int) -> bool:
        moments = 0

        def count(frame, event, argument):
            nonlocal moments
            own, called = (where.f_code.co_filename == progress.__file__ for where in (frame, frame.f_back))
            moments += (own and event in {"call", "c_return"}) or (called and event in {"call", "return", "c_return"})
            if moments == moment:
                sys.setprofile(None)
                raise KeyboardInterrupt

        try:
            sys.setprofile(count)
            with progress.working("interrupted"):
                pass
            sys.setprofile(None)
        except KeyboardInterrupt:
            return True
        return False

    moment = 1
    with redirect_stderr(io.StringIO()):
        while interrupted(moment):
            gc.collect()  # an exception may hold what the block was left with
            assert progress._Lines._active == [], moment
            for thread in threading.enumerate():
                if thread.name == "progress" and thread.is_alive():
                    thread.join(60)
                    assert not thread.is_alive(), moment
            moment += 1
    assert moment > 20
