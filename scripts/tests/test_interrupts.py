"""Every command, interrupted at several moments: it ends soon, in words, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import lenses
import pytest

ROOT = Path(__file__).resolve().parents[2]
HOUSE = ROOT / "framework-internals"
# Seconds of a processor, too, in which an interrupted command ends; 1 to 8 are enough. One that waits for ever uses
# none, and meets the time limit of the test.
ENDS_WITHIN = 60.0

# Before a command has imported what it needs, SIGTERM has its default action.
EARLY = 3.0  # seconds of a processor
# The end of a run: by its handler for interrupts, or by the signal, where nothing was to be kept.
ENDED = {signal.SIGINT: {130}, signal.SIGTERM: {130, 143, -signal.SIGTERM}}

MINE = """
import torch


def step():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    for _ in range(100_000):
        model(torch.randn(4, 8)).sum().backward()


class Breaks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        if y.sum().item() > 0:
            y = y + 1
        print("here")
        return self.linear(y)


def make():
    return Breaks(), (torch.randn(4, 8),)
"""

COMMANDS = [
    "dispatcher-trace run mine.py:step",
    "compile-bench run mine.py:make --device cpu",
    "compile-bench triage mine.py:make --device cpu",
    "compile-bench check mine.py:make --device cpu --max-breaks 9 --min-speedup 1",
    "compile-bench lock mine.py:make --device cpu",
    "compile-bench cache-key mine.py:make --device cpu",
    "compile-bench shapes mine.py:make --device cpu",
    "compile-bench tune whole_step.targets:tiny --device cpu",
    "jax-baseline train --device cpu --steps 100000",
    "jax-baseline parity --device cpu",
    "jax-baseline converge --device cpu",
    "jax-baseline bench --device cpu",
    "jax-baseline hlo --device cpu --layers 8",
    "custom-ops build",
    "custom-ops bench --device cpu",
    "rmsnorm-fused bench --device cpu",
    "rmsnorm-fused build",
    "torch-baseline train --device cpu --steps 100000",
]
SCRIPTS = [
    *(HOUSE / name / "scripts" / "run.py" for name in lenses.manifests()),
    ROOT / "scripts" / "end_to_end.py",
]


def interrupted(
    command: Sequence[str | Path], folder: Path, seconds: float, how: signal.Signals
) -> tuple[int, str, str]:
    """Send a signal when the command and what it started have used so many seconds of a processor, which are the same
    work on a machine that does other things; return the exit status and both outputs.
    """
    cache = folder / "cache"  # of its own: a build that another test left would leave nothing to interrupt
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        while _seconds_used(cache) < seconds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=0.1)
                pytest.skip("it had ended before")
        process.send_signal(how)
        until = _seconds_used(cache) + ENDS_WITHIN
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, errors = process.communicate(timeout=1.0)
            assert _seconds_used(cache) < until, "it goes on"
        while _processes_with(cache) and _seconds_used(cache) < until:
            time.sleep(0.1)
    finally:
        left = _processes_with(cache)
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
    assert not left, f"processes are left behind: {[command for _, command in left.values()]}"
    return process.returncode, out, errors


def _seconds_used(cache: Path) -> float:
    return sum(used for used, _ in _processes_with(cache).values())


def _processes_with(cache: Path) -> dict[int, tuple[float, str]]:
    """Of the processes that were given a cache, in whatever session, and have not ended: the seconds of a processor
    that each and its ended children used, and its command line.
    """
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if f"XDG_CACHE_HOME={cache}\0".encode() in (folder / "environ").read_bytes():
                ticks = sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:15]))
                command = (folder / "cmdline").read_text().replace("\0", " ")
                processes[int(folder.name)] = ticks / os.sysconf("SC_CLK_TCK"), command
    return processes


def was_importing(traceback: str) -> bool:
    """Whether the program's own module had not called anything yet: a module that it imports is next in the traceback,
    or Python's import, whose frames Python leaves out where it runs a module. Before it runs one of a package, runpy
    imports the package.
    """
    frames = re.findall(r'^  File "(.+)", line \d+, in (.+)$', traceback, re.MULTILINE)
    if any(name == "_get_module_details" for _, name in frames):
        return True
    own = [(file, name) for file, name in frames if "runpy" not in file]
    return len(own) > 1 and (own[1][1] == "<module>" or "importlib._bootstrap" in own[1][0])


def check(ended: tuple[int, str, str], how: signal.Signals) -> None:
    """It ended by the signal, and not in a traceback, unless the interpreter was still importing."""
    status, out, errors = ended
    importing = status == -how and was_importing(errors)
    assert importing or status in ENDED[how], errors
    assert importing or "Traceback" not in out + errors, errors


def moments(*late: float) -> pytest.MarkDecorator:
    signals = [(signal.SIGINT, EARLY), *((how, seconds) for how in ENDED for seconds in late)]
    return pytest.mark.parametrize(("how", "seconds"), signals, ids=lambda part: getattr(part, "name", None))


@pytest.mark.parametrize(
    ("body", "importing"),
    [
        ("import interrupted_here", True),
        ("def main():\n    import interrupted_here\n\nmain()", False),
        ("def main():\n    raise KeyboardInterrupt\n\nmain()", False),
        ("raise KeyboardInterrupt", False),
    ],
)
@pytest.mark.parametrize("how", ["file", "module"])
def test_an_interrupt_of_an_import_is_told_from_one_of_the_program(body, importing, how, tmp_path):
    (tmp_path / "interrupted_here.py").write_text("def f():\n    raise KeyboardInterrupt\n\nf()")
    (tmp_path / "program.py").write_text(body)
    command = [sys.executable, *{"file": ["program.py"], "module": ["-m", "program"]}[how]]
    done = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr.endswith("KeyboardInterrupt\n")
    assert was_importing(done.stderr) == importing


def test_an_interrupt_of_a_package_that_is_imported_to_be_run_is_told(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("def f():\n    raise KeyboardInterrupt\n\nf()")
    (tmp_path / "package" / "__main__.py").write_text("")
    command = [sys.executable, "-m", "package"]
    done = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    assert was_importing(done.stderr)


@pytest.mark.slow
@moments(10.0)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("_jax_as_users_have_it")
def test_a_command_ends(command, how, seconds, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    program, *arguments = command.split()
    check(interrupted([sys.executable, "-m", program.replace("-", "_"), *arguments], tmp_path, seconds, how), how)


@pytest.mark.slow
@moments(8.0, 16.0)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.parents[1].name)
@pytest.mark.usefixtures("_jax_as_users_have_it")
def test_a_report_keeps_what_it_measured(script, how, seconds, tmp_path):
    command = [sys.executable, script, "--quick", "--device", "cpu", "--out", tmp_path / "out"]
    ended = interrupted(command, tmp_path, seconds, how)
    check(ended, how)
    kept = tmp_path / "out" / "results.partial.json"
    if kept.exists():
        count = len(json.loads(kept.read_text())["records"])
        assert f"interrupted; {count} records are kept in {kept}" in ended[2]
