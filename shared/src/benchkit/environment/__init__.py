"""What a measurement ran on: device, driver, clocks, versions, commit, command line, date."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchkit.environment import processor
from benchkit.environment.processor import processor_field
from benchkit.environment.source import answer, command_line, commit_label, git_state

if TYPE_CHECKING:
    from benchkit.device import Device

_FRAMEWORKS = ("torch", "triton", "jax", "jaxlib", "flax", "optax", "transformers", "numpy", "pybind11", "ninja")
_PEERS = ("quack-kernels", "liger-kernel")  # packages whose kernels are measured too

__all__ = ["Environment", "Gpu", "capture", "commit_label", "cpu_pressure", "processor_field"]

_VENDORS = {"amd": "AMD", "intel": "Intel"}
_INSTRUCTIONS = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON", "baseline": ""}
_NUMBER_WORDS = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip

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
        vendor: Vendor of the CPU, such as ``"amd"``; empty in older documents, and where Linux names none.
        family: The vendor's numbers for the CPU's design, such as ``"family 25, model 17"``; empty as for ``vendor``.
        instructions: Vector instructions that torch uses, such as ``"avx512"``; empty in older documents.
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
    vendor: str = ""
    family: str = ""
    instructions: str = ""

    @property
    def machine(self) -> str:
        """Name of the machine's folder in ``reports/``, by what decides speed.

        ``"amd-zen-4-avx512-2-cores-24gib"``, or ``"nvidia-h200-140gib"`` for a GPU; what is not known is left out.
        """
        of_cpu = f"{self._vendor} {self._design} {self.instructions} {self.cores} cores"
        return processor.machine_name(of_cpu if self.gpu is None else self.gpu.name, f"{self.memory_gib}gib")

    @property
    def described(self) -> str:
        """The machine in a phrase: ``"an AVX-512 AMD server (Zen 4), two cores"``, ``"an NVIDIA H200, 140 GiB"``."""
        if self.gpu is not None:
            return f"{_article(self.gpu.name)} {self.gpu.name}, {self.memory_gib} GiB"
        kind = "server" if re.search("EPYC|Xeon|Graviton|Neoverse|Altra", self.cpu) else "processor"
        instructions = _INSTRUCTIONS.get(self.instructions, self.instructions.upper())
        design = self._design and f"({self._design})"
        phrase = " ".join(filter(None, (instructions, _VENDORS.get(self._vendor, self._vendor), kind, design)))
        count = _NUMBER_WORDS[self.cores] if self.cores < len(_NUMBER_WORDS) else str(self.cores)
        return f"{_article(phrase)} {phrase}, {count} {'core' if self.cores == 1 else 'cores'}"

    @property
    def memory_gib(self) -> int:
        """GiB of the memory that is measured: the GPU's, or the machine's."""
        if self.gpu is not None:
            return round(self.gpu.memory / 2**30)
        # The kernel keeps a part of main memory, which differs from boot to boot; modules come in steps of an eighth.
        step = 2.0 ** max(0, math.floor(math.log2(self.memory)) - 33) * 2**30
        return round(math.ceil(self.memory / step) * step / 2**30)

    @property
    def _vendor(self) -> str:
        """The vendor, or the first word of the CPU's name where a document does not have it."""
        word = re.match("[a-z0-9_]+", self.cpu.lower())
        return self.vendor or (word[0] if word else "")

    @property
    def _design(self) -> str:
        return processor.design(self.vendor, self.family)

    @property
    def source(self) -> dict[str, str | bool | None]:
        """Date, command, commit and ``dirty``, for records that a later call adds to a run."""
        return {name: getattr(self, name) for name in ("date", "command", "commit", "dirty")}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Environment:
        """Rebuild an environment from the result of :func:`dataclasses.asdict`."""
        gpu = document["gpu"]
        return cls(**{**document, "gpu": None if gpu is None else Gpu(**gpu)})


def capture(device: Device, *, root: Path) -> Environment:
    """Describe this machine and this process.

    Args:
        device: The device to measure.
        root: A folder inside the repository, for the commit and for shortening paths.
    """
    commit, dirty = git_state(root)
    torch = sys.modules.get("torch")
    return Environment(
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=command_line(root),
        commit=commit,
        dirty=dirty,
        device=device,
        gpu=_gpu() if device == "cuda" else None,
        cpu=processor.model(),
        cores=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        threads=None if torch is None else torch.get_num_threads(),
        cpu_pressure=cpu_pressure(),
        system=f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        python=platform.python_version(),
        packages=_versions(),
        vendor=processor.vendor(),
        family=processor.family(),
        instructions=processor.vector_instructions(),
    )


def _article(phrase: str) -> str:
    return "an" if phrase.startswith("NVIDIA") or phrase[0] in "AEIOUaeiou" else "a"


def cpu_pressure() -> float | None:
    """Percent of the last ten seconds in which some task waited for a core; None if the kernel does not report it."""
    try:
        text = Path("/proc/pressure/cpu").read_text()
    except OSError:
        return None
    average = re.search(r"some avg10=([\d.]+)", text)
    return float(average[1]) if average else None


def _versions() -> dict[str, str]:
    versions = {}
    for name in _FRAMEWORKS + _PEERS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


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
    line = answer([*query, "--format=csv,noheader,nounits"])
    if line is None:
        return {}
    return dict(zip(_SMI_QUERY, (part.strip() for part in line.split(",")), strict=True))
