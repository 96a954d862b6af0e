"""The lock file: counts of what a target or test compiles to, so that a change of any is noticed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchkit import UserError
from benchkit.results import write_text_atomically
from compile_bench.check.types import Inventory
from compile_bench.targets.case import Case

# Version 1 lacks the counts that have a default.
VERSION, READ = 2, (1, 2)
DEFAULT_FILE = Path("compile.lock.json")


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
        return {key: Inventory(**entry) for key, entry in content["entries"].items()}
    except FileNotFoundError:
        raise UserError(f"there is no lock file {file}; `compile-bench lock` writes one") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a lock file of compile-bench ({type(error).__name__}: {error})") from error


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """A lock between processes. It is on the folder itself, so that no other file remains."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def update_lock(file: Path, key: str, entry: Inventory) -> None:
    """Write one entry to a lock file; the file is made if it does not exist. Several processes may do so at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with _only_writer(file.parent):
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
