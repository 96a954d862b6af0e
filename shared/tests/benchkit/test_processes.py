"""Jobs in fresh processes and objects in processes of their own: answers, failures, time limits, and who ends what."""

import importlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchkit import UserError
from benchkit.processes import (
    ChildCancelled,
    ChildCrashed,
    ChildTimedOut,
    Job,
    RemoteObject,
    Runner,
    deferred_module,
    last_line,
    result_of,
)
from benchkit.processes.fork_server import ForkServer, child_environment, child_settings, fork_server

MODULE = """
import os, pathlib, signal, subprocess, sys, time
from benchkit import UserError

def facts():
    print("this must not disturb the answers")
    return {
        "pid": os.getpid(), "group": os.getpgid(0), "directory": os.getcwd(), "path": sys.path[0],
        "main": hasattr(sys.modules["__main__"], "__file__"), "color": os.environ.get("COLOR"),
        "threads": os.environ.get("OMP_NUM_THREADS"), "parent": os.getppid(), "colorsys": "colorsys" in sys.modules,
        "stdin": sys.stdin.read(),
    }

def add(one, other):
    return one + other

def refuse():
    raise UserError("not today")

def fail():
    raise ValueError("three words here")

def count_to(number):
    from benchkit.processes import send_message
    for each in range(number):
        send_message(each)
    return "done"

def tell_and_hang():
    from benchkit.processes import send_message
    send_message("so far")
    hang()

def unpicklable():
    return lambda: None

def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

def leave(status):
    print("last words")
    sys.exit(status)

def leave_a_child(file):
    # A child that is forked, not started anew, inherits every file descriptor.
    if (pid := os.fork()) == 0:
        time.sleep(600)
    pathlib.Path(file).write_text(str(pid))
    os._exit(4)

def hang(file=None):
    print("waiting for a driver", file=sys.stderr, flush=True)
    if file:
        process = subprocess.Popen(["sleep", "600"])
        pathlib.Path(file).write_text(str(process.pid))
    time.sleep(600)

class Talker:
    def __init__(self, greeting):
        if greeting == "nothing":
            raise ValueError("no greeting")
        self.greeting = greeting

    def greet(self, name):
        print("this must not disturb the answers")
        return f"{self.greeting}, {name}"

    def fail(self):
        raise KeyError("lost")

    def refuse(self):
        raise UserError("not today")

    def die(self):
        raise SystemExit(7)

    def hang(self, file):
        hang(file)

    def pid(self):
        return os.getpid()

class Slow:
    def __init__(self, folder, method):
        self.folder = folder
        if method == "made":
            self.hang()

    def hang(self):
        (pathlib.Path(self.folder) / str(os.getpid())).touch()
        hang()
"""


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A module that a child process can import."""
    name = f"jobs_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    yield importlib.import_module(name)
    del sys.modules[name]


@pytest.fixture
def runner():
    found = Runner(limit=60.0)
    yield found
    found.stop()


@pytest.fixture
def server():
    found = ForkServer((), child_environment({}))
    yield found
    found.close()


def settings():
    return child_settings(child_environment({}))


def alive(pid):
    """Whether a process runs; one that has ended may be listed until its parent has collected it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def written(file):
    return file.exists() and file.stat().st_size > 0


def wait_until(happened):
    """However slow the machine is: what never happens meets the time limit of the test."""
    while not happened():
        time.sleep(0.02)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def ends(pid):
    wait_until(lambda: not alive(pid))
    return True


@pytest.fixture
def time_is_up(monkeypatch):
    """Lets the time limits of processes end when something has happened, and no time pass before."""

    def when(happened):
        clock = SimpleNamespace(monotonic=lambda: 1e6 * happened(), sleep=time.sleep)
        monkeypatch.setattr("benchkit.processes.fork_server.time", clock)

    return when


def test_a_job_has_a_fresh_process(jobs, runner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job(jobs.facts, "facts", ("colorsys",), {"OMP_NUM_THREADS": "3"}, {"COLOR": "red"})
    one, other = (runner.run(job) for _ in range(2))
    assert one["pid"] == one["group"] != other["pid"] != os.getpid()
    assert one["directory"] == one["path"] == str(tmp_path)
    assert (one["color"], one["threads"], one["colorsys"], one["stdin"]) == ("red", "3", True, "")
    assert not one["main"]  # the program's own __main__ is not imported
    assert one["parent"] == other["parent"]  # the fork server is kept
    assert runner.run(Job(partial(jobs.add, 2, other=3), "add")) == 5


def test_a_module_of_jobs_is_imported_in_the_child_alone(jobs, runner, tmp_path):
    (tmp_path / "deferred_jobs.py").write_text(MODULE)
    deferred = deferred_module("deferred_jobs")
    assert deferred.add.__name__ == "add"
    assert runner.run(Job(partial(deferred.add, 2, other=3), "add")) == 5
    with RemoteObject(deferred.Talker, {"greeting": "Hello"}) as talker:
        assert talker.call("greet", name="you") == "Hello, you"
    assert "deferred_jobs" not in sys.modules
    assert deferred.add(1, 2) == 3
    assert "deferred_jobs" in sys.modules
    del sys.modules["deferred_jobs"]


def test_another_interpreter_imports_what_it_is_given(jobs, tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "deferred_jobs.py").write_text(MODULE)
    given = {"path": [str(tmp_path / "given")]}
    made = deferred_module("deferred_jobs").Talker, {"greeting": "Hello"}
    with RemoteObject(*made, python=sys.executable, **given) as talker:
        assert talker.call("greet", name="you") == "Hello, you"
    with pytest.raises(OSError, match="/nowhere/python"):
        RemoteObject(*made, python="/nowhere/python", **given)


def test_a_fork_server_serves_what_agrees_in_modules_and_in_what_is_read_at_start(jobs, runner):
    def server_of(preload=(), environment=None, child_environment=None):
        return runner.run(Job(jobs.facts, "facts", preload, environment or {}, child_environment or {}))["parent"]

    assert server_of() == server_of(child_environment={"OMP_NUM_THREADS": "5"}) == server_of(environment={"COLOR": "x"})
    assert len({server_of(), server_of(("colorsys",)), server_of(environment={"OMP_NUM_THREADS": "5"})}) == 3


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Modules that tell when they are imported, and the file that they tell it to."""
    log, modules = tmp_path / "imported", tuple(f"{name}_of_{tmp_path.name}" for name in ("one", "two", "wrong"))
    for name, end in zip(modules, ("", "", "raise KeyError('lost')"), strict=True):
        text = f"with open({str(log)!r}, 'a') as log:\n    log.write('{name} ')\n{end}\n"
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return modules, log


def test_a_second_server_is_a_fork_of_the_first_and_imports_what_it_lacks(jobs, imported):
    (one, two, wrong), log = imported
    environment = child_environment({})
    with (
        fork_server((one,), environment) as first,
        first.child(settings()) as child,
        fork_server((one, two), environment) as second,
        second.child(settings()) as other,
    ):
        facts = [each.call(jobs.facts, "facts", 60.0) for each in (child, other)]
        with (
            pytest.raises(ChildCrashed, match="the fork server ended: KeyError: 'lost'"),
            fork_server((one, two, wrong), environment) as third,
            third.child(settings()),
        ):
            pass
    assert log.read_text().split() == [one, two, wrong]
    assert len({found["parent"] for found in facts}) == 2
    assert parent_of(facts[1]["parent"]) not in (os.getpid(), facts[0]["parent"])
    assert first.usable
    assert second.usable
    second.stop()
    assert ends(facts[1]["parent"])
    assert not second.usable
    second.close()
    assert first.usable


def test_a_server_whose_source_ends_before_it_has_forked_is_started_alone(imported, tmp_path):
    (one, *_), _ = imported
    slow = tmp_path / "slow"
    slow.touch()
    (tmp_path / f"{one}.py").write_text(f"import os, time\nif os.path.exists({str(slow)!r}): time.sleep(600)\n")
    first = ForkServer((one,), child_environment({}))
    second = ForkServer((one,), child_environment({}), source=first)
    slow.unlink()
    first.close()
    with second.child(settings()) as child:
        assert child.call(os.getpid, "process", 60.0) == child.pid
    second.close()
    with pytest.raises(OSError, match="closed"):
        ForkServer((one,), child_environment({}), source=first)


def test_a_fork_that_has_not_begun_can_be_stopped(imported, tmp_path):
    (one, *_), _ = imported
    (tmp_path / f"{one}.py").write_text("import time; time.sleep(600)")
    first = ForkServer((one,), child_environment({}))
    second = ForkServer((one,), child_environment({}), source=first)
    second.stop()
    with pytest.raises(ChildCrashed, match="the fork server ended: no message"), second.child(settings()):
        pass
    second.close()
    assert first.usable
    first.close()


def test_messages_of_a_job_come_before_its_answer_and_survive_its_end(jobs, runner, time_is_up):
    heard = []
    assert runner.run(Job(partial(jobs.count_to, 3), "count"), on_message=heard.append) == "done"
    assert heard == [0, 1, 2]
    assert runner.run(Job(partial(jobs.count_to, 3), "nobody listens")) == "done"
    time_is_up(lambda: len(heard) > 3)
    with pytest.raises(ChildTimedOut):
        Runner(limit=1.0).run(Job(jobs.tell_and_hang, "hang"), on_message=heard.append)
    assert heard[3:] == ["so far"]
    assert jobs.count_to(3) == "done"  # outside a child nothing is sent


def test_what_a_job_raises_is_raised(jobs, runner):
    with pytest.raises(UserError, match="not today"):
        runner.run(Job(jobs.refuse, "job"))
    with pytest.raises(ChildCrashed, match="job raised ValueError: three words here") as caught:
        runner.run(Job(jobs.fail, "job"))
    assert "in fail" in caught.value.__notes__[0]
    with pytest.raises(ChildCrashed, match=r"job raised .*lambda"):
        runner.run(Job(jobs.unpicklable, "job"))


def test_a_process_that_ends_says_how(jobs, runner):
    with pytest.raises(ChildCrashed, match=rf"job ended with status -{signal.SIGSEGV.value} \(SIGSEGV\): no message"):
        runner.run(Job(jobs.crash, "job"))
    with pytest.raises(ChildCrashed, match="job ended with status 7: last words"):
        runner.run(Job(partial(jobs.leave, 7), "job"))


def test_what_cannot_be_sent_is_refused(jobs, runner):
    with pytest.raises(TypeError, match="top level of a module"):
        runner.run(Job(lambda: 1, "job"))
    here = partial(jobs.add)
    here.func.__module__, name = "__main__", here.func.__module__
    with pytest.raises(TypeError, match="move it to a module"):
        runner.run(Job(here, "job"))
    here.func.__module__ = name
    assert runner.run(Job(partial(here, 1, 2), "job")) == 3


def test_a_module_that_cannot_be_imported_is_named(jobs, runner):
    with pytest.raises(ChildCrashed, match=r"fork server ended with status 1: ModuleNotFoundError: .*no_such_module"):
        runner.run(Job(jobs.facts, "job", ("no_such_module",)))


def test_a_hanging_process_is_ended_with_its_children(jobs, runner, tmp_path, time_is_up):
    pid = tmp_path / "child"
    time_is_up(lambda: written(pid))
    runner.limit = 1.5
    with pytest.raises(ChildTimedOut, match=r"its time limit of 1\.5 s") as caught:
        runner.run(Job(partial(jobs.hang, str(pid)), "job"))
    assert "waiting for a driver" in caught.value.__notes__[0]
    assert ends(int(pid.read_text()))
    time_is_up(lambda: False)
    assert runner.run(Job(partial(jobs.add, 1, 1), "add")) == 2


def test_a_process_that_ends_is_not_outlived_by_its_children(jobs, runner, tmp_path, time_is_up):
    """Not even if they keep its end of the connection open."""
    time_is_up(lambda: False)
    with pytest.raises(ChildCrashed, match="ended with status 4"):
        runner.run(Job(partial(jobs.leave_a_child, str(tmp_path / "child")), "job"))
    assert ends(int((tmp_path / "child").read_text()))


def test_stopping_ends_what_runs_and_begins_nothing(jobs, runner):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(runner.run, Job(jobs.hang, "job"))
        wait_until(runner.groups)
        (group,) = runner.groups()
        runner.stop()
        with pytest.raises(ChildCancelled, match="job was ended: measuring was stopped"):
            waiting.result()
    assert ends(group)
    assert runner.groups() == []
    with pytest.raises(ChildCancelled, match="job was not begun: measuring was stopped"):
        runner.run(Job(jobs.hang, "job"))


def test_stopping_does_not_wait_for_a_server_that_is_still_importing(jobs, runner, tmp_path):
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(600)")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(runner.run, Job(jobs.hang, "job", ("slow_to_import",)))
        wait_until(lambda: runner._servers)
        runner.stop()
        with pytest.raises(ChildCancelled, match="measuring was stopped"):
            waiting.result()


def test_an_interrupt_ends_the_process_and_its_server(jobs):
    code = f"""
import signal, threading, {jobs.__name__} as jobs
from benchkit.processes import Job, Runner
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without one
runner = Runner(60.0)
def report():
    while not runner.groups(): pass
    print(*runner.groups(), flush=True)
threading.Thread(target=report).start()
runner.run(Job(jobs.hang, "job"))
"""
    process = started(code)
    group = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    assert process.wait() != 0
    process.stdout.close()
    assert ends(group)


@pytest.mark.parametrize("moment", ["made", "asked"])
def test_an_interrupt_does_not_wait_for_threads_that_wait_for_children(jobs, tmp_path, moment):
    """Its thread waits for a child's exit status, and so does what closes the child after the interrupt."""
    folder = tmp_path / "children"
    folder.mkdir()
    code = f"""
import contextlib, signal, {jobs.__name__} as jobs
from benchkit.processes import RemoteObject, waiting_threads
signal.signal(signal.SIGINT, signal.default_int_handler)
def begin(stack):
    remote = RemoteObject(jobs.Slow, {{"folder": {str(folder)!r}, "method": {moment!r}}})
    stack.callback(remote.close)
    remote.call("hang")
with contextlib.ExitStack() as stack, waiting_threads(2) as pool:
    for _ in range(6):
        pool.submit(begin, stack)
"""
    process = started(code)
    wait_until(lambda: len([*folder.iterdir()]) == 2)
    process.send_signal(signal.SIGINT)
    assert process.wait() != 0
    process.stdout.close()
    begun = [int(file.name) for file in folder.iterdir()]
    assert len(begun) == 2  # what had not begun does not begin
    assert all(ends(group) for group in begun)


@pytest.mark.parametrize("collected", [False, True], ids=["at the exit", "before it"])
def test_an_object_that_an_interrupt_leaves_open_ends_without_a_word(jobs, collected):
    """The garbage collector closes the descriptors of a cycle before it ends the generators that use them."""
    code = f"""
import gc, {jobs.__name__} as jobs
from benchkit.processes import RemoteObject
def begin():
    cycle = []
    cycle += [cycle, RemoteObject(jobs.Talker, {{"greeting": ""}})]
    print(cycle[1].call("pid"), flush=True)
    if not {collected}:
        raise KeyboardInterrupt
begin()
gc.collect()
raise KeyboardInterrupt
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ends(int(ended.stdout))
    assert ended.stderr.endswith("\nKeyboardInterrupt\n")
    assert "Exception ignored" not in ended.stderr


def started(code):
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("kind", ["job", "two jobs", "object"])
def test_who_is_killed_leaves_no_process_behind(jobs, kind):
    """Else some of them would stay stopped for good."""
    begin = {
        "job": "runner.run(Job(jobs.hang, 'job'))",
        "two jobs": "runner.run(Job(jobs.hang, 'job', ('colorsys',)))",
        "object": "remote = RemoteObject(jobs.Talker, {'greeting': ''}); print(remote.call('pid'), flush=True); "
        "remote.call('hang')",
    }
    code = f"""
import threading, {jobs.__name__} as jobs
from benchkit.processes import Job, RemoteObject, Runner
runner = Runner(60.0)
def begin():
    {begin[kind]}
count = 1 + ("{kind}" == "two jobs")
for _ in range(count):
    threading.Thread(target=begin, daemon=True).start()
if "{kind}" != "object":
    while len(runner.groups()) < count: pass
    print(*runner.groups(), flush=True)
threading.Event().wait()
"""
    process = started(code)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    servers = {parent_of(pid) for pid in pids}
    assert len(servers) == len(pids) == 1 + (kind == "two jobs")
    assert all(map(alive, pids))
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait()
    process.stdout.close()
    assert all(map(ends, [*pids, *servers]))


def test_a_process_that_ends_at_once_is_not_waited_for(jobs, server, monkeypatch, time_is_up):
    """Its answer and its end may both be there before the owner looks."""
    time_is_up(lambda: False)
    monkeypatch.setattr("benchkit.processes.fork_server._EXIT_SECONDS", None)  # who waited would do so for ever
    with server.child(settings()) as child:
        responds = child._responds
        monkeypatch.setattr(child, "_responds", lambda *arguments: child._control.poll(None) and responds(*arguments))
        with pytest.raises(ChildCrashed, match="status 3"):
            child.call(partial(jobs.leave, 3), "job", 20.0)
    assert server.usable


def test_a_process_has_as_many_seconds_more_as_it_was_stopped(jobs, server, monkeypatch):
    times = itertools.count(step=0.125)  # each look at the clock
    monkeypatch.setattr("benchkit.processes.fork_server.time", SimpleNamespace(monotonic=lambda: next(times)))
    took = []
    for stopped_seconds in (None, lambda group, since: 0.5 * (group == server.group)):
        begin = next(times)
        with server.child(settings()) as child, pytest.raises(ChildTimedOut, match=r"limit of 0\.25 s"):
            child.call(jobs.hang, "job", 0.25, stopped_seconds)
        assert server.usable  # the process was ended, not its server
        took.append(next(times) - begin - 2 * 0.125)  # from its first look to its last
    assert took == [0.25, 0.75]


@pytest.mark.parametrize(
    ("deadline", "ended_at", "failure", "why"),
    [
        (None, 106.0, ChildTimedOut, "its time limit of 6 s"),
        (200.0, 106.0, ChildTimedOut, "its time limit of 6 s"),
        (10.0, 10.0, ChildCancelled, "the time for all measurements was over"),
    ],
)
def test_no_process_has_longer_than_all_measurements_together(monkeypatch, deadline, ended_at, failure, why):
    now = 0.0

    class Hanging:
        @contextmanager
        def child(self, settings):
            yield self

        def call(self, function, name, limit, stopped_seconds, on_message):
            nonlocal now
            now = limit + stopped_seconds(1, 0.0)
            raise ChildTimedOut(f"{name} was ended after its time limit of {limit:g} s")

    @contextmanager
    def hanging(self, job, environment):
        yield Hanging()

    monkeypatch.setattr(Runner, "_server", hanging)
    monkeypatch.setattr("benchkit.processes.runner.time", SimpleNamespace(monotonic=lambda: now))
    runner = Runner(6.0)
    runner.deadline = deadline
    runner.stopped_seconds = lambda group, since: 100.0
    with pytest.raises(failure, match=why):
        runner.run(Job(os.getpid, "job"))
    assert now == ended_at
    if deadline == 10.0:
        with pytest.raises(ChildCancelled, match="was not begun: the time for all"):
            runner.run(Job(os.getpid, "job"))


def test_an_object_answers_calls(jobs):
    with RemoteObject(jobs.Talker, {"greeting": "Hello"}) as talker:
        assert talker.call("greet", name="you") == "Hello, you"
        with pytest.raises(ChildCrashed, match=r"Talker\.fail raised KeyError: 'lost'"):
            talker.call("fail")
        with pytest.raises(UserError, match="not today"):
            talker.call("refuse")
        assert talker.call("greet", name="again") == "Hello, again"
        with pytest.raises(ChildCrashed, match="ended with status 7"):
            talker.call("die")
        with pytest.raises(ChildCrashed, match="ended with status 7"):
            talker.call("greet", name="nobody")


def test_an_object_that_cannot_be_made_leaves_nothing(jobs):
    with pytest.raises(ChildCrashed, match="Talker raised ValueError: no greeting"):
        RemoteObject(jobs.Talker, {"greeting": "nothing"})


def test_an_object_that_hangs_is_ended(jobs, tmp_path, time_is_up):
    file = tmp_path / "child"
    time_is_up(lambda: written(file))
    with RemoteObject(jobs.Talker, {"greeting": "Hello"}, limit=0.5, environment={"COLOR": "red"}) as talker:
        pid = talker.call("pid")
        with pytest.raises(ChildTimedOut, match=r"Talker\.hang was ended after its time limit of 0.5 s") as caught:
            talker.call("hang", file=str(file))
        assert "waiting for a driver" in caught.value.__notes__[0]
        assert ends(pid)
        assert ends(int(file.read_text()))
        time_is_up(lambda: False)
        with pytest.raises(ChildCrashed, match="ended with status -9"):
            talker.call("pid")


def test_the_line_that_says_most():
    assert last_line("Traceback\n  somewhere\nValueError: three words\n") == "ValueError: three words"
    advice = "torch.AcceleratorError: CUDA error: busy\nCUDA kernel errors might be asynchronous\n"
    assert last_line(advice) == "torch.AcceleratorError: CUDA error: busy"
    assert last_line("INTERNAL: no stream\nxla/service/gpu.cc:1234:\n") == "INTERNAL: no stream"
    assert last_line("") == "no message"


def test_a_signal_cannot_find_the_lock_of_a_future_released(monkeypatch):
    this_thread, waits = threading.get_ident(), threading.Condition.wait

    def wait(condition, timeout=None):
        # Other threads of the process, such as a progress bar's, go on.
        assert threading.get_ident() != this_thread, "it lets go of the lock that a with statement releases"
        return waits(condition, timeout)

    with ThreadPoolExecutor(2) as pool:
        slow, failing = pool.submit(time.sleep, 0.05), pool.submit(int, "no number")
        monkeypatch.setattr(threading.Condition, "wait", wait)
        assert result_of(slow) is None
        with pytest.raises(ValueError, match="no number"):
            result_of(failing)
        monkeypatch.undo()
