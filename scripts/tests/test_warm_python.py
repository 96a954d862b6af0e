"""A forked Python: it ends as an interpreter ends, and sees its own arguments, environment and folder alone."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import warm_python


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("raise SystemExit('no such file')", 1, "no such file\n"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import warnings; warnings.warn('old')", 1, "UserWarning: old\n"),
        ("import atexit, sys; atexit.register(print, 'last', file=sys.stderr)", 0, "last\n"),
    ],
)
def test_it_ends_as_an_interpreter_does(program, status, said):
    done = warm_python.run(["-W", "error", "-c", program], env=os.environ)
    assert done.returncode == status
    assert done.stderr.endswith(said)


def test_a_program_has_arguments_environment_folder_and_path_of_its_own(tmp_path):
    (tmp_path / "ours.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ, os.getcwd() == sys.argv[1], __name__)\n"
    )
    for arguments in ([tmp_path / "ours.py"], ["-m", "ours"]):
        done = warm_python.run([*arguments, tmp_path], env={"PYTHONPATH": str(tmp_path), "A": "1"}, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{[str(tmp_path)]} environ({{'PYTHONPATH': '{tmp_path}', 'A': '1'}}) True __main__\n"
    after = warm_python.run(["-c", "import os, sys; print('A' in os.environ, 'ours' in sys.modules)"], env={})
    assert after.stdout == "False False\n"


def test_nothing_of_ours_is_loaded():
    code = "import sys; print(sorted({name.partition('.')[0] for name in sys.modules} & {'benchkit', 'native_build'}))"
    assert warm_python.run(["-c", code], env=os.environ).stdout == "[]\n"


def test_an_option_of_the_interpreter_needs_a_real_one():
    with pytest.raises(ValueError, match="-I is an option of the interpreter: start one"):
        warm_python.run(["-I", "-c", "pass"], env={})


def test_a_program_that_is_left_does_not_answer_for_the_next_one():
    def leave(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(TimeoutError):
            warm_python.run(["-c", "import time; time.sleep(600)"], env=os.environ)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert warm_python.run(["-c", "print('the next one')"], env=os.environ).stdout == "the next one\n"
