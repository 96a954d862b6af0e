"""The lock file: graphs, breaks, recompilations, guards and kernels as they were, so that drift is noticed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchkit import UserError
from benchkit.results import write_text_atomically
from compile_bench.capture.trace import CompileTrace
from compile_bench.targets.case import Case

VERSION = 1
DEFAULT_FILE = Path("compile.lock.json")
_COUNTS = ("graphs", "breaks", "recompiles", "guards", "kernels")


@dataclass(frozen=True)
class Inventory:
    """What is locked of one target or test, with the torch that it was counted with."""

    graphs: int
    breaks: int
    recompiles: int
    guards: int
    kernels: int
    torch: str

    @classmethod
    def of(cls, trace: CompileTrace, torch_version: str) -> Inventory:
        """Count a trace."""
        return cls(
            len(trace.graphs), len(trace.breaks), len(trace.recompiles), trace.guards, trace.kernels, torch_version
        )

    def drift(self, now: Inventory) -> list[str]:
        """One line for every count that has changed since this was locked."""
        lines = [
            f"{name}: {getattr(self, name)} locked, {getattr(now, name)} now"
            for name in _COUNTS
            if getattr(self, name) != getattr(now, name)
        ]
        if lines and self.torch != now.torch:
            lines.append(f"locked with torch {self.torch}, this is {now.torch}: lock anew if that is the reason")
        return lines


def key_of(case: Case) -> str:
    """The name that a case has in a lock file."""
    dynamic = {None: "", True: ", dynamic", False: ", static"}[case.dynamic]
    scope = "" if case.scope == "whole" else f", {case.scope}"
    return f"{case.target}, {case.kind}, {case.device}, {case.mode}{dynamic}{scope}"


def read_lock(file: Path) -> dict[str, Inventory]:
    """The entries of a lock file.

    Raises:
        UserError: if there is none, or it is not one.
    """
    try:
        content = json.loads(file.read_text())
        if content["version"] != VERSION:
            raise UserError(f"{file} is of version {content['version']}; this compile-bench reads version {VERSION}")
        return {key: Inventory(**entry) for key, entry in content["entries"].items()}
    except FileNotFoundError:
        raise UserError(f"there is no lock file {file}; `compile-bench lock` writes one") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a lock file of compile-bench ({type(error).__name__}: {error})") from error


def write_lock(file: Path, entries: Mapping[str, Inventory]) -> None:
    """Write a lock file, replacing the one before: sorted, so that a difference of two is short."""
    content = {"version": VERSION, "entries": {key: asdict(entries[key]) for key in sorted(entries)}}
    write_text_atomically(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Inside, no other process that asks is in here; the folder itself is locked, so that no file is left beside."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def update_lock(file: Path, key: str, entry: Inventory) -> None:
    """Put one entry into a lock file, which is made if need be; several processes may do so at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with _only_writer(file.parent):
        write_lock(file, {**(read_lock(file) if file.exists() else {}), key: entry})


def locked(file: Path, key: str) -> Inventory:
    """One entry of a lock file.

    Raises:
        UserError: if it holds none of that name.
    """
    entries = read_lock(file)
    if key not in entries:
        raise UserError(f"{file} holds no entry {key!r}; lock it first")
    return entries[key]
