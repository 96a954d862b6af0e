"""Runs every operator, forward and backward, under NVIDIA's compute-sanitizer.

    ./scripts/python.sh framework-internals/custom-ops/scripts/sanitize.py --tool memcheck

It finds out-of-bounds accesses, races and uninitialised memory. It needs a GPU and the CUDA toolkit's
compute-sanitizer, and uses the same library as `custom_ops` (CUSTOM_OPS_LIBRARY names another). The exit status is 1 if
anything is reported. NOTES.md explains racecheck's false reports.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

TOOLS = ("memcheck", "initcheck", "racecheck")

# torch's caching allocator would hide an access beyond a tensor, so each tensor gets its own allocation.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

CALLS = Path(__file__).with_name("sanitized_calls.py")


def main(
    tool: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(TOOLS)}; repeat for several. Default: all three.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A group of operators of sanitized_calls.py; repeat for several.")
    ] = None,
    short: Annotated[
        bool, typer.Option(help="One problem of each kind of attention's kernels, for racecheck, which is slow.")
    ] = False,
) -> None:
    """Run every operator under compute-sanitizer."""
    tools = tool or list(TOOLS)
    if unknown := [name for name in tools if name not in TOOLS]:
        sys.exit(f"sanitize.py: --tool: expected {', '.join(TOOLS)}, got {unknown[0]!r}")
    program = shutil.which("compute-sanitizer")
    if program is None:
        sys.exit(
            "sanitize.py: no compute-sanitizer on PATH; it comes with the CUDA toolkit (its bin folder goes on PATH)"
        )
    failed = []
    for name in tools:
        print(f"sanitize.py: {name}", flush=True)
        # initcheck misses what cuBLAS's products store (NOTES.md).
        options = [*(["--no-products"] if name == "initcheck" else []), *(["--short"] if short else [])]
        calls = [sys.executable, str(CALLS), *(only or []), *options]
        command = [program, "--tool", name, "--error-exitcode", "1", "--print-limit", "30", *calls]
        if subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=False).returncode != 0:
            failed.append(name)
    print("sanitize.py:", f"reports or an error in {', '.join(failed)}" if failed else "nothing reported")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
