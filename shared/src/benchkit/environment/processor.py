"""What Linux and torch say of the processor: its vendor, its design, and the vector instructions that torch uses."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

# What torch's kernels of each kind ask for, best first (`compute_cpu_capability` in ATen's DispatchStub.cpp).
_X86_LEVELS = {"avx512": {"avx512vl", "avx512bw", "avx512dq", "fma"}, "avx2": {"avx2", "fma"}}

# Names of server and desktop designs by the vendor's numbers: family -> (models, name), the first that fits. Sources:
# the lists by which Linux tells them apart (arch/x86/kernel/cpu/amd.c and arch/x86/include/asm/intel-family.h).
_ZEN_6_MODELS = {*range(0x50, 0x60), *range(0x90, 0xB0), *range(0xC0, 0xD0)}
_DESIGNS: Mapping[str, Mapping[int, Sequence[tuple[Collection[int], str]]]] = {
    "amd": {
        23: [(range(0x30), "Zen"), (range(0x30, 0x100), "Zen 2")],
        25: [({*range(0x10, 0x20), *range(0x60, 0xB0)}, "Zen 4"), (range(0x60), "Zen 3")],
        26: [(_ZEN_6_MODELS, "Zen 6"), (range(0x80), "Zen 5")],
    },
    "intel": {
        6: [
            ({0x3F}, "Haswell"),
            ({0x4F, 0x56}, "Broadwell"),
            ({0x55}, "Skylake"),
            ({0x6A, 0x6C}, "Ice Lake"),
            ({0x8F}, "Sapphire Rapids"),
            ({0xCF}, "Emerald Rapids"),
            ({0xAD, 0xAE}, "Granite Rapids"),
        ],
    },
}

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


def machine_name(*parts: str) -> str:
    """Join what is known of a machine to a name in lower case, such as ``"amd-zen-4-avx512-2-cores-24gib"``."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")


def design(vendor: str, family: str) -> str:
    """The name of a processor's design, such as ``"Zen 4"``; its numbers where no name is kept, empty without any.

    Args:
        vendor: As :func:`vendor` returns it.
        family: As :func:`family` returns it.
    """
    numbers = re.fullmatch(r"family (\d+), model (\d+)", family)
    if numbers is None:
        return family
    number, model = map(int, numbers.groups())
    names = (name for models, name in _DESIGNS.get(vendor, {}).get(number, ()) if model in models)
    return next(names, family)


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
