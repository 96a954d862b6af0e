"""pytest: ``@pytest.mark.compile_budget(breaks=0, recompiles=1)``, and counts locked in a file beside the test.

The limits are those of :class:`compile_bench.check.budget.Budget`. ``cuda_graphs=True`` fails if Inductor names a
reason for leaving CUDA graphs out, or if none was replayed.

The plugin counts everything that is compiled while the test runs. It first resets the compiler, so that what earlier
tests compiled does not count. ``lock=True`` compares all counts with ``compile.lock.json`` beside the test file;
``pytest --compile-lock-update`` writes that file. torch is not imported before the first marked test.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from compile_bench.capture.trace import CompileTrace
    from compile_bench.check.budget import Budget

_MARK = "compile_budget"
_UPDATE = "--compile-lock-update"
# Arguments of the marker that are not limits of a Budget.
_SWITCHES = ("cuda_graphs", "lock")


def _budget_of(mark: pytest.Mark) -> tuple[Budget, bool, bool]:
    """The budget of a marker, whether CUDA graphs are required, and whether the lock file is compared.

    An unknown argument fails the test.
    """
    from compile_bench.check.budget import Budget

    known = [*(field.name for field in fields(Budget)), *_SWITCHES]
    unknown = [name for name in mark.kwargs if name not in known]
    if mark.args or unknown or not mark.kwargs:
        got = ", ".join([*map(repr, mark.args), *unknown]) or "nothing"
        pytest.fail(f"compile_budget takes {', '.join(f'{name}=' for name in known)}; got {got}", pytrace=False)
    limits = {name: value for name, value in mark.kwargs.items() if name not in _SWITCHES}
    cuda_graphs, lock = (bool(mark.kwargs.get(name)) for name in _SWITCHES)
    return Budget(**limits), cuda_graphs, lock


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes lock files."""
    group = parser.getgroup("compile-bench")
    group.addoption(_UPDATE, action="store_true", help="write what tests with compile_budget(lock=True) compile")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{_MARK}(breaks, recompiles, recompiles_per_guard, own_only, graphs, guards, kernels, cuda_graphs, lock): "
        "the most that the test may compile",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Count what a marked test compiles, and compare the counts with its budget after the test has passed."""
    mark = item.get_closest_marker(_MARK)
    if mark is None:
        return (yield)
    budget, cuda_graphs, lock = _budget_of(mark)
    import torch

    from compile_bench.capture.collector import Collector, compiler_off, without_caches

    if off := compiler_off():
        pytest.fail(f"nothing would be compiled, and every count would be 0: {off}", pytrace=False)
    torch.compiler.reset()
    # A kernel that is loaded from a cache is not generated, so it would not be counted.
    counts_kernels = lock or budget.kernels is not None
    lines: list[str] = []
    with ExitStack() as around:
        if counts_kernels:
            around.enter_context(without_caches())
        if cuda_graphs:
            lines = around.enter_context(_cuda_graphs_required())
        collector = around.enter_context(Collector())
        result = yield
    trace = collector.trace()
    lines += budget.exceeded(trace, Path.cwd())
    if lock:
        lines += _drift(item, trace, torch.__version__)
    if lines:
        pytest.fail("compile budget exceeded:\n" + "\n".join(lines), pytrace=False)
    return result


@contextmanager
def _cuda_graphs_required() -> Iterator[list[str]]:
    """Fill a list with a line for each reason why something inside the block ran without CUDA graphs."""
    from unittest.mock import patch

    import torch

    from compile_bench.capture.collector import CudaGraphSkips

    if not torch.cuda.is_available():
        pytest.fail(
            "compile_budget(cuda_graphs=True): expected a CUDA GPU, torch sees none; "
            'add @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")',
            pytrace=False,
        )
    lines: list[str] = []
    replay, replays = torch.cuda.CUDAGraph.replay, []

    def counted(self: torch.cuda.CUDAGraph) -> None:
        replays.append(self)
        replay(self)

    with patch.object(torch.cuda.CUDAGraph, "replay", counted), CudaGraphSkips() as skips:
        yield lines
    lines += [f"without CUDA graphs: {reason}" for reason in skips.reasons]
    if not replays:
        lines.append('no CUDA graph was replayed: expected mode="reduce-overhead" and at least three calls')


def _drift(item: pytest.Item, trace: CompileTrace, torch_version: str) -> list[str]:
    from benchkit import UserError
    from compile_bench.check.lock import DEFAULT_FILE, Inventory, locked, update_lock

    file = Path(item.path).parent / DEFAULT_FILE
    key = f"{item.path.name}::{item.nodeid.partition('::')[2]}"
    now = Inventory.of(trace, torch_version)
    if item.config.getoption(_UPDATE):
        update_lock(file, key, now)
        return []
    try:
        return locked(file, key).drift(now)
    except UserError as error:
        return [f"{error} (pytest {_UPDATE})"]
