"""Errors that a user can fix: the exception for them, and remedies for what the operating system refuses."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """An error that the user can fix. The message says what was expected, what was received and what to do.

    A command line prints it on one line and exits with status 2. A library caller catches it like any other exception.
    """


_REMEDIES = {
    errno.ENOSPC: "make room there, or name a folder on another disk",
    errno.EDQUOT: "make room within your quota, or name a folder on another disk",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or name a folder on another disk",
    errno.EROFS: "name a folder on a file system that can be written",
    errno.EACCES: "change its permissions, or name another folder",
    errno.EPERM: "change its permissions, or name another folder",
    errno.ENOTDIR: "remove the file that stands where a folder should be, or name another folder",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close programs that keep files open, or raise the system's limit on open files",
    errno.ENOMEM: "close programs that use memory, or use a machine with more memory",
    errno.EAGAIN: "end some processes, or raise the limit on processes (ulimit -u)",
    errno.EIO: "check the disk: reading or writing failed",
}


def first_line(error: BaseException) -> str:
    """An exception as part of a sentence: its type and the first line of its message, without a full stop.

    A line that ends with a colon goes on with the next one. A :class:`UserError` is a sentence itself, without its
    type.
    """
    try:
        text = str(error)
    except Exception:  # the class's own __str__ raises
        text = ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[0] if lines else ""
    if line.endswith(":") and len(lines) > 1:
        line = f"{line} {lines[1]}"
    if isinstance(error, UserError):
        return line.rstrip(".")
    return f"{type(error).__name__}: {line.rstrip('.')}" if line else type(error).__name__


# How torch, CUDA's libraries, NumPy, XLA and C++ say that memory is short, and how much was asked for.
_NO_MEMORY = re.compile(
    r"out of memory|MemoryError|(?:can't|cannot) allocate memory|RESOURCE_EXHAUSTED|_ALLOC_FAILED|bad_alloc",
    re.IGNORECASE,
)
_ASKED_FOR = re.compile(r"allocat(?:e|ing) ([\d.]+ ?\w*)")


def lacks_memory(error: BaseException) -> bool:
    """Whether an error, here or in a child process, says that memory is short."""
    return _NO_MEMORY.search(f"{type(error).__name__}: {error}") is not None


def without_frames(error: Exception) -> Exception:
    """Return an error that may be kept: without the frames that it passed, whose tensors can be gigabytes."""
    chained: BaseException | None = error
    while chained is not None:
        chained.__traceback__ = None
        chained = chained.__cause__ or chained.__context__
    return error


def why_missing(error: BaseException) -> str:
    """Say as a clause without a full stop why a measurement is missing: it ended with this error."""
    if isinstance(error, UserError):
        return first_line(error)
    if isinstance(error, OSError) and (fault := machine_fault(error)) is not None:
        return first_line(fault)
    if lacks_memory(error):
        asked = _ASKED_FOR.search(str(error))
        return f"there was not enough memory{f' for {asked[1]} more' if asked else ''}"
    return f"it ended with {first_line(error)}"


def namesakes_of_standard_modules(folders: Iterable[str | Path], error: str) -> str:
    """A clause on files that have the name of a module of Python's library, for an import that failed.

    Args:
        folders: Folders of the import path that come before Python's library.
        error: Text of the error.

    Returns:
        ``"; …/queue.py has the name of …"`` for the files that the error speaks of; empty if it speaks of none.
    """
    every = "partially initialized module" in error  # it names the module that was in the middle of its import
    files = [
        path
        for folder in folders
        for path in sorted(Path(folder).glob("*.py"))
        if path.stem in sys.stdlib_module_names and (every or re.search(rf"\b{re.escape(path.stem)}\b", error))
    ]
    names = ", ".join(map(str, files))
    verb = "has" if len(files) == 1 else "have"
    return f"; {names} {verb} the name of a module of Python's library: rename it" if files else ""


def machine_fault(error: OSError) -> UserError | None:
    """Explain an error of the operating system in one line: what it refused, where, and the remedy.

    Returns:
        None if the program is at fault, for example by a wrong path; such an error needs its traceback.
    """
    if error.errno == errno.ENOENT and "temporary directory" in str(error.strerror):  # tempfile's, on a full disk too
        return UserError(f"{error.strerror}: make room in one of them, or name another folder in TMPDIR")
    named = isinstance(error.filename, str | os.PathLike)
    in_the_way = error.errno == errno.EEXIST and named and Path(error.filename).is_file()  # mkdir found a file
    remedy = _REMEDIES.get(errno.ENOTDIR if in_the_way else error.errno or 0)
    if remedy is None:
        return None
    where = f"{os.fspath(error.filename)!r}: " if named else ""
    return UserError(f"{where}{error.strerror}; {remedy}")
