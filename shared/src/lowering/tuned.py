"""What this machine measured for itself: rows in the user's cache, found without being named.

Each row is a file of its own, written in one step, below ``lowerings/<key>/`` of the user's cache. The key is a hash of
all that a measurement depends on: GPU, or processor with its vector instructions and threads; versions of torch, Triton
and CUDA; the source of the kernels. Where one of them changes, the rows are not found and the formula is taken; they
are found again when it changes back. A folder holds a readable ``depends_on.json``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch

from benchkit.environment import processor
from benchkit.processes.resources import user_cache
from benchkit.results import write_text_atomically
from lowering.table import Row, row_from

# Names another folder than that of the user's cache.
VARIABLE = "LOWERING_CACHE"

# The files of a package that its kernels are made from, or that are the kernels.
_SOURCES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".py", ".so")


def rows_folder() -> Path:
    """The folder below which all rows are, which need not exist.

    Raises:
        UserError: If no folder of this user's can be written.
    """
    named = os.environ.get(VARIABLE)
    return Path(named) if named else user_cache() / "lowerings"


def folder(source: str, device_type: str) -> Path:
    """The folder with the rows for the kernels of a package on this machine, which need not exist.

    Args:
        source: Import package with the kernels; empty for kernels of no package.
        device_type: Device type of the tensors, such as ``"cpu"``.

    Raises:
        UserError: If no folder of this user's can be written.
    """
    text = json.dumps(_depends_on(source, device_type), sort_keys=True)
    return rows_folder() / hashlib.sha256(text.encode()).hexdigest()[:16]


def write(rows: Iterable[Row], source: str, device_type: str) -> Path:
    """Keep rows for this machine. A row replaces that of the same call; all others stay.

    Returns:
        The folder that they are in.

    Raises:
        UserError: If they cannot be written.
    """
    place = folder(source, device_type)
    depends_on = json.dumps(_depends_on(source, device_type), indent=1)
    write_text_atomically(place / "depends_on.json", depends_on + "\n")
    for row in rows:
        name = hashlib.sha256(repr(row.key).encode()).hexdigest()[:16]
        write_text_atomically(place / f"{row.operator}-{name}.row.json", json.dumps(asdict(row)) + "\n")
    return place


def read(source: str, device_type: str) -> list[Row]:
    """The rows that apply to the kernels of a package on this machine; a damaged file is no row."""
    rows = []
    for path in sorted(folder(source, device_type).glob("*.row.json")):
        try:
            rows.append(row_from(json.loads(path.read_text())))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return rows


def _depends_on(source: str, device_type: str) -> dict[str, str]:
    """All that a measurement of kernels on this machine depends on, by what it is."""
    if device_type == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = f"{properties.name}, {properties.multi_processor_count} multiprocessors, {properties.total_memory} B"
        threads = ""
    else:
        device = ", ".join((*_processor(), torch.backends.cpu.get_cpu_capability()))
        threads = str(torch.get_num_threads())
    return {
        "device": device,
        "threads": threads,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda or "",
        "package": source,
        "kernels": _fingerprint(source),
    }


# Neither changes while a process runs, and torch.compile asks at every operator that it traces.
@functools.cache
def _processor() -> tuple[str, str]:
    return processor.model(), processor.family()


@functools.cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def _fingerprint(source: str) -> str:
    """A hash of the files of a package, and of ``csrc`` beside its ``src``; empty for no package."""
    specification = importlib.util.find_spec(source) if source else None
    if specification is None or specification.origin is None:
        return ""
    package = Path(specification.origin).parent
    csrc = [package.parents[1] / "csrc"] if package.parent.name == "src" else []
    digest = hashlib.sha256()
    for root in (package, *csrc):
        for path in sorted(path for path in root.rglob("*") if path.suffix in _SOURCES):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
