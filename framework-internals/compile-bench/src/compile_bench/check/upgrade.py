"""The same targets under two Python executables, side by side: what another version of torch changes.

Each side runs in a process of its own (:mod:`compile_bench.check.side`), with this package's sources and its own torch.
A third process, of the first executable again, is the control: two processes of one installation differ too.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchkit import Comparison, Quantity, Timing, UserError, numbers
from benchkit.processes import ChildFailure, RemoteObject, deferred_module
from compile_bench.capture.text import plural
from compile_bench.measure.verdict import difference
from compile_bench.targets.case import Case

if TYPE_CHECKING:
    from compile_bench.check import side
    from compile_bench.check.side import Side
else:
    side = deferred_module("compile_bench.check.side")

ROUNDS = 15

# More memory than this share counts as worse.
_MEMORY_MARGIN = 0.01
# Of two sides whose results are outside their bounds, this many times the error of the first counts as worse.
_ERROR_MARGIN = 3.0

# Packages that a side imports from here. It imports torch from its own installation.
_PACKAGES = ("compile_bench", "benchkit", "lowering", "native_build", "torch_baseline")


@dataclass(frozen=True)
class Upgrade:
    """A target under two installations."""

    case: Case  # the target
    before: Side  # under the first executable
    after: Side  # under the second
    step_before: Quantity | None = None  # seconds of a step under the first; None if one side has no compiled step
    step_after: Quantity | None = None  # seconds of a step under the second
    speedup: Quantity | None = None  # the first's time over the second's, paired by rounds
    control: Quantity | None = None  # the first's time over that of another process of the first, in the same rounds

    @property
    def step_difference(self) -> str:
        """``faster``, ``slower`` or ``none``: a difference is claimed only beyond the control."""
        return "none" if self.speedup is None else difference(self.speedup, self.control)

    @property
    def worse(self) -> list[str]:
        """One line for everything that is worse under the second installation; what is new follows, indented."""
        one, other = self.before, self.after
        lines = [f"raises when it is compiled: {failure}" for failure in other.failures if failure not in one.failures]
        for noun, name, details in (
            ("line with a graph break", "breaks", "break_lines"),
            ("recompilation", "recompiles", "recompile_lines"),
        ):
            if getattr(other, name) > getattr(one, name):
                count = getattr(other, name)
                counted = plural(count, noun) if name == "recompiles" else f"graph breaks in {plural(count, 'line')}"
                lines.append(f"{counted}, {getattr(one, name)} before")
                lines += [f"  {detail}" for detail in getattr(other, details) if detail not in getattr(one, details)]
        if not other.accurate and (one.accurate or _error(other) > _ERROR_MARGIN * _error(one)):
            also = "" if one.accurate else ", and than under the first"
            lines.append(f"the compiled results are further from float64 than the bound allows{also}")
        if self.step_difference == "slower" and self.speedup is not None:
            lines.append(f"a step is slower: {numbers.quantity(self.speedup)} as fast")
        if _ratio(one.compiled_bytes, other.compiled_bytes) > 1 + _MEMORY_MARGIN:
            lines.append(f"peak memory is {numbers.significant(_ratio(one.compiled_bytes, other.compiled_bytes))}×")
        return lines


def _error(figures: Side) -> float:
    """The error of results that are outside their bound; infinite where what is wrong has no size."""
    return math.inf if figures.error is None else figures.error


def _ratio(before: int | None, after: int | None) -> float:
    """After over before; 1 where one is not known, infinite where only before is 0."""
    if before is None or after is None:
        return 1.0
    return after / before if before else math.inf if after else 1.0


def measure_upgrade(before: str, after: str, case: Case, *, seconds: float, limit: float) -> Upgrade:
    """Measure a target under two Python executables.

    All three processes together sample steps for ``seconds``; ``limit`` is for each answer of a process.

    Raises:
        UserError: At once, if an executable is no Python that has torch.
    """
    for executable in dict.fromkeys((before, after)):
        _require_torch(executable)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compile-bench-")))
        links = _links(folder)
        sides: dict[str, RemoteObject] = {}
        measured: dict[str, Side] = {}
        # One after the other: each measures its start.
        for name, executable in (("before", before), ("after", after), ("control", before)):
            arguments = {"case": case, "seconds": seconds / 10}
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder / name}", "TRITON_CACHE_DIR": f"{folder / name / 'triton'}"}
            try:
                sides[name] = stack.enter_context(_measured(executable, links, arguments, caches, limit))
            except UserError as error:
                raise UserError(f"{executable}: {error}") from error
            except ChildFailure as error:
                raise ChildFailure(f"{executable}: {error}", error.details) from error
            measured[name] = sides[name].call("figures")
        if any(figures.compile_seconds is None for figures in measured.values()):
            return Upgrade(case, measured["before"], measured["after"])
        comparison = _rounds(sides, seconds)
        return Upgrade(
            case,
            measured["before"],
            measured["after"],
            comparison["before"].quantity(),
            comparison["after"].quantity(),
            comparison.speedup("after", over="before"),
            comparison.speedup("control", over="before"),
        )


def _links(folder: Path) -> Path:
    """A folder with links to this package and those of the house that it needs, and to nothing else beside them."""
    links = folder / "packages"
    links.mkdir()
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.submodule_search_locations
        (links / name).symlink_to(spec.submodule_search_locations[0])
    return links


def _measured(
    executable: str, links: Path, arguments: Mapping[str, object], caches: Mapping[str, str], limit: float
) -> RemoteObject:
    """A side that has measured the target."""
    return RemoteObject(
        side.MeasuredSide, arguments, environment=caches, python=executable, path=[str(links)], limit=limit
    )


# Prints what an interpreter is, without importing torch.
_PROBE = """
import importlib.util, json, sys
missing = [name for name in ("torch", "numpy") if importlib.util.find_spec(name) is None]
print(json.dumps([sys.version_info[:2], missing]))
"""
_OLDEST = (3, 11)


def _require_torch(executable: str) -> None:
    remedy = "name a Python that has torch"
    try:
        probe = subprocess.run([executable, "-c", _PROBE], capture_output=True, text=True, check=False, timeout=60)
        version, missing = json.loads(probe.stdout.strip().rpartition("\n")[2])
    except OSError as error:
        raise UserError(f"{executable!r} cannot be run ({error.strerror}); {remedy}") from error
    except (ValueError, TypeError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{executable!r} does not run Python code; {remedy}") from error
    if tuple(version) < _OLDEST:
        raise UserError(f"{executable!r} is Python {version[0]}.{version[1]}; expected 3.11 or later")
    if missing:
        raise UserError(
            f"{executable!r} has no {' and no '.join(missing)}: {executable} -m pip install {' '.join(missing)}"
        )


def _rounds(sides: Mapping[str, RemoteObject], seconds: float) -> Comparison:
    """Time a step of every side round by round; the order is drawn anew in each."""
    order, draw = list(sides), random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        draw.shuffle(order)
        for name in order:
            taken[name].append(sides[name].call("sample", seconds=seconds / ROUNDS / len(sides)))
    return Comparison({name: Timing(tuple(samples), 1, "wall-clock", 0.0) for name, samples in taken.items()})
