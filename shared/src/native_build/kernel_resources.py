"""The resources that a CUDA kernel uses: registers, shared memory, spills. This needs nvcc and no GPU."""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchkit.results import write_text_atomically
from native_build.extension import BuildError, build_root, first_complaint
from native_build.toolchain import find_nvcc, nvcc_version

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<architecture>[^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class KernelResources:
    """Resources of one kernel on one architecture.

    Attributes:
        name: Mangled name, as in the object file.
        architecture: Architecture, such as ``"sm_90"``.
        registers: Registers per thread.
        shared_memory: Bytes of static shared memory per block.
        stack_frame: Bytes per thread in local memory, which is part of device memory.
        spill_stores: Bytes per thread that are written because registers run out; a fast kernel has none.
        spill_loads: Bytes per thread that are read back.
    """

    name: str
    architecture: str
    registers: int
    shared_memory: int
    stack_frame: int
    spill_stores: int
    spill_loads: int


def compile_cuda(source: Path, architecture: str, *, cuda_cflags: Sequence[str] = ()) -> list[KernelResources]:
    """Compile a ``.cu`` file for one architecture and read ptxas's report of resources; the object is discarded.

    The report is kept in the user's cache, for this nvcc, these flags and these contents of all included files.

    Args:
        source: The file.
        architecture: Architecture, such as ``"sm_80"`` or ``"sm_90a"``.
        cuda_cflags: Flags in addition to ``-O3 -std=c++17``.

    Returns:
        One entry per kernel, in the order of the compiler's report.

    Raises:
        BuildError: If there is no nvcc or the source does not compile.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("cannot compile CUDA C++: no nvcc (install the CUDA toolkit, or set CUDA_HOME to where it is)")
    virtual = architecture.replace("sm_", "compute_")
    command = [
        str(nvcc), "-O3", "-std=c++17", "-gencode", f"arch={virtual},code={architecture}", *cuda_cflags,
    ]  # fmt: skip

    def compiled(*options: str) -> subprocess.CompletedProcess[str]:
        answer = subprocess.run([*command, *options, str(source)], capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise BuildError(f"{source.name} does not compile for {architecture}: {first_complaint(answer.stderr)}")
        return answer

    state = hashlib.sha256("\0".join([architecture, *cuda_cflags, nvcc_version(nvcc)]).encode())
    for path in shlex.split(compiled("-M").stdout.partition(":")[2].replace("\\\n", " ")):
        state.update(Path(path).read_bytes() + b"\0")
    kept = build_root(cuda=True) / f"{source.stem}-{architecture}-{state.hexdigest()[:16]}.ptxas"
    if kept.is_file():
        return parse_resources(kept.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        answer = compiled("-cubin", "-Xptxas", "-v", "-o", str(Path(folder) / "kernel.cubin"))
    report = answer.stderr + answer.stdout
    kernels = parse_resources(report)  # raises where its format has changed, so that nothing is kept
    write_text_atomically(kept, report)
    return kernels


def parse_resources(report: str) -> list[KernelResources]:
    """Parse the output of ``ptxas -v``.

    Raises:
        ValueError: If figures are missing after an entry function, because the format has changed.
    """
    kernels = []
    entries = list(_ENTRY.finditer(report))
    for entry, after in zip(entries, [*entries[1:], None], strict=True):
        part = report[entry.end() : after.start() if after else len(report)]
        stack, used, shared = _STACK.search(part), _USED.search(part), _SHARED.search(part)
        if stack is None or used is None:
            raise ValueError(f"no stack or register figures for {entry['name']} in ptxas's report: {part[:200]!r}")
        figures = map(int, (used[1], shared[1] if shared else 0, *stack.groups()))
        kernels.append(KernelResources(entry["name"], entry["architecture"], *figures))
    return kernels
