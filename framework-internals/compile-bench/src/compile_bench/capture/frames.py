"""Frames of call stacks: which are user code, and how to read them from a printed traceback."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Dynamo names the function that runs after a break torch_dynamo_resume_in_FUNCTION_at_LINE.
RESUMED = "torch_dynamo_resume_in_"
_TRACEBACK_LINE = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)'
    r'(?:\n(?!\s*File ")(?P<indent>\s+)(?P<source>[^\n]*)(?:\n(?P<marks>[ ~^]*[~^])(?=\n|\Z))?)?',
    re.MULTILINE,
)


@dataclass(frozen=True)
class Frame:
    """A line of a call stack."""

    file: str  # file name, as Python gives it
    line: int  # number of the line, counted from 1
    function: str  # function that has the line
    source: str = ""  # text of the line; empty if PyTorch could not read it

    @property
    def place(self) -> str:
        """``file.py:LINE``."""
        return f"{self.file}:{self.line}"


class UserCodeFilter:
    """Tells user code from the code of PyTorch, of libraries, and of the launcher that calls the model.

    ``torch``, ``library`` and ``launcher`` are folders. The model's frames come after the launcher's last frame; its
    files named in ``models`` are models, and so count as user code.
    """

    def __init__(
        self, torch: str = "", library: Sequence[str] = (), launcher: str = "", models: Sequence[str] = ()
    ) -> None:
        self._torch = _folder(torch)
        self._library = tuple(_folder(folder) for folder in library if folder)
        self._launcher = _folder(launcher)
        self._models = frozenset(models)

    def is_torch(self, file: str) -> bool:
        """Whether the file is part of PyTorch."""
        return bool(self._torch) and file.startswith(self._torch)

    def is_launcher(self, file: str) -> bool:
        """Whether the file is part of the launcher."""
        return bool(self._launcher) and file.startswith(self._launcher) and file.rpartition("/")[2] not in self._models

    def is_user(self, file: str) -> bool:
        """Whether the file is the user's: a real file outside PyTorch, libraries and the launcher."""
        generated = file.startswith("<")
        return not (generated or self.is_torch(file) or file.startswith(self._library) or self.is_launcher(file))

    def package(self, file: str) -> str:
        """The installed package, or module of Python's library, that a file belongs to; empty for other files.

        Dynamo's own lines, around the call of a compiled module, are no package's: what makes a guard there are the
        arguments of the call.
        """
        folders = [folder for folder in (self._torch, *self._library) if folder and file.startswith(folder)]
        if not folders:
            return ""
        if self.is_torch(file):
            return "" if file.startswith(f"{self._torch}_dynamo/") else "torch"
        within = file.removeprefix(max(folders, key=len))  # site-packages lies inside Python's library
        return within.partition("/")[0].removesuffix(".py")

    def model_frames(self, stack: Sequence[Frame]) -> tuple[Frame, ...]:
        """The frames of the model: without those of PyTorch, and without the launcher's and its callers'."""
        last = max((index for index, frame in enumerate(stack) if self.is_launcher(frame.file)), default=-1)
        return tuple(frame for frame in stack[last + 1 :] if not self.is_torch(frame.file))

    def innermost(self, stack: Sequence[Frame]) -> Frame | None:
        """The innermost frame of the user in the model, or the innermost of a library if none is the user's."""
        frames = self.model_frames(stack)
        of_user = (frame for frame in reversed(frames) if self.is_user(frame.file))
        return next(of_user, frames[-1] if frames else None)


def _folder(path: str) -> str:
    # The separator at the end keeps "…/launcher_models/" out of "…/launcher".
    return path.rstrip("/") + "/" if path else ""


@cache
def has_packages(folder: Path) -> bool:
    """Whether packages are installed in a folder: site-packages, Debian's dist-packages, or pip's ``--target``."""
    return folder.name in ("site-packages", "dist-packages") or next(folder.glob("*.dist-info"), None) is not None


def plain_function(name: str) -> str:
    """The name of a function in the source, without what Dynamo adds where it resumes after a break."""
    return name.removeprefix(RESUMED).rpartition("_at_")[0] if name.startswith(RESUMED) else name


def frames_in(text: str) -> tuple[Frame, ...]:
    """The frames of a traceback in a text, outermost first; empty if the text has no traceback."""
    return tuple(
        Frame(m["file"], int(m["line"]), m["function"].strip(), (m["source"] or "").strip())
        for m in _TRACEBACK_LINE.finditer(text)
    )


def columns_in(text: str, place: Frame) -> tuple[int, int] | None:
    """Begin and end of the part of a line that a traceback marks.

    The columns count from the end of the indentation. They span the whole line if the traceback marks nothing in it.
    None if the traceback does not show the line's text.
    """
    shown = [m for m in _TRACEBACK_LINE.finditer(text) if m["file"] == place.file and int(m["line"]) == place.line]
    if not shown or not shown[-1]["source"]:
        return None
    innermost = shown[-1]
    marks = innermost["marks"]
    if not marks:
        return 0, len(innermost["source"].rstrip())
    indent = len(innermost["indent"].rpartition("\n")[2])
    return len(marks) - len(marks.lstrip()) - indent, len(marks) - indent
