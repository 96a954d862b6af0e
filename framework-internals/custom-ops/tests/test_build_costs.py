"""The cost of a build, measured in a fresh process; its failure is reported and does not end the run."""

import gc
import os
import signal
from pathlib import Path

import pytest

from custom_ops.bench import build_costs
from custom_ops.builds import autograd_nodes, operator_library
from custom_ops.roads import just_in_time
from native_build import BuildError


def test_a_closed_road_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made.so"
    made.write_bytes(b"library")

    def run(script: str, road: str, folder: str, *, started: object) -> tuple[float, Path]:
        assert list(Path(folder).iterdir()) == []
        if road == build_costs.STABLE:
            raise BuildError("no nvcc")
        if road == build_costs.JUST_IN_TIME:
            raise OSError("no room for a process")  # not a failed compiler: this leaves the other roads too
        return 1.5, made

    monkeypatch.setattr(build_costs, "_run_fresh", run)
    monkeypatch.setattr(autograd_nodes, "cached", lambda: made)
    outcomes: dict[str, build_costs.Built | Exception] = {}
    build_costs.build_all(tmp_path, outcomes)
    assert list(outcomes) == list(build_costs.BUILDERS)
    stable = outcomes.pop(build_costs.STABLE)
    assert isinstance(stable, BuildError)
    assert isinstance(outcomes[build_costs.JUST_IN_TIME], OSError)
    assert outcomes[build_costs.WHEEL] == build_costs.Built(build_costs.WHEEL, made, 1.5)


_COMPILES_FOR_MINUTES = """
import subprocess, sys
from pathlib import Path
compiler = subprocess.Popen(["sleep", "300"])
Path(sys.argv[2], "compiler").write_text(str(compiler.pid))
compiler.wait()
"""


def test_an_interrupt_ends_the_builds_and_their_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the run gets the signal, as from ``kill``."""

    def interrupt(*_: object) -> None:
        if len(compilers := [path for path in tmp_path.glob("*/compiler") if path.read_text()]) == len(
            build_costs.BUILDERS
        ):
            numbers.extend(int(path.read_text()) for path in compilers)
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    numbers: list[int] = []
    monkeypatch.setattr(build_costs, "_BUILD", _COMPILES_FOR_MINUTES)
    monkeypatch.setattr(autograd_nodes, "cached", lambda: tmp_path)
    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # Python drops what a handler raises in a callback of the collector
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            build_costs.build_all(tmp_path, {})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert numbers
    for number in numbers:  # a zombie has no command line
        command = Path(f"/proc/{number}/cmdline")
        assert not command.exists() or not command.read_bytes()


def test_errors_of_a_fresh_process_are_its_last_line() -> None:
    script = "from native_build import BuildError\nraise BuildError('no compiler: install g++')"
    with pytest.raises(BuildError, match=r"^no compiler: install g\+\+$"):
        build_costs._run_fresh(script)


def test_a_process_that_was_killed_is_named_by_its_signal() -> None:
    with pytest.raises(BuildError, match=r"^the process was ended by SIGKILL$"):
        build_costs._run_fresh("import os, signal; print('x' * 9); os.kill(os.getpid(), signal.SIGKILL)")


def test_what_was_built_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is copied to the user's cache unless there is one; the extension is loaded from its build folder."""
    cache, library = tmp_path / "cache" / "operators.so", tmp_path / "built.so"
    library.write_bytes(b"new")
    monkeypatch.setattr(operator_library, "_cache_path", lambda architectures: cache)
    for _ in range(2):
        build_costs.use(build_costs.Built(build_costs.STABLE, library, 1.0))
        assert cache.read_bytes() == b"new"
        library.write_bytes(b"newer")

    seen: list[str | None] = []
    monkeypatch.setattr(just_in_time, "load", lambda: seen.append(os.environ.get(build_costs._CACHE)))
    monkeypatch.delenv(build_costs._CACHE, raising=False)
    extension = tmp_path / "cpython-torch" / "module-digest" / "module.so"
    build_costs.use(build_costs.Built(build_costs.JUST_IN_TIME, extension, 1.0))
    assert seen == [str(tmp_path)]
    assert build_costs._CACHE not in os.environ
