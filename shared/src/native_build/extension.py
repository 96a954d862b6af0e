"""Just-in-time builds of pybind11 extensions that survive what happens to them in real use.

``torch.utils.cpp_extension.load`` does the building. Around it stand: a build folder that changes with anything that
the result depends on, so that a stale library is never loaded; a lock that the operating system releases when its
holder dies (torch's own is a plain file: a build that was killed makes every later one wait for ever); and errors that
begin with the compiler's first complaint.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from filelock import FileLock

from benchkit import UserError
from native_build.toolchain import SHARED_STANDARD_LIBRARY, cxx_compiler, find_nvcc, missing_cuda, missing_cxx

# torch switches the conversions and operators of CUDA's half types off for its own sources. A kernel in a plain .cu
# file is CUDA C++ as NVIDIA documents it, and compiles the same with and without torch's builder.
_PLAIN_CUDA = tuple(
    f"-U__CUDA_NO_{name}__"
    for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
)
_HEADER_SUFFIXES = {".h", ".hpp", ".hh", ".cuh", ".inc", ".inl", ".ipp"}


class BuildError(UserError):
    """An extension could not be built: a missing tool with its remedy, or the compiler's first error and the log."""


def load_extension(
    name: str,
    sources: Sequence[Path],
    *,
    cuda: bool = False,
    cflags: Sequence[str] = (),
    cuda_cflags: Sequence[str] = (),
    include_dirs: Sequence[Path] = (),
) -> ModuleType:
    """Build a pybind11 extension if need be, and import it.

    Args:
        name: of the Python module; what the sources give ``PYBIND11_MODULE`` through ``TORCH_EXTENSION_NAME``.
        sources: ``.cpp`` and, with ``cuda``, ``.cu`` files.
        cuda: build and link for CUDA, for the GPU that is current (or for ``TORCH_CUDA_ARCH_LIST``).
        cflags: for the C++ compiler, besides ``-O3``.
        cuda_cflags: for nvcc, besides ``-O3``.
        include_dirs: searched for headers; headers in them and beside the sources count as sources for rebuilding.

    Returns:
        The module; the same object for the same arguments in one process.

    Raises:
        BuildError: when a tool is missing, or a source does not compile.
    """
    return _load(name, tuple(sources), cuda, tuple(cflags), tuple(cuda_cflags), tuple(include_dirs))


_failures: dict[str, BuildError] = {}  # torch's builder takes a second try in one process for a finished build


@functools.cache
def _load(
    name: str,
    sources: tuple[Path, ...],
    cuda: bool,
    cflags: tuple[str, ...],
    cuda_cflags: tuple[str, ...],
    include_dirs: tuple[Path, ...],
) -> ModuleType:
    import torch.utils.cpp_extension as cpp_extension

    if (reason := missing_cuda() if cuda else missing_cxx()) is not None:
        raise BuildError(f"cannot build {name}: {reason}")
    architectures = _architectures() if cuda else ""
    digest = source_digest(sources, include_dirs, (*cflags, *cuda_cflags, architectures, cxx_compiler()))
    folder = build_root(cuda) / f"{name}-{digest}"
    if str(folder) in _failures:
        raise _failures[str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"), _build_environment(architectures), warnings.catch_warnings():
        # The builder warns of what it cannot check (no version bounds for this compiler); a compiler that is too old
        # fails with an error of its own.
        warnings.filterwarnings("ignore", module=r"torch\.utils\.cpp_extension")
        (folder / "lock").unlink(missing_ok=True)  # left by a build that was killed: its holder is gone, we hold ours
        try:
            return cpp_extension.load(
                name=name,
                sources=[str(source) for source in sources],
                extra_cflags=["-O3", *cflags],
                extra_cuda_cflags=["-O3", *_PLAIN_CUDA, *cuda_cflags],
                extra_ldflags=[SHARED_STANDARD_LIBRARY],
                extra_include_paths=[str(folder) for folder in include_dirs],
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


def build_root(cuda: bool) -> Path:
    """The folder of this Python's and this torch's builds in the user's cache.

    Args:
        cuda: of builds that need CUDA to be loaded or to run.
    """
    import torch

    base = os.environ.get("FRAMEWORK_INTERNALS_BUILD_DIR")
    cache = (
        Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "framework-internals")
    )
    interpreter = sys.implementation.cache_tag
    return cache / f"{interpreter}-torch-{torch.__version__}{'-cuda' if cuda else ''}"


def source_digest(sources: Iterable[Path], include_dirs: Iterable[Path], flags: Iterable[str]) -> str:
    """A name that changes with the sources, the headers around them and below ``include_dirs``, and the flags."""
    sources = list(sources)
    folders = sorted({source.parent for source in sources} | set(include_dirs))
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
    """The value for TORCH_CUDA_ARCH_LIST: the user's, or the current GPU's own, with its architecture-specific part."""
    import torch

    if given := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return given
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}{'a' if major >= 9 else ''}"


@contextmanager
def _build_environment(architectures: str) -> Iterator[None]:
    """What the builder reads from the environment, put back afterwards."""
    import ninja
    import torch.utils.cpp_extension as cpp_extension

    changed = {"PATH": f"{ninja.BIN_DIR}{os.pathsep}{os.environ.get('PATH', '')}"}  # a venv need not be activated
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
    """The first line of a build log that reports an error, or else its first line; says so where it is empty."""
    found = re.search(r"^.*(?:\berror\b:|fatal error|undefined reference|: not found).*$", log, re.MULTILINE)
    return (found[0] if found else next(iter(log.strip().splitlines()), "the compiler said nothing")).strip()
