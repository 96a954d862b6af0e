"""Processes that measure side by side: while one measures the others are stopped, and their figures do not show it."""

import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from benchkit.processes import ExclusiveTiming, Stopwatch, exclusive, one_at_a_time, pauses

# Records the time every few milliseconds until there is a file, and at the end how long it took, by its own stopwatch
# and by the clock.
WORKING = """
import sys, time
from pathlib import Path
from benchkit.processes import Stopwatch
folder, ticks, over = map(Path, sys.argv[1:])
begin = time.time()
with Stopwatch(folder) as watch:
    while not over.exists():
        with ticks.open("a") as file:
            file.write(f"{time.time()}\\n")
        time.sleep(0.005)
with ticks.open("a") as file:
    file.write(f"{watch.seconds} {time.time() - begin}\\n")
"""

# Measures for a third of a second, or ends within it, and writes when.
MEASURING = """
import os, sys, time
from pathlib import Path
from benchkit.processes import exclusive
folder, end, measured = sys.argv[1:]
with exclusive(Path(folder)):
    begin = time.time()
    time.sleep(0.3)
    Path(measured).write_text(f"{begin} {time.time()}")
    if end == "dies":
        os._exit(3)
"""

# By how much two clocks of one machine may differ for a second: NTP sets one right by 500 ppm at most.
SLEW = 5e-4


@contextmanager
def started(code, *arguments):
    """A process with a group of its own, as measuring processes have."""
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("end", ["ends its block", "dies"])
def test_the_others_are_stopped_while_one_measures(tmp_path, end):
    ticks, folder, over, measured = (tmp_path / name for name in ("ticks", "exclusive", "over", "measured"))
    processes = []

    def groups():
        return [process.pid for process in processes if process.poll() is None]

    with ExclusiveTiming(folder, groups) as timing, started(WORKING, folder, ticks, over) as working:
        processes.append(working)
        while not ticks.exists():
            time.sleep(0.01)
        before = time.monotonic()
        with started(MEASURING, folder, end, measured) as measuring:
            processes.append(measuring)
            measuring.wait()
            over.touch()
            working.wait()
    *lines, took = ticks.read_text().splitlines()
    times = [*map(float, lines)]
    ((begin, end_of_pause),) = pauses(folder)
    first, last = map(float, measured.read_text().split())
    assert begin < first < last < end_of_pause
    assert [time for time in times if first < time < last] == []
    own, wall = map(float, took.split())
    # The stopped one has its own sleeping, before and after the pause, and the pause is not in its figure.
    own_sleeps = sum(not begin < time < end_of_pause for time in times) - 2
    assert own <= wall - (end_of_pause - begin) + SLEW * wall
    assert own >= 0.005 * own_sleeps - SLEW * wall
    assert not [file.name for file in folder.iterdir() if file.suffix in (".waiting", ".granted", ".finished")]
    assert 0.3 < timing.stopped_seconds(working.pid, before) < time.monotonic() - before
    assert timing.stopped_seconds(working.pid, time.monotonic()) == timing.stopped_seconds(measuring.pid, before) == 0


def test_a_pause_that_cannot_be_recorded_stops_nobody_for_good(tmp_path):
    ticks, folder, over = tmp_path / "ticks", tmp_path / "exclusive", tmp_path / "over"
    (folder / "pauses").mkdir(parents=True)  # where a file is to be
    processes = []

    def groups():
        return [process.pid for process in processes if process.poll() is None]

    def measure_twice():
        with ExclusiveTiming(folder, groups), started(WORKING, tmp_path, ticks, over) as working:
            processes.append(working)
            while not ticks.exists():
                time.sleep(0.01)
            for _ in range(2):  # the first failure does not end the thread
                with started(MEASURING, folder, "dies", tmp_path / "measured") as measuring:
                    processes.append(measuring)
                    assert measuring.wait() == 3
            over.touch()
            assert working.wait() == 0

    with pytest.raises(IsADirectoryError):
        measure_twice()


def test_without_others_nothing_waits_and_nothing_is_subtracted(tmp_path):
    with exclusive(None), one_at_a_time(None, "gpu"), Stopwatch() as watch:
        time.sleep(0.02)
    assert watch.seconds >= 0.02
    assert pauses(None) == pauses(tmp_path) == []
    with one_at_a_time(tmp_path, "gpu"):
        assert (tmp_path / "gpu.lock").exists()


def test_a_wait_for_a_lock_is_subtracted_once(tmp_path):
    """In a process of its own, since a process remembers its waits. It is stopped while it waits, too."""
    code = """
import fcntl, sys, time
from pathlib import Path
from benchkit.processes import Stopwatch, one_at_a_time, pauses
folder, flock = Path(sys.argv[1]), fcntl.flock
def wait(*arguments):
    (folder / "begun").touch()
    flock(*arguments)
fcntl.flock = wait
begin = time.perf_counter()
with Stopwatch(folder) as watch:
    with one_at_a_time(folder, "gpu"):
        time.sleep(0.05)
print(watch.seconds, time.perf_counter() - begin, *pauses(folder)[0], len(pauses(folder)))
"""
    with one_at_a_time(tmp_path, "gpu"):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        now = time.time()
        (tmp_path / "pauses").write_text(f"{now - 0.2} {now - 0.1}\n")
    seconds, wall, begin, end, count = map(float, process.communicate()[0].split())
    assert count == 1  # the pause lies within the wait
    assert end - begin >= 0.5 - SLEW * wall
    assert 0.05 - SLEW * wall <= seconds <= wall - (end - begin) + SLEW * wall


def test_a_stopwatch_subtracts_what_lies_within_it(tmp_path, monkeypatch):
    now = 100.0
    clock = SimpleNamespace(time=lambda: now, perf_counter=lambda: now)
    monkeypatch.setattr("benchkit.processes.exclusive_timing.time", clock)
    (tmp_path / "pauses").write_text("91.0 92.0\n99.0 100.25\n")
    with Stopwatch(tmp_path) as watch:
        now += 1.0
    assert watch.seconds == 0.75
