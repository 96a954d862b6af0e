"""The cost of each road's build: all roads are built from scratch in parallel, then loaded one after another.

Building in parallel saves time. The recorded cost is processor time, which other processes hardly affect.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import native_build
from benchkit import Quantity, Record
from benchkit.processes import kill_group, result_of
from custom_ops.builds import autograd_nodes, operator_library, runtime_compiled
from custom_ops.builds.loading import VARIABLE, architectures_here
from custom_ops.roads import ahead_of_time, just_in_time

JUST_IN_TIME = "pybind11, just in time"
WHEEL = "pybind11, wheel"
TORCH_LIBRARY = "TORCH_LIBRARY, abi3 wheel"
STABLE = "stable ABI, all operators"
RUN_TIME = "NVRTC, one kernel"

_CACHE = "FRAMEWORK_INTERNALS_BUILD_DIR"

_BUILD = """
import json, os, sys
from pathlib import Path
from custom_ops.bench.build_costs import BUILDERS
before = os.times()
file = BUILDERS[sys.argv[1]](Path(sys.argv[2]))
after = os.times()
print(json.dumps([sum(after[:4]) - sum(before[:4]), str(file)]))
"""

_BUILD_NODES = """
import json
from custom_ops.builds import autograd_nodes
print(json.dumps([0.0, str(autograd_nodes.build())]))
"""

_LOAD = """
import json, time
from custom_ops.roads import {road} as road
import torch
start = time.perf_counter()
module = road.load()
seconds = time.perf_counter() - start
a = torch.arange(5.0)
assert torch.equal(module.vector_add(a, a), a + a)
print(json.dumps([seconds, module.__file__]))
"""

_LOAD_SCALE = """
import json, time, torch
start = time.perf_counter()
import custom_ops_scale
seconds = time.perf_counter() - start
a = torch.arange(5.0)
assert custom_ops_scale.add_one(1) == 2
assert torch.equal(torch.ops.custom_ops_scale.scale(a), 1.23 * a)
print(json.dumps([seconds, custom_ops_scale._C.__file__]))
"""

_LOAD_LIBRARY = """
import json, os, time, torch
start = time.perf_counter()
torch.ops.load_library(os.environ["CUSTOM_OPS_LIBRARY"])
seconds = time.perf_counter() - start
a = torch.arange(5.0)
assert torch.equal(torch.ops.custom_ops.vector_add(a, a), a + a)
print(json.dumps([seconds, os.environ["CUSTOM_OPS_LIBRARY"]]))
"""


@dataclass(frozen=True)
class Built:
    """The result of one road's build.

    Attributes:
        road: Name of the road in the report.
        file: The shared library, or the wheel that contains it.
        processor: Processor seconds of all processes that took part, without the import of torch.
    """

    road: str
    file: Path
    processor: float

    def record(self) -> Record:
        """Load the result in a fresh process: a record ``build``, label ``road``.

        Returns:
            The values ``build`` (processor time), ``load`` (wall time in a process that has imported torch),
            ``library`` (bytes of the shared library) and, for a wheel, ``wheel`` (its bytes).

        Raises:
            native_build.BuildError: If it does not load or computes wrongly.
        """
        seconds, library = self._load()
        values = {
            "build": Quantity(self.processor, "s"),
            "load": Quantity(seconds, "s"),
            "library": Quantity(library.stat().st_size, "B"),
        }
        if self.file.suffix == ".whl":
            values["wheel"] = Quantity(self.file.stat().st_size, "B")
        return Record("build", {"road": self.road}, values)

    def _load(self) -> tuple[float, Path]:
        if self.road == WHEEL:
            return load_wheel(self.file)
        if self.road == TORCH_LIBRARY:
            return _load_wheel(self.file, _LOAD_SCALE)
        if self.road == STABLE:
            return _run_fresh(_LOAD_LIBRARY, environment={VARIABLE: str(self.file)})
        return _run_fresh(_LOAD.format(road="just_in_time"), environment={_CACHE: str(_cache_of(self.file))})


def _build_just_in_time(folder: Path) -> Path:
    os.environ[_CACHE] = str(folder)  # an empty folder; this function runs in a separate process
    return Path(just_in_time.load().__file__)


def _cache_of(library: Path) -> Path:
    """The argument of :func:`_build_just_in_time`, from a path <cache>/<versions>/<module>/<library>."""
    return library.parents[2]


def _build_stable(folder: Path) -> Path:
    return operator_library.compile_anew(folder / operator_library.FILE_NAME, architectures_here())


# The slowest first.
BUILDERS: dict[str, Callable[[Path], Path]] = {
    STABLE: _build_stable,
    WHEEL: ahead_of_time.build_wheel,
    TORCH_LIBRARY: partial(ahead_of_time.build_wheel, example="scale"),
    JUST_IN_TIME: _build_just_in_time,
}


def build_all(folder: Path, outcomes: dict[str, Built | Exception]) -> None:
    """Build every road from scratch, in parallel, each in a separate process; build the autograd nodes as well.

    ``outcomes`` receives each road's result or error, since a tool may be missing for one road only.
    """
    stopped, groups = threading.Event(), list[int]()

    def started(group: int) -> None:
        groups.append(group)
        if stopped.is_set():
            kill_group(group)

    def build(road: str) -> Built | Exception:
        try:
            seconds, file = _run_fresh(_BUILD, road, tempfile.mkdtemp(dir=folder), started=started)
        except Exception as error:
            return error
        return Built(road, file, seconds)

    with ThreadPoolExecutor(len(BUILDERS) + 1) as pool:
        try:
            if autograd_nodes.cached() is None:  # not measured; if this fails, loading the operators says why
                pool.submit(_run_fresh, _BUILD_NODES, started=started)
            building = {road: pool.submit(build, road) for road in BUILDERS}
            outcomes.update({road: result_of(each) for road, each in building.items()})
        except BaseException:  # an interrupt: the compilers end too, and the pool need not wait for minutes
            stopped.set()
            for group in groups:
                kill_group(group)
            raise


def use(built: Built) -> None:
    """Keep the result for this process and later ones, if they would otherwise compile the same again."""
    if built.road == STABLE:
        operator_library.keep(built.file, architectures_here())
    if built.road == JUST_IN_TIME:
        before = os.environ.get(_CACHE)
        os.environ[_CACHE] = str(_cache_of(built.file))
        try:
            just_in_time.load()
        finally:
            os.environ.pop(_CACHE) if before is None else os.environ.update({_CACHE: before})


def build_at_run_time() -> Iterator[Record]:
    """Compile one kernel with NVRTC: a record ``build`` with the values ``build`` (processor time) and ``library``.

    Raises:
        native_build.BuildError: If there is no NVRTC.
    """
    start = time.process_time()
    compiled = runtime_compiled.compile_for("bias_gelu_forward<float, 4, 1, false>", "sm_90")
    seconds = time.process_time() - start
    values = {"build": Quantity(seconds, "s"), "library": Quantity(len(compiled.cubin), "B")}
    yield Record("build", {"road": RUN_TIME}, values)


def load_wheel(wheel: Path) -> tuple[float, Path]:
    """Unpack the wheel of vector_add, load it in a fresh process, and add two tensors with it.

    Returns:
        The seconds of loading, without the import of torch, and the path of the shared library.

    Raises:
        native_build.BuildError: If it does not load or adds wrongly.
    """
    return _load_wheel(wheel, _LOAD.format(road="ahead_of_time"))


def _load_wheel(wheel: Path, script: str) -> tuple[float, Path]:
    unpacked = Path(tempfile.mkdtemp(prefix=wheel.stem, dir=wheel.parent))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    return _run_fresh(script, first_on_path=[unpacked])


def _run_fresh(
    script: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    first_on_path: Sequence[Path] = (),
    started: Callable[[int], None] = lambda group: None,
) -> tuple[float, Path]:
    """Run a script in a fresh process, which prints seconds and a path as JSON; its failure is a BuildError.

    ``started`` gets the process group, which holds the script's compilers too.
    """
    path = os.pathsep.join([*map(str, first_on_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {}), "PYTHONPATH": path},
        start_new_session=True,
    ) as process:
        started(process.pid)
        try:
            out, errors = process.communicate()
        except BaseException:
            kill_group(process.pid)
            raise
    if process.returncode != 0:
        if process.returncode < 0:
            raise native_build.BuildError(f"the process was ended by {signal.Signals(-process.returncode).name}")
        last = (errors.strip() or f"status {process.returncode}").splitlines()[-1]
        raise native_build.BuildError(last.removeprefix("native_build.extension.BuildError: "))
    seconds, file = json.loads(out.splitlines()[-1])
    return seconds, Path(file)
