"""The single-stepper: build it once, step through one call, keep the notable functions."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from benchkit import UserError
from benchkit.processes.resources import user_cache
from dispatcher_trace.capture.native_step import symbols
from dispatcher_trace.capture.types import NativeFrame, NativeStep

_T = TypeVar("_T")

_BUDGET = 400_000  # instructions of one kernel, and as many around it; each takes 1 to 15 µs
_ENTRY = rb"_ZN3c104impl31make_boxed_from_unboxed_functor[^\0]*4callE[^\0]*"
_MAX_FRAMES = 12
# The notable functions: the generated wrapper of a backend, the functions of at::native that do the work, all that is
# compiled for an instruction set, and the routines of the math libraries.
_NOTABLE = re.compile(
    r"wrapper_CPU_|^at::native::|^[sdcz](b|h)?gem[mv]|^mkl_(blas|dft|lapack)_|^cblas_"
    r"|^dnnl::impl::cpu.*::execute|^(fbgemm|xnn|pocketfft)"
)
_PLUMBING = re.compile(
    r"DispatchStub|::~|operator(=|new|delete)|resize|check|resolve_|::use_|::is_|_is_|errchk|xerbla|_api_|::dtype|lambda"
)
_INSTRUCTION_SET = re.compile(r"\.(DEFAULT|AVX2|AVX512|ZVECTOR|VSX|SVE\w*)$")
# The linker's entries. A hidden function that follows them in the symbol table has no file entry.
_NO_FILES = frozenset({"offloadstuff.c", "crtstuff.c"})


class _Frame(ctypes.Structure):
    _fields_ = (
        ("target", ctypes.c_uint64),
        ("entered", ctypes.c_uint64),
        ("left", ctypes.c_uint64),
        ("depth", ctypes.c_uint32),
        ("jumped", ctypes.c_uint32),
    )


def unavailable() -> str:
    """Why this machine cannot step through kernels, with the remedy; empty if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"single-stepping needs x86-64 Linux, this is {platform.machine()} {sys.platform}"
    if shutil.which(_compiler()) is None:
        return f"single-stepping needs a C compiler, no {_compiler()!r} on PATH (apt-get install gcc, or set CC)"
    mappings = symbols.Process().of_library("libtorch_cpu.so")
    if not mappings:
        return "single-stepping needs libtorch_cpu.so, which this torch does not load"
    if not symbols.library(mappings[0].path).addresses_named(_ENTRY):
        return "single-stepping needs the symbol table of libtorch_cpu.so, which this build of torch does not keep"
    return ""


class Stepper:
    """Steps through the next kernel that a call enters.

    Raises:
        UserError: With the reason from :func:`unavailable`.
    """

    def __init__(self) -> None:
        if reason := unavailable():
            raise UserError(reason)
        self._library = _built()
        process = symbols.Process()
        mappings = process.of_library("libtorch_cpu.so")
        entries = symbols.absolute(mappings, symbols.library(mappings[0].path).addresses_named(_ENTRY))
        self._entries = (ctypes.c_uint64 * len(entries))(*entries)
        interpreter = process.of_library("libpython") or process.of_library(Path(sys.executable).resolve().name)
        self._interpreter = min(m.low for m in interpreter), max(m.high for m in interpreter)

    def step(self, call: Callable[[], _T]) -> tuple[_T, NativeStep | None]:
        """Make a call and step through the first kernel that it enters. Only one call can be stepped at a time.

        Returns:
            The result of the call, and what was seen; None if the call entered no kernel.
        """
        self._library.single_step_start(self._entries, len(self._entries), *self._interpreter, _BUDGET)
        try:
            result = call()
        finally:
            count = self._library.single_step_stop()
        return result, self._read(count) if count else None

    def resume(self) -> None:
        """Continue stepping. A Python function that the kernel called must do this last, before it returns."""
        self._library.single_step_resume()

    def _read(self, count: int) -> NativeStep:
        process = symbols.Process()  # read again: a library may have generated code meanwhile
        raw = ctypes.cast(self._library.single_step_frames(), ctypes.POINTER(_Frame * count)).contents
        frames: list[NativeFrame] = []
        to_python, outside = 0, 0  # instructions in calls into Python, and where the last such call ended
        for frame in raw:
            symbol = process.symbol_at(frame.target)
            if symbol.library == "libtorch_python.so" and frame.entered >= outside and frame.left:
                to_python += frame.left - frame.entered
                outside = frame.left
            if _notable(symbol) and (not frames or frames[-1].function != _short(symbol)):
                file = "" if symbol.file in _NO_FILES else symbol.file
                frames.append(NativeFrame(_short(symbol), file, symbol.library, frame.depth, frame.entered))
        instructions: int = self._library.single_step_instructions()
        # Each function once, where it was first entered.
        first = {frame.function: frame for frame in reversed(frames)}
        kept = sorted(first.values(), key=lambda frame: frame.instructions)[:_MAX_FRAMES]
        return NativeStep(tuple(kept), instructions - to_python, bool(self._library.single_step_cut()))


def _notable(symbol: symbols.Symbol) -> bool:
    if symbol.library == "generated code":
        return True
    name = _short(symbol)
    return bool(_NOTABLE.search(name) or _INSTRUCTION_SET.search(symbol.file)) and not _PLUMBING.search(name)


def _short(symbol: symbols.Symbol) -> str:
    """A name without its parameters: ``at::native::(anonymous namespace)::add_kernel``."""
    if not symbol.name:
        return "code generated at run time"
    depth, kept = 0, []
    for character in symbol.name.replace("(anonymous namespace)", "{anonymous}"):
        depth += character in "(<"
        if depth == 0:
            kept.append(character)
        depth -= character in ")>"
    words = "".join(kept).partition(" [clone")[0].removesuffix(" const").split(" ")
    return words[-1].replace("{anonymous}", "(anonymous namespace)")  # the words before it are the result type


def _compiler() -> str:
    return os.environ.get("CC", "cc")


@functools.cache
def _built() -> Any:
    """The stepper's library, compiled once for each version of its source."""
    source = resources.files(__package__).joinpath("single_step.c").read_text(encoding="utf-8")
    name = f"single_step-{hashlib.sha256(source.encode()).hexdigest()[:16]}.so"
    cache = user_cache() / "dispatcher_trace"
    path = cache / name
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / name
            command = [_compiler(), "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(made)]
            done = subprocess.run(command, input=source, text=True, capture_output=True)
            if done.returncode:
                first = (done.stderr.strip().splitlines() or ["no message"])[0]
                raise UserError(f"the C compiler {_compiler()!r} could not build the single-stepper: {first}")
            made.replace(path)
    library = ctypes.CDLL(str(path))
    library.single_step_start.argtypes = [ctypes.c_void_p, *[ctypes.c_uint64] * 4]
    library.single_step_stop.restype = ctypes.c_uint32
    library.single_step_frames.restype = ctypes.c_void_p
    library.single_step_instructions.restype = ctypes.c_uint64
    library.single_step_cut.restype = ctypes.c_uint32
    return library
