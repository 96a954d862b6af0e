"""The lock file: counts of what a target or test compiles to, so that a change of any is noticed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

from benchkit import UserError
from benchkit.results import in_turn, write_text_atomically
from compile_bench.capture.trace import CompileTrace
from compile_bench.targets.case import Case

# Version 1 lacks the counts that have a default.
VERSION, READ = 2, (1, 2)
DEFAULT_FILE = Path("compile.lock.json")


@dataclass(frozen=True)
class Inventory:
    """What a target or test compiles to, with the version of torch that counted it.

    A count that is None was not taken, or is not in a lock file of version 1; it is compared with nothing.
    """

    graphs: int  # captured graphs
    breaks: int  # graph breaks
    recompiles: int  # recompilations
    guards: int  # guards of all graphs
    kernels: int  # kernels that Inductor generated
    torch: str  # version of torch
    own_breaks: int | None = None  # graph breaks outside installed packages
    own_recompiles: int | None = None  # recompilations whose guard was made outside installed packages
    recompiles_per_guard: int | None = None  # recompilations that the guard with most of them caused
    # Compiled graphs that run under CUDA graphs as a whole; None on a CPU, in a mode that does not ask for CUDA graphs,
    # and in a test.
    cuda_graphs: int | None = None

    @classmethod
    def of(cls, trace: CompileTrace, torch_version: str, cuda_graphs: int | None = None) -> Inventory:
        """Count a trace."""
        return cls(
            graphs=len(trace.graphs),
            breaks=len(trace.breaks),
            recompiles=len(trace.recompiles),
            guards=trace.guards,
            kernels=trace.kernels,
            torch=torch_version,
            own_breaks=len(trace.own.breaks),
            own_recompiles=len(trace.own.recompiles),
            recompiles_per_guard=trace.most_of_one_guard,
            cuda_graphs=cuda_graphs,
        )

    def drift(self, now: Inventory) -> list[str]:
        """One line for every count that differs."""
        counts = [field.name for field in fields(self) if field.name != "torch"]
        both = {name: (getattr(self, name), getattr(now, name)) for name in counts}
        lines = [
            f"{name}: {locked} locked, {current} now"
            for name, (locked, current) in both.items()
            if None not in (locked, current) and locked != current
        ]
        if lines and self.torch != now.torch:
            lines.append(f"locked with torch {self.torch}, this is {now.torch}: lock anew if that is the reason")
        return lines


def key_of(case: Case) -> str:
    """The key of a case in a lock file."""
    dynamic = {None: "", True: ", dynamic", False: ", static"}[case.dynamic]
    scope = "" if case.scope == "whole" else f", {case.scope}"
    return f"{case.target}, {case.kind}, {case.device}, {case.mode}{dynamic}{scope}"


def read_lock(file: Path) -> dict[str, Inventory]:
    """The entries of a lock file by key."""
    try:
        content = json.loads(file.read_text())
        if content["version"] not in READ:
            raise UserError(f"{file} is of version {content['version']}; this compile-bench reads 1 and 2: upgrade it")
        return {key: _inventory(entry) for key, entry in content["entries"].items()}
    except FileNotFoundError:
        raise UserError(f"there is no lock file {file}; `compile-bench lock` writes one") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is not a lock file of compile-bench ({type(error).__name__}: {error}); name another file, or "
            "remove this one"
        ) from error


def _inventory(entry: Mapping[str, object]) -> Inventory:
    """An entry; a count without a number would be compared with nothing."""
    inventory = Inventory(**entry)  # type: ignore[arg-type]
    for field in fields(inventory):
        value, kind = getattr(inventory, field.name), str if field.name == "torch" else int
        if type(value) is not kind and (value is not None or field.default is MISSING):
            raise TypeError(f"{field.name} is {value!r}")
    return inventory


def update_lock(file: Path, key: str, entry: Inventory) -> None:
    """Write one entry to a lock file; the file is made if it does not exist. Several processes may do so at once."""
    with in_turn(file):
        entries = {**(read_lock(file) if file.exists() else {}), key: entry}
        # Sorted, so that two versions of the file differ in few lines.
        content = {"version": VERSION, "entries": {name: asdict(entries[name]) for name in sorted(entries)}}
        write_text_atomically(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def locked(file: Path, key: str) -> Inventory:
    """One entry of a lock file."""
    entries = read_lock(file)
    if key not in entries:
        raise UserError(f"{file} has no entry {key!r}; lock it first")
    return entries[key]
