"""What a measurement ran on: device, driver, clocks, versions, commit, command line, date."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchkit.device import Device

_FRAMEWORKS = ("torch", "triton", "jax", "jaxlib", "flax", "optax", "transformers", "numpy", "pybind11", "ninja")
_PEERS = ("quack-kernels", "liger-kernel")  # packages whose kernels are measured too

# Name of a field -> name of the property in `nvidia-smi --query-gpu`.
_SMI_QUERY = {
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
}


@dataclass(frozen=True)
class Gpu:
    """The GPU that was measured.

    Attributes:
        name: Name that the driver reports.
        capability: Compute capability, such as ``"9.0"``.
        multiprocessors: Number of multiprocessors.
        memory: Bytes of device memory.
        l2_cache: Bytes of the L2 cache.
        cuda: CUDA version that torch was built with.
        driver: Version of the driver. This field, the clocks and the power limit are None without nvidia-smi.
        sm_clock_mhz: Clock at the start of the run, when the GPU is mostly idle.
        sm_clock_max_mhz: Highest clock that the GPU allows.
        memory_clock_mhz: Memory clock at the start of the run.
        power_limit_w: Power limit in watts.
    """

    name: str
    capability: str
    multiprocessors: int
    memory: int
    l2_cache: int
    cuda: str | None
    driver: str | None = None
    sm_clock_mhz: str | None = None
    sm_clock_max_mhz: str | None = None
    memory_clock_mhz: str | None = None
    power_limit_w: str | None = None


@dataclass(frozen=True)
class Environment:
    """The machine, the software and the source of one run.

    Attributes:
        date: UTC, ISO 8601 to the second.
        command: Command line, with paths relative to the repository.
        commit: Commit of this repository; None without a git checkout, unless BENCHKIT_COMMIT names the commit.
        dirty: Whether tracked files other than reports differed from the commit; None if git could not say.
        device: ``"cpu"`` or ``"cuda"``.
        gpu: The GPU; None on a CPU.
        cpu: Model name of the CPU.
        cores: Number of cores that this process may use.
        memory: Bytes of main memory.
        threads: Threads that torch uses for one operator; None if torch is not loaded.
        cpu_pressure: Percent of the last ten seconds in which some task waited for a core (Linux PSI); None if the
            kernel does not report it. A value far above 0 before a run means that the machine was busy.
        system: Operating system, kernel and architecture.
        python: Python version.
        packages: Versions of the packages that matter.
    """

    date: str
    command: str
    commit: str | None
    dirty: bool | None
    device: str
    gpu: Gpu | None
    cpu: str
    cores: int
    memory: int
    threads: int | None
    cpu_pressure: float | None
    system: str
    python: str
    packages: Mapping[str, str]

    @property
    def machine(self) -> str:
        """Name of the machine's folder in ``reports/``: ``"cpu"``, or the GPU's name in lower case with dashes."""
        return "cpu" if self.gpu is None else re.sub(r"[^a-z0-9]+", "-", self.gpu.name.lower()).strip("-")

    @property
    def source(self) -> dict[str, str | bool | None]:
        """Date, command, commit and ``dirty``, for records that a later call adds to a run."""
        return {name: getattr(self, name) for name in ("date", "command", "commit", "dirty")}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Environment:
        """Rebuild an environment from the result of :func:`dataclasses.asdict`."""
        gpu = document["gpu"]
        return cls(**{**document, "gpu": None if gpu is None else Gpu(**gpu)})


def commit_label(commit: str | None, dirty: bool | None) -> str:
    """A commit as Markdown.

    Args:
        commit: See :class:`Environment`.
        dirty: See :class:`Environment`.
    """
    name = f"`{commit[:12]}`" if commit else "an unknown commit (no git checkout)"
    return name + (", with uncommitted changes" if dirty else "")


def capture(device: Device, *, root: Path) -> Environment:
    """Describe this machine and this process.

    Args:
        device: The device to measure.
        root: A folder inside the repository, for the commit and for shortening paths.
    """
    commit, dirty = _git_state(root)
    torch = sys.modules.get("torch")
    return Environment(
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=_command_line(root),
        commit=commit,
        dirty=dirty,
        device=device,
        gpu=_gpu() if device == "cuda" else None,
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        threads=None if torch is None else torch.get_num_threads(),
        cpu_pressure=cpu_pressure(),
        system=f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        python=platform.python_version(),
        packages=_versions(),
    )


def cpu_pressure() -> float | None:
    """Percent of the last ten seconds in which some task waited for a core; None if the kernel does not report it."""
    try:
        text = Path("/proc/pressure/cpu").read_text()
    except OSError:
        return None
    found = re.search(r"some avg10=([\d.]+)", text)
    return float(found[1]) if found else None


def _versions() -> dict[str, str]:
    found = {}
    for name in _FRAMEWORKS + _PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def processor_field(name: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """A field of Linux's description of the first processor, such as ``"model name"``; empty where there is none."""
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(name):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return ""


def _cpu_model() -> str:
    return processor_field("model name") or platform.processor() or platform.machine()


def _gpu() -> Gpu:
    import torch

    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        memory=properties.total_memory,
        l2_cache=properties.L2_cache_size,
        cuda=torch.version.cuda,
        **_nvidia_smi(str(properties.uuid)),
    )


def _nvidia_smi(uuid: str) -> dict[str, str]:
    query = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(_SMI_QUERY.values())}"]
    answer = _answer([*query, "--format=csv,noheader,nounits"])
    if answer is None:
        return {}
    return dict(zip(_SMI_QUERY, (part.strip() for part in answer.split(",")), strict=True))


def _answer(command: Sequence[str]) -> str | None:
    """What a program prints; None if it fails or takes longer than half a minute."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _git_state(root: Path) -> tuple[str | None, bool | None]:
    """The commit, and whether tracked files other than reports differ from it."""
    if "BENCHKIT_COMMIT" in os.environ:  # an exported tree without .git, on a machine that only measures
        return os.environ["BENCHKIT_COMMIT"], None

    def git(*arguments: str) -> str | None:
        return _answer(["git", "-C", str(root), *arguments])

    if (commit := git("rev-parse", "HEAD")) is None:
        return None, None
    folders = (f"framework-internals/{what}" for what in ("*/reports/*", "versions/*", "README.md"))
    generated = (f":(exclude,top){what}" for what in (*folders, "docs/random_programs.*"))
    status = git("status", "--porcelain", "--untracked-files=no", "--", ":/", *generated)
    return commit, None if status is None else bool(status)


def _command_line(root: Path) -> str:
    """The command line without folders of this machine, which mean nothing to a reader."""
    top = next((folder for folder in (root, *root.parents) if (folder / "constraints.txt").exists()), root)

    def shorten(argument: str) -> str:
        path = Path(argument)
        try:
            is_path = path.is_absolute() or path.exists()
        except OSError:  # the argument is too long for a file name
            is_path = False
        if is_path:
            resolved = path.resolve()
            return str(resolved.relative_to(top.resolve())) if resolved.is_relative_to(top.resolve()) else path.name
        return argument

    return " ".join(["python", *(shorten(argument) for argument in sys.argv)])
