"""The commands ``cache-key`` and ``cache-diff``: why a cache that another run filled misses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchkit.command.progress import working
from benchkit.processes import deferred_module
from compile_bench.capture.text import plural
from compile_bench.check.cache_keys import KeyFile, compare_keys, read_keys, write_keys
from compile_bench.check.lock import key_of
from compile_bench.cli import options
from compile_bench.cli.options import OVER_BUDGET, case_of
from compile_bench.measure.harness import DEFAULT_LIMIT, Harness

if TYPE_CHECKING:
    from compile_bench.check import jobs
else:
    jobs = deferred_module("compile_bench.check.jobs")

WrittenFile = Annotated[Path, typer.Argument(help="A file that cache-key wrote.")]


def cache_key(
    target: options.TargetName,
    file: Annotated[Path, typer.Option(help="The file for the keys and their parts.")] = Path("compile-keys.json"),
    train: options.Train = True,
    mode: options.Mode = "default",
    dynamic: options.Dynamic = None,
    device: options.DeviceName = "auto",
    limit: options.Limit = DEFAULT_LIMIT,
) -> int:
    """Write the keys under which the compiler caches a target's graphs, with all their parts, for cache-diff."""
    case = case_of(target, train, mode, dynamic, device)
    with Harness.open(case.device, limit=limit) as harness, working(f"compiling {target}"):
        harness.toolchain_seconds()
        facts, keys = harness.ask(jobs.cache_keys, case)
    write_keys(file, KeyFile(key_of(case), facts, keys))
    print(f"{file}: {plural(len(keys), 'key')} of {key_of(case)}")
    return 0


def cache_diff(before: WrittenFile, after: WrittenFile) -> int:
    """Say which parts of the cache keys of two runs or machines differ. Exit status: 0 if none does, 1 if one does."""
    one, other = read_keys(before), read_keys(after)
    lines = compare_keys(one, other)
    if one.target != other.target:
        lines.append(f"the files are of two targets: {one.target}; {other.target}")
    print("\n".join(lines) or f"{plural(len(one.keys), 'key')}, all the same: the caches of one run serve the other")
    return OVER_BUDGET if lines else 0
