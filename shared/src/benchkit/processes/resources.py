"""What this process may use of its machine: processors, memory, the user's cache folder.

A container or a batch system gives a process less than the machine has, and only the kernel's own files say so.
"""

from __future__ import annotations

import functools
import math
import os
import resource
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchkit.errors import UserError

_CACHE = "framework-internals"

# Control groups of versions 2 and 1: folder, how a line of /proc/self/cgroup begins, the files of the limit and of what
# is used, and what memory.stat calls pages of files that were not used for a while.
_MEMORY_GROUPS = (
    ("", "0::", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory:", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def processors(control_groups: Path = Path("/sys/fs/cgroup")) -> int:
    """How many threads of this process can run at a time: its processors, or less if a control group has a quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups(control_groups):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            allowed = min(allowed, math.ceil(int(quota) / int(period)))
    return max(1, allowed)


def available_memory(control_groups: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of main memory that this process can still take without another program losing its own.

    It is the least of what the kernel calls available, of what each control group leaves, and of the limits on the
    address space (``ulimit -v``) and on data (``ulimit -d``).

    Args:
        control_groups: Where the kernel shows the control groups.
        meminfo: The kernel's description of the machine's memory.
    """
    available = [1024 * _field(_text(meminfo), "MemAvailable:")]
    for folder, hierarchy, limit, used, unused in _MEMORY_GROUPS:
        for group in _control_groups(control_groups / folder, hierarchy):
            most, taken = _text(group / limit).strip(), _text(group / used).strip()
            if most.isdigit() and taken.isdigit():
                # Pages of files that were not used for a while count as used, and are free for the asking.
                available.append(int(most) - int(taken) + _field(_text(group / "memory.stat"), unused))
    pages = _text(Path("/proc/self/statm")).split() or ["0"] * 7
    for kind, column in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
        if (allowed := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            available.append(allowed - int(pages[column]) * resource.getpagesize())
    return max(0, min(available))


def _control_groups(root: Path, hierarchy: str = "0::") -> Iterator[Path]:
    """The control group of this process and those around it in a hierarchy, the innermost first."""
    lines = _text(Path("/proc/self/cgroup")).splitlines()
    name = next((line.partition(hierarchy)[2] for line in lines if hierarchy in line), None)
    if name is None:
        return
    group = root / name.strip("/")
    yield group
    while group != root and root in group.parents:
        group = group.parent
        yield group


def _text(path: Path) -> str:
    """What a file of the kernel's holds; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _field(text: str, name: str) -> int:
    """The number in the line of a kernel's table that begins with a name; 0 if there is none."""
    words = next((line.split() for line in text.splitlines() if line.startswith(name)), ["", "0"])
    return int(words[1])


def user_cache() -> Path:
    """The folder for what is worth keeping between runs, such as compiled libraries; it exists and can be written.

    ``FRAMEWORK_INTERNALS_BUILD_DIR`` names it. Otherwise it stands in ``XDG_CACHE_HOME``, if that is an absolute path
    (https://specifications.freedesktop.org/basedir-spec), else in ``~/.cache``. Where that cannot be written, a
    folder of this user's among the temporary ones takes its place, with a line on standard error.

    Raises:
        UserError: If the folder that the environment names cannot be written, or no temporary folder is this user's.
    """
    if named := os.environ.get("FRAMEWORK_INTERNALS_BUILD_DIR"):
        if (reason := _refusal(Path(named))) is not None:
            raise UserError(f"FRAMEWORK_INTERNALS_BUILD_DIR: cannot write into {named}: {reason}; name another folder")
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")  # noqa: PTH111 # which stays "~" for a user without a home, where Path raises
    usual = (Path(base) if Path(base).is_absolute() else Path(home, ".cache")) / _CACHE
    if (reason := _refusal(usual) if usual.is_absolute() else "there is no home folder") is None:
        return usual
    temporary = Path(tempfile.gettempdir(), f"{_CACHE}-{os.getuid()}")
    if (why := _refusal(temporary)) is not None:
        raise UserError(
            f"neither {usual} ({reason}) nor {temporary} ({why}) can be written; "
            "name a folder in FRAMEWORK_INTERNALS_BUILD_DIR"
        )
    _say_once(
        f"cannot write into {usual}: {reason}; {temporary} takes its place until it is removed "
        "(XDG_CACHE_HOME or FRAMEWORK_INTERNALS_BUILD_DIR names a lasting folder)"
    )
    return temporary


@functools.cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr)


def cannot_write(folder: Path, *, mode: int = 0o777) -> str | None:
    """Make a folder if there is none, and say why it cannot be written; None if it can.

    Args:
        folder: The folder.
        mode: Permissions of a new folder, less those that the process masks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _refusal(folder: Path) -> str | None:
    """Make a folder, and say why this user cannot keep programs in it; None if it can.

    Libraries are loaded from the folder, so that no other user may own it or write into it.
    """
    if (reason := cannot_write(folder, mode=0o700)) is not None:
        return reason
    if folder.parent != Path(tempfile.gettempdir()):
        return None
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        return "another user owns it or can write into it"
    return None
