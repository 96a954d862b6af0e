"""Processes that measure side by side: while one samples the others stand still, and their figures do not show it."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from compile_bench import Case, Harness, WorkerFailure
from compile_bench.capture.phases import phase_seconds, without_pauses
from compile_bench.measure.nursery import Nursery, Order
from compile_bench.measure.turns import Conductor, Stopwatch, alone, one_at_a_time, pauses

# Writes down the time every few milliseconds, and at the end how long it took by its own stopwatch.
WORKING = """
import sys, time
from pathlib import Path
from compile_bench.measure.turns import Stopwatch
folder, ticks = map(Path, sys.argv[1:])
with Stopwatch(folder) as watch:
    for _ in range(300):
        with ticks.open("a") as file:
            file.write(f"{time.time()}\\n")
        time.sleep(0.005)
with ticks.open("a") as file:
    file.write(f"took {watch.seconds}\\n")
"""

# Has a turn of half a second, or ends within it.
SAMPLING = """
import os, sys, time
from pathlib import Path
from compile_bench.measure.turns import alone
with alone(Path(sys.argv[1])):
    time.sleep(0.5)
    if "dies" in sys.argv:
        os._exit(3)
"""


@contextmanager
def started(code, *arguments):
    """A process with a group of its own, as measuring processes have."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("end", ["ends its turn", "dies"])
def test_the_others_stand_still_while_one_samples(tmp_path, end):
    ticks, turns = tmp_path / "ticks", tmp_path / "turns"
    processes = []

    def groups():
        return [process.pid for process in processes if process.poll() is None]

    with Conductor(turns, groups) as conductor, started(WORKING, turns, ticks) as working:
        processes.append(working)
        while not ticks.exists():
            time.sleep(0.01)
        before = time.monotonic()
        with started(SAMPLING, turns, end) as sampling:
            processes.append(sampling)
            sampling.wait(30)
            working.wait(30)
    *times, took = ticks.read_text().splitlines()
    ((begin, end_of_turn),) = pauses(turns)
    assert end_of_turn - begin > 0.5
    # A tick may be on its way to the file when the signal comes.
    assert sum(begin + 0.05 < float(each) < end_of_turn - 0.01 for each in times) <= 1
    wall = float(times[-1]) - float(times[0])
    # The one that stood still has its own 1.5 s of sleeping, and what it waited is not in its figure.
    assert 1.4 < float(took.split()[1]) < wall - 0.4
    assert not [file.name for file in turns.iterdir() if file.suffix in (".ready", ".go", ".over")]
    assert 0.5 < conductor.stood_still(working.pid, before) < time.monotonic() - before
    assert conductor.stood_still(working.pid, time.monotonic()) == conductor.stood_still(sampling.pid, before) == 0


def test_a_pause_that_cannot_be_written_down_stops_nobody_for_good(tmp_path):
    ticks, turns = tmp_path / "ticks", tmp_path / "turns"
    (turns / "pauses").mkdir(parents=True)  # where a file is to be
    processes = []

    def groups():
        return [process.pid for process in processes if process.poll() is None]

    def two_turns():
        with Conductor(turns, groups), started(WORKING, tmp_path, ticks) as working:
            processes.append(working)
            while not ticks.exists():
                time.sleep(0.01)
            for _ in range(2):  # a turn that failed is not the last one
                with started(SAMPLING, turns, "dies") as sampling:
                    processes.append(sampling)
                    assert sampling.wait(30) == 3
            assert working.wait(30) == 0

    with pytest.raises(IsADirectoryError):
        two_turns()


def test_a_process_that_ends_at_once_is_not_waited_for(tmp_path):
    """Both lines about it may be there before the first is read."""
    nursery = Nursery((), dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)))
    folder = str(tmp_path)
    order = Order(folder + "/none", folder + "/result", folder + "/log", dict(os.environ), folder, sys.path)
    slow, nursery._speaks_within = nursery._speaks_within, lambda seconds: time.sleep(1.0) or slow(seconds)
    begin = time.monotonic()
    assert nursery.run(order, 20) == 1
    assert time.monotonic() - begin < 15
    nursery.close()


@pytest.fixture
def order(tmp_path):
    """A process that waits until somebody has written its request, and fails for want of one."""
    os.mkfifo(tmp_path / "request")
    files = (str(tmp_path / name) for name in ("request", "result", "log"))
    return Order(*files, dict(os.environ), str(tmp_path), sys.path)


@pytest.fixture
def nursery():
    found = Nursery((), dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)))
    yield found
    found.close()


def test_time_that_a_process_stood_still_is_not_counted(order, nursery):
    asked = []

    def stood_still(group, since):
        asked.append(group == nursery.group)
        return time.monotonic() - since  # all the time

    def write_nothing():
        with Path(order.request).open("wb"):
            time.sleep(0.6)

    threading.Thread(target=write_nothing, daemon=True).start()
    assert nursery.run(order, 0.2, stood_still) == 1
    assert asked
    assert all(asked)


def test_a_process_has_as_many_seconds_more_as_it_stood_still(order, nursery):
    begin = time.monotonic()
    assert nursery.run(order, 0.2) is None
    assert nursery.usable  # the process was ended, not its server
    assert nursery.run(order, 0.2, lambda group, since: 0.5) is None
    assert time.monotonic() - begin > 0.2 + 0.7


@pytest.mark.parametrize(
    ("deadline", "ended_at", "failure"),
    [(None, 106.0, "its time limit of 6 s"), (200.0, 106.0, "its time limit of 6 s"), (10.0, 10.0, "was over")],
)
def test_no_process_has_longer_than_all_measurements_together(monkeypatch, deadline, ended_at, failure):
    now = 0.0

    class Hanging:
        def run(self, order, limit, stood_still):
            nonlocal now
            Path(order.log).touch()
            now = limit + stood_still(1, 0.0)

    @contextmanager
    def hanging(self, job):
        yield Hanging()

    monkeypatch.setattr(Harness, "_nursery", hanging)
    monkeypatch.setattr("compile_bench.measure.harness.time", SimpleNamespace(monotonic=lambda: now))
    with Harness.open("cpu", limit=6.0) as harness:
        harness.deadline = deadline
        harness.stood_still = lambda group, since: 100.0
        with pytest.raises(WorkerFailure, match=failure):
            harness.ask("eager", Case("mlp"))
    assert now == ended_at


def test_without_others_nothing_waits_and_nothing_is_taken_off(tmp_path):
    with alone(None), one_at_a_time(None, "gpu"), Stopwatch() as watch:
        time.sleep(0.02)
    assert watch.seconds >= 0.02
    assert pauses(None) == pauses(tmp_path) == []
    with one_at_a_time(tmp_path, "gpu"):
        assert (tmp_path / "gpu.lock").exists()


def test_who_waits_for_a_lock_has_that_taken_off_once(tmp_path):
    """A process of its own: what it waited is remembered as long as it lives. It is stopped while it waits, too."""
    code = """
import sys, time
from pathlib import Path
from compile_bench.measure.turns import Stopwatch, one_at_a_time, pauses
folder = Path(sys.argv[1])
with Stopwatch(folder) as watch:
    (folder / "begun").touch()
    with one_at_a_time(folder, "gpu"):
        time.sleep(0.05)
print(watch.seconds, *pauses(folder)[0], len(pauses(folder)))
"""
    with one_at_a_time(tmp_path, "gpu"):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        time.sleep(1.0)
        now = time.time()
        (tmp_path / "pauses").write_text(f"{now - 0.2} {now - 0.1}\n")
    seconds, begin, end, count = map(float, process.communicate(timeout=30)[0].split())
    assert 0.05 <= seconds < 0.3  # it waited that long, on top of what a busy machine adds
    assert count == 1  # the pause lies within the wait
    assert end - begin > 0.25


def test_a_stopwatch_takes_off_what_lies_within_it(tmp_path):
    now = time.time()
    (tmp_path / "pauses").write_text(f"{now - 9} {now - 8}\n{now - 1} {now + 0.05}\n")
    with Stopwatch(tmp_path) as watch:
        time.sleep(0.1)
    assert watch.seconds == pytest.approx(0.05 + (time.time() - now - 0.1), abs=0.03)


def test_phases_do_not_hold_what_a_process_stood_still():
    def event(name, kind, seconds):
        return {"name": name, "ph": kind, "ts": seconds * 1e6}

    outer, inner = "entire_frame_compile", "inductor_compile"
    events = [event(outer, "B", 10), event(inner, "B", 12), event(inner, "E", 20), event(outer, "E", 21)]
    plain = phase_seconds(events)
    # Two seconds within the inner span, and one and a half that lie half in it, half behind it.
    held = phase_seconds(without_pauses(events, [(5.0, 9.0), (14.0, 16.0), (19.0, 20.5)]))
    assert sum(plain.values()) == pytest.approx(11)
    assert sum(held.values()) == pytest.approx(11 - 2 - 1.5)
    (more,) = (phase for phase in plain if plain[phase] == pytest.approx(8))
    assert held[more] == pytest.approx(8 - 2 - 1)
    assert without_pauses(events, []) == events


def test_a_nursery_whose_owner_is_killed_ends_what_it_has_forked(tmp_path):
    """Else a sweep that is killed would leave its processes behind, and some of them stopped for good."""
    owner = """
import sys
from compile_bench.measure.nursery import Nursery, Order
folder = sys.argv[1]
import threading, os
nursery = Nursery((), dict(os.environ))
order = Order(folder + "/request", folder + "/result", folder + "/log", dict(os.environ), folder, sys.path)
threading.Thread(target=nursery.run, args=(order, 60), daemon=True).start()
while not nursery.group: pass
print(nursery.group, flush=True)
threading.Event().wait()
"""
    # The request is a pipe that nobody writes to: the forked process waits in its job.
    os.mkfifo(tmp_path / "request")
    process = subprocess.Popen(
        [sys.executable, "-c", owner, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    forked = int(process.stdout.readline())
    os.kill(forked, 0)
    os.kill(forked, signal.SIGSTOP)
    process.kill()
    process.wait()
    process.stdout.close()
    until = time.monotonic() + 10
    while _exists(forked) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _exists(forked)


def _exists(pid):
    """Whether it runs; one that has ended may still be listed until it is reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
