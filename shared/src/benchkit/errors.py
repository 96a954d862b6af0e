"""The one exception that a command line turns into one line, and what the machine refuses in the same words."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class UserError(Exception):
    """Something the user can mend: the message says what was expected, what was received and what to do.

    A command line prints it on one line and exits with status 2; a library caller catches it like any other.
    """


_REMEDIES = {
    errno.ENOSPC: "make room there, or name a folder on another disk",
    errno.EDQUOT: "make room within your quota, or name a folder on another disk",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or name a folder on another disk",
    errno.EROFS: "name a folder on a file system that can be written",
    errno.EACCES: "give yourself the right to it, or name another folder",
    errno.EPERM: "give yourself the right to it, or name another folder",
    errno.ENOTDIR: "remove the file that stands where a folder should be, or name another folder",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "end something that keeps files open, or raise the system's limit on open files",
    errno.ENOMEM: "end something that uses memory, or take a machine with more",
    errno.EAGAIN: "end some processes, or raise the limit on them (ulimit -u)",
    errno.EIO: "look after the disk: it does not do what it is told",
}


def first_line(error: BaseException) -> str:
    """An exception as part of a sentence: its type and the first line of its message, without a full stop."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line.rstrip('.')}" if line else type(error).__name__


def machine_fault(error: OSError) -> UserError | None:
    """What the machine refused, where, and the remedy, in one line.

    Args:
        error: that a system call ended with.

    Returns:
        None where the error is not the machine's: a path that a program got wrong deserves its traceback.
    """
    if error.errno == errno.ENOENT and "temporary directory" in str(error.strerror):  # tempfile's, on a full disk too
        return UserError(f"{error.strerror}: make room in one of them, or name another folder in TMPDIR")
    named = isinstance(error.filename, str | os.PathLike)
    in_the_way = error.errno == errno.EEXIST and named and Path(error.filename).is_file()  # where mkdir was to make one
    remedy = _REMEDIES.get(errno.ENOTDIR if in_the_way else error.errno or 0)
    if remedy is None:
        return None
    where = f"{os.fspath(error.filename)!r}: " if named else ""
    return UserError(f"{where}{error.strerror}; {remedy}")
