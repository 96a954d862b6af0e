"""pytest: ``@pytest.mark.compile_budget(breaks=0, recompiles=1)``, and counts locked in a file beside the test.

The plugin counts everything that is compiled while the test runs. It first resets the compiler, so that what earlier
tests compiled does not count. ``lock=True`` compares all counts with ``compile.lock.json`` beside the test file;
``pytest --compile-lock-update`` writes that file. torch is not imported before the first marked test.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from compile_bench.capture.trace import CompileTrace

_MARK = "compile_budget"
_UPDATE = "--compile-lock-update"


@dataclass(frozen=True)
class Budget:
    """The most that a test may compile; None allows any number.

    Attributes:
        breaks: Graph breaks.
        recompiles: Compilations of a function that had been compiled before.
        graphs: Captured graphs.
        guards: Guards of all graphs.
        kernels: Kernels that Inductor generates.
        lock: Whether to compare all counts with the lock file too.
    """

    breaks: int | None = None
    recompiles: int | None = None
    graphs: int | None = None
    guards: int | None = None
    kernels: int | None = None
    lock: bool = False

    @classmethod
    def of(cls, mark: pytest.Mark) -> Budget:
        """The budget of a marker.

        Raises:
            pytest.UsageError: If an argument is unknown.
        """
        known = [field.name for field in fields(cls)]
        unknown = [name for name in mark.kwargs if name not in known]
        if mark.args or unknown or not mark.kwargs:
            got = ", ".join([*map(repr, mark.args), *unknown]) or "nothing"
            raise pytest.UsageError(f"compile_budget takes {', '.join(f'{name}=' for name in known)}; got {got}")
        return cls(**mark.kwargs)

    def exceeded(self, trace: CompileTrace) -> list[str]:
        """One line for every count that is exceeded, followed by the breaks or recompilations."""
        counts = {
            "breaks": trace.broken_lines,
            "recompiles": len(trace.recompiles),
            "graphs": len(trace.graphs),
            "guards": trace.guards,
            "kernels": trace.kernels,
        }
        from compile_bench.measure.serialize import break_lines, plural, recompile_lines

        details = {
            "breaks": break_lines(trace.breaks, Path.cwd()),
            "recompiles": recompile_lines(trace.recompiles, Path.cwd()),
        }
        lines = []
        for name, count in counts.items():
            allowed = getattr(self, name)
            if allowed is not None and count > allowed:
                lines.append(f"{plural(count, name[:-1])}, {allowed} allowed")
                lines += [f"  {detail}" for detail in details.get(name, [])]
        return lines


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes lock files."""
    group = parser.getgroup("compile-bench")
    group.addoption(_UPDATE, action="store_true", help="write what tests with compile_budget(lock=True) compile")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", f"{_MARK}(breaks, recompiles, graphs, guards, kernels, lock): the most that the test may compile"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Count what a marked test compiles, and compare the counts with its budget after the test has passed."""
    mark = item.get_closest_marker(_MARK)
    if mark is None:
        return (yield)
    budget = Budget.of(mark)
    import torch

    from compile_bench.capture.collector import Collector, without_caches

    torch.compiler.reset()
    # A kernel that is loaded from a cache is not generated, so it would not be counted.
    counts_kernels = budget.lock or budget.kernels is not None
    with without_caches() if counts_kernels else nullcontext(), Collector() as collector:
        result = yield
    trace = collector.trace()
    lines = budget.exceeded(trace)
    if budget.lock:
        lines += _drift(item, trace, torch.__version__)
    if lines:
        pytest.fail("compile budget exceeded:\n" + "\n".join(lines), pytrace=False)
    return result


def _drift(item: pytest.Item, trace: CompileTrace, torch_version: str) -> list[str]:
    from benchkit import UserError
    from compile_bench.lock import DEFAULT_FILE, locked, update_lock
    from compile_bench.measure.measurements import Inventory

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
