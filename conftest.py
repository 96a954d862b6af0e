"""Which tests can run on this machine, and what all of them share."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from random_programs import Fuzz, Record
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling
    from xdist.workermanage import WorkerController

_ROOT = Path(__file__).parent
# A checkout needs no installation, nor does what a test starts.
_SOURCES = [
    str(_ROOT / "scripts"),
    str(_ROOT / "shared" / "src"),
    *map(str, sorted(_ROOT.glob("framework-internals/*/src"))),
]
sys.path[:0] = _SOURCES
os.environ["PYTHONPATH"] = os.pathsep.join([*_SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])
# JAX looks at these variables when it is imported, which is while tests are collected. By default it takes most of a
# GPU's memory, which other test processes share. What it compiles in a test runs a few times, so LLVM's optimisations
# do not pay; XLA's own are all there. What a worker compiled in an earlier run is read; two do not share files. Where
# JAX sees a GPU, tests that do not need it compute on the CPU, as torch's do: bounds and counts are of that XLA.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
_JAX = {
    "JAX_DEFAULT_DEVICE": "cpu",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "JAX_COMPILATION_CACHE_DIR": str(_ROOT / ".pytest_cache" / "jax" / _WORKER),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
os.environ.update({**_JAX, "XLA_FLAGS": os.environ.get("XLA_FLAGS", _JAX["XLA_FLAGS"])})

# With three frameworks imported, collections by Python's own thresholds are a tenth of a test that compiles.
gc.set_threshold(20_000, 50, 20)

# Measured figures, which a test must not know: those of the committed reports, and of this machine's.
_REPORTS = re.compile(
    rf"{re.escape(str(_ROOT / 'framework-internals'))}/(?:(?:[^/]+/)?(?:reports|versions)/.+|README\.md)"
)
_opened: set[str] = set()


def _note_reports(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str) and _REPORTS.fullmatch(arguments[0]):
        _opened.add(arguments[0])


@pytest.fixture(autouse=True)
def _only_marked_tests_read_committed_reports(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that opens a committed report without the marker: scripts/move_figures.py has to run it."""
    yield
    opened = sorted(_opened)
    _opened.clear()
    known = request.node.get_closest_marker("committed") and request.path.is_relative_to(_ROOT / "scripts")
    if opened and not known:
        pytest.fail(f"reads {opened[0]} without the marker `committed`; render frozen results instead (tests/golden)")


@pytest.fixture(scope="session", autouse=True)
def _no_rows_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what this machine measured for itself out of the tests, and what the tests measure out of its cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWERING_CACHE", str(tmp_path_factory.mktemp("lowerings")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _what_is_imported_is_not_garbage() -> None:
    """Let collections pass over what earlier tests left: with three frameworks in a process a full one takes a second,
    and there is one before every timing.
    """
    gc.freeze()


@pytest.fixture(autouse=True)
def _jax_on_the_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test that needs a GPU compute where JAX would without the tests' settings."""
    if not any(request.node.get_closest_marker(name) for name in ("gpu", "multi_gpu")):
        yield
        return
    monkeypatch.delenv("JAX_DEFAULT_DEVICE", raising=False)
    with jax.default_device(None) if (jax := sys.modules.get("jax")) else nullcontext():
        yield


@pytest.fixture
def _jax_as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what the test starts compile, time kernels and take memory as without the tests' settings."""
    for name, value in _JAX.items():
        if os.environ.get(name) == value:
            monkeypatch.delenv(name)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the tests that are marked ``fuzz``; ``scripts/fuzz.sh`` sets them."""
    group = parser.getgroup("random programs")
    group.addoption("--fuzz-seconds", type=float, help="end the random programs after this time, shared by their tests")
    group.addoption("--fuzz-seed", type=int, default=0, help="seed of the random programs (default: 0)")
    group.addoption("--fuzz-record", action="store_true", help="write the figures into docs/random_programs.md")


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    """Runs random programs against an oracle.

    A test that is not marked ``fuzz`` always runs all of its programs, from seed 0, and leaves no record.
    """
    from random_programs import Fuzz, keep  # its imports would slow every start of pytest down

    path = request.path.relative_to(_ROOT)
    lens = path.parts[1] if path.parts[0] == "framework-internals" else path.parts[0]
    if request.node.get_closest_marker("fuzz") is None:
        return Fuzz(lens)
    config = request.config
    seconds = config.getoption("--fuzz-seconds")
    tests = sum(item.get_closest_marker("fuzz") is not None for item in request.session.items)

    def write(record: Record) -> None:
        config.stash[_RECORDS].append(record)
        if config.getoption("--fuzz-record"):
            keep(record)

    return Fuzz(lens, config.getoption("--fuzz-seed"), None if seconds is None else seconds / tests, write)


_RECORDS: pytest.StashKey[list[Record]] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    """Make room for the records of random programs, and note the reports that are opened from now on.

    A suite in the background of a shell ignores SIGINT, and so would what it starts: interrupted processes never ended.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_RECORDS] = []
    sys.addaudithook(_note_reports)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Let every second worker begin with the last file: until they meet, they import and compile different things."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FromBothEnds(LoadFileScheduling):
        def _assign_work_unit(self, node: WorkerController) -> None:
            if int(node.gateway.id.removeprefix("gw")) % 2:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    return FromBothEnds(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse files of tests that read a committed report when they are imported."""
    if _opened:
        raise pytest.UsageError(f"{min(_opened)} was read while tests were collected; render frozen results instead")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what random programs showed, with the seed that draws them again."""
    for run in config.stash[_RECORDS]:
        outcomes = "".join(f", {name}: {count}" for name, count in run.outcomes.items())
        terminalreporter.write_line(
            f"{run.lens}: {run.programs}: {run.run} of {run.wanted} programs, {run.differences} differences{outcomes}; "
            f"seed {run.seeds[0]}, {run.seconds:.0f} s"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out random programs that nobody asked for; skip what needs GPUs where there are too few, and say so.

    The time limit of a slow test is there to end one that hangs: a machine that does other work takes several times as
    long.
    """
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))
    asked = "fuzz" in config.getoption("markexpr")
    random = [item for item in items if item.get_closest_marker("fuzz")]
    for item in random:
        item.add_marker(pytest.mark.timeout(0))  # a run has a time limit of its own
    if random and not asked:
        config.hook.pytest_deselected(items=random)
        items[:] = [item for item in items if item not in random]
    needed = {"gpu": 1, "multi_gpu": 2}
    if not any(item.get_closest_marker(marker) for item in items for marker in needed):
        return
    import torch

    found = torch.cuda.device_count()
    for item in items:
        for marker, count in needed.items():
            if item.get_closest_marker(marker) and found < count:
                item.add_marker(pytest.mark.skip(reason=f"needs {count} CUDA GPU(s), torch sees {found}"))
