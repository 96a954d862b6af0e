"""Robust just-in-time builds of pybind11 extensions by torch's own builder, ``torch.utils.cpp_extension.load``.

This module adds five things to it:

- The name of the build folder depends on everything that determines the result, so that no stale library is loaded.
- A finished build is loaded without torch's builder, which compiles again for equal sources in another folder.
- The operating system releases the lock when its owner dies. torch's own lock is a plain file, and after a build that
  was killed every later one waits for ever.
- An interrupt ends the compilers. torch's builder ends ninja, whose compilers would go on.
- Errors begin with the first error of the compiler.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import signal
import sysconfig
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from benchkit import UserError
from benchkit.processes.resources import user_cache
from native_build.toolchain import (
    INCLUDE_DIR,
    SHARED_STANDARD_LIBRARY,
    compilers_at_once,
    cxx_compiler,
    find_nvcc,
    missing_cuda,
    missing_cxx,
)

# torch disables the conversions and operators of CUDA's half types for its own sources. These flags enable them again,
# so that a plain .cu file compiles in the same way with and without torch's builder.
_PLAIN_CUDA = tuple(
    f"-U__CUDA_NO_{name}__"
    for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
)
_HEADER_SUFFIXES = {".h", ".hpp", ".hh", ".cuh", ".inc", ".inl", ".ipp"}


class BuildError(UserError):
    """An extension cannot be built. The message names a missing tool and its remedy, or the compiler's first error."""


def load_extension(
    name: str,
    sources: Sequence[Path],
    *,
    cuda: bool = False,
    cflags: Sequence[str] = (),
) -> ModuleType:
    """Build a pybind11 extension if it is not built yet, and import it.

    A change of a source, of a header beside it or in :data:`native_build.INCLUDE_DIR` causes a rebuild.

    Args:
        name: Name of the Python module, which the sources pass to ``PYBIND11_MODULE`` as ``TORCH_EXTENSION_NAME``.
        sources: ``.cpp`` files and, with ``cuda``, ``.cu`` files.
        cuda: Whether to build and link for CUDA, for the current GPU or for ``TORCH_CUDA_ARCH_LIST``.
        cflags: Flags for the C++ compiler in addition to ``-O3``.

    Returns:
        The module. Within a process, the same arguments return the same object.

    Raises:
        BuildError: If a tool is missing or a source does not compile.
    """
    return _load(name, tuple(sources), cuda, tuple(cflags))


_failures: dict[str, BuildError] = {}  # torch's builder would take a second attempt in the process for a finished build


@functools.cache
def _load(name: str, sources: tuple[Path, ...], cuda: bool, cflags: tuple[str, ...]) -> ModuleType:
    import torch.utils.cpp_extension as cpp_extension

    if (reason := missing_cuda() if cuda else missing_cxx()) is not None:
        raise BuildError(f"cannot build {name}: {reason}")
    architectures = _architectures() if cuda else ""
    digest = source_digest(sources, (), (*cflags, architectures, cxx_compiler()))
    folder = build_root(cuda) / f"{name}-{digest}"
    if str(folder) in _failures:
        raise _failures[str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    library, finished = folder / f"{name}.so", folder / "finished"
    with locked(folder), ended_by_exceptions(), _build_environment(architectures), warnings.catch_warnings():
        if finished.exists():
            return import_library(name, library)
        # The builder warns that it knows no version bounds for this compiler. A compiler that is too old fails anyway.
        warnings.filterwarnings("ignore", module=r"torch\.utils\.cpp_extension")
        (folder / "lock").unlink(missing_ok=True)  # torch's lock, left by a build that was killed
        try:
            module: ModuleType = cpp_extension.load(
                name=name,
                sources=[str(source) for source in sources],
                extra_cflags=["-O3", *cflags],
                extra_cuda_cflags=["-O3", *_PLAIN_CUDA],
                extra_ldflags=[SHARED_STANDARD_LIBRARY],
                extra_include_paths=[str(INCLUDE_DIR)],
                build_directory=str(folder),
                with_cuda=cuda,
            )
        except (RuntimeError, OSError) as error:
            log = folder / "build.log"
            log.write_text(str(error), encoding="utf-8")
            _failures[str(folder)] = BuildError(
                f"cannot build {name}: {first_complaint(str(error))} (whole log: {log})"
            )
            raise _failures[str(folder)] from error
        except BaseException:
            _end_compilers(folder)
            raise
        finished.touch()
        return module


def _end_compilers(folder: Path) -> None:
    """Kill what works in the folder of a build, whose lock this process holds."""
    while working := [*_processes_in(folder.resolve())]:
        for number in working:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def _processes_in(folder: Path) -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if (process / "cwd").readlink() == folder:
                yield int(process.name)


def import_library(name: str, library: Path) -> ModuleType:
    """Import an extension module from its file."""
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_root(cuda: bool) -> Path:
    """The folder in the user's cache for builds with this Python, for this family of processors, and with this torch.

    Args:
        cuda: Whether the builds need CUDA to be loaded or to run.
    """
    import torch

    interpreter = sysconfig.get_config_var("SOABI")  # sys.implementation.cache_tag is the same on every processor
    return user_cache() / f"{interpreter}-torch-{torch.__version__}{'-cuda' if cuda else ''}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a build, which the operating system releases when its owner dies.

    Raises:
        BuildError: If the package filelock is missing, which only building needs.
    """
    try:
        from filelock import FileLock
    except ModuleNotFoundError as error:
        raise BuildError("compiling operators needs the package filelock: pip install filelock") from error
    with FileLock(f"{path}.lock"):
        yield


@contextmanager
def ended_by_exceptions() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit, so that a build can end its compilers; in the main thread, where it can.

    A program's own handler stays.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def source_digest(sources: Iterable[Path], include_dirs: Iterable[Path], flags: Iterable[str]) -> str:
    """A hash of the sources, the headers beside them, in ``INCLUDE_DIR`` and below ``include_dirs``, and the flags."""
    sources = list(sources)
    folders = sorted({source.parent for source in sources} | {INCLUDE_DIR, *include_dirs})
    state = hashlib.sha256()
    for path in sources:
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in _HEADER_SUFFIXES):
            state.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    for flag in flags:
        state.update(flag.encode() + b"\0")
    return state.hexdigest()[:16]


def _architectures() -> str:
    """TORCH_CUDA_ARCH_LIST: the user's value, or the architecture of the current GPU with its specific features."""
    import torch

    if given := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return given
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}{'a' if major >= 9 else ''}"


@contextmanager
def _build_environment(architectures: str) -> Iterator[None]:
    """Set the environment variables that the builder reads, and restore them after the block."""
    import ninja
    import torch.utils.cpp_extension as cpp_extension

    # ninja is found even if the virtual environment is not activated.
    changed = {
        "PATH": f"{ninja.BIN_DIR}{os.pathsep}{os.environ.get('PATH', '')}",
        "MAX_JOBS": str(compilers_at_once()),
    }
    if architectures:
        changed["TORCH_CUDA_ARCH_LIST"] = architectures
    before = {key: os.environ.get(key) for key in changed}
    home = cpp_extension.CUDA_HOME
    if architectures and home is None and (nvcc := find_nvcc()) is not None:
        cpp_extension.CUDA_HOME = str(nvcc.parent.parent)
    os.environ.update(changed)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = home
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def first_complaint(log: str) -> str:
    """The first line of a build log that reports an error, else its first line; a remark if the log is empty."""
    found = re.search(r"^.*(?:\berror\b:|fatal error|undefined reference|: not found).*$", log, re.MULTILINE)
    return (found[0] if found else next(iter(log.strip().splitlines()), "the compiler said nothing")).strip()
