"""What Linux and torch say of the processor: its vendor, its family, and the vector instructions that torch uses."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

# What torch's kernels of each kind ask for, best first (`compute_cpu_capability` in ATen's DispatchStub.cpp).
_X86_LEVELS = {"avx512": {"avx512vl", "avx512bw", "avx512dq", "fma"}, "avx2": {"avx2", "fma"}}

_ASKED_LEVELS = {"avx512": "avx512", "avx2": "avx2", "default": "baseline"}


def processor_field(name: str, cpuinfo: Path = CPUINFO) -> str:
    """A field of Linux's description of the first processor, such as ``"model name"``; empty where there is none."""
    try:
        for line in cpuinfo.read_text().splitlines():
            field, _, value = line.partition(":")
            if field.strip() == name:
                return value.strip()
    except OSError:
        pass
    return ""


@functools.cache
def vendor(cpuinfo: Path = CPUINFO) -> str:
    """The vendor of the processor, such as ``"amd"`` or ``"intel"``; empty where the file names none.

    Args:
        cpuinfo: Linux's description of the processor, whose ``vendor_id`` is such as ``GenuineIntel``.
    """
    return re.sub("^(Authentic|Genuine)", "", processor_field("vendor_id", cpuinfo)).lower()


def family(cpuinfo: Path = CPUINFO) -> str:
    """The vendor's numbers for the design, such as ``"family 25, model 17"``; empty where there are none."""
    numbers = {name: processor_field(field, cpuinfo) for name, field in (("family", "cpu family"), ("model", "model"))}
    return ", ".join(f"{name} {number}" for name, number in numbers.items() if number)


def model() -> str:
    """The processor's name, or what Python knows of it."""
    return processor_field("model name") or platform.processor() or platform.machine()


def vector_instructions(cpuinfo: Path = CPUINFO) -> str:
    """The vector instructions of torch's kernels: ``"avx512"``, ``"avx2"``, ``"neon"``, …; ``"baseline"`` for none.

    torch is asked where it is loaded. Where it is not, its rule for x86-64 is applied: importing it takes seconds.
    """
    if "torch" not in sys.modules and platform.machine() == "x86_64":
        return _ASKED_LEVELS.get(os.environ.get("ATEN_CPU_CAPABILITY", "")) or _x86_level(cpuinfo)
    try:
        import torch
    except ImportError:
        return ""
    plain = "neon" if platform.machine() == "aarch64" else "baseline"
    return torch.backends.cpu.get_cpu_capability().lower().replace("default", plain)


def _x86_level(cpuinfo: Path) -> str:
    flags = set(processor_field("flags", cpuinfo).split())
    return next((level for level, needed in _X86_LEVELS.items() if needed <= flags), "baseline")
