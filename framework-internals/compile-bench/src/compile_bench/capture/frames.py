"""Lines of call stacks: whose they are, and as a printed traceback has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# Dynamo names what runs after a break torch_dynamo_resume_in_FUNCTION_at_LINE.
RESUMED = "torch_dynamo_resume_in_"
_TRACEBACK_LINE = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)'
    r'(?:\n(?!\s*File ")(?P<indent>\s+)(?P<source>[^\n]*)(?:\n(?P<marks>[ ~^]*[~^])(?=\n|\Z))?)?',
    re.MULTILINE,
)


@dataclass(frozen=True)
class Frame:
    """A line of a call stack.

    Attributes:
        file: as Python names it.
        line: in it, counted from 1.
        function: that the line is in.
        source: the line's text; empty where PyTorch could not read it.
    """

    file: str
    line: int
    function: str
    source: str = ""

    @property
    def place(self) -> str:
        """``file.py:LINE``."""
        return f"{self.file}:{self.line}"


class UserCodeFilter:
    """Whose code a file is.

    Args:
        torch: folder of the torch package.
        library: folders of Python's own and of installed packages.
        launcher: folder of the code that calls the model: frames up to its last one are not the model's.
        launched: names of files in ``launcher`` that are models all the same.
    """

    def __init__(
        self, torch: str = "", library: Sequence[str] = (), launcher: str = "", launched: Sequence[str] = ()
    ) -> None:
        self._torch = _folder(torch)
        self._library = tuple(_folder(each) for each in library if each)
        self._launcher = _folder(launcher)
        self._launched = frozenset(launched)

    def of_torch(self, file: str) -> bool:
        """Whether PyTorch brings the file along."""
        return bool(self._torch) and file.startswith(self._torch)

    def of_user(self, file: str) -> bool:
        """Whether the file is neither PyTorch's nor Python's nor an installed package's."""
        generated = file.startswith("<")
        return not (generated or self.of_torch(file) or file.startswith(self._library) or self.launches(file))

    def inside(self, stack: Sequence[Frame]) -> tuple[Frame, ...]:
        """The frames of the model: without what calls it, and without PyTorch's."""
        last = max((index for index, frame in enumerate(stack) if self.launches(frame.file)), default=-1)
        return tuple(frame for frame in stack[last + 1 :] if not self.of_torch(frame.file))

    def innermost(self, stack: Sequence[Frame]) -> Frame | None:
        """The line that a reader can change: the innermost of the user's, or of a library where none is the user's."""
        own = self.inside(stack)
        return next((frame for frame in reversed(own) if self.of_user(frame.file)), own[-1] if own else None)

    def launches(self, file: str) -> bool:
        """Whether the file is of what calls the model."""
        # The separator at the end of the folder keeps "…/launcher_models/" out.
        named = file.rpartition("/")[2]
        return bool(self._launcher) and file.startswith(self._launcher) and named not in self._launched


def _folder(path: str) -> str:
    return path.rstrip("/") + "/" if path else ""


def plain_function(name: str) -> str:
    """A function's own name, also where Dynamo names the part of it that goes on behind a break."""
    return name.removeprefix(RESUMED).rpartition("_at_")[0] if name.startswith(RESUMED) else name


def frames_in(text: str) -> tuple[Frame, ...]:
    """The frames of a printed traceback, outermost first; none where there is none in the text."""
    return tuple(
        Frame(m["file"], int(m["line"]), m["function"].strip(), (m["source"] or "").strip())
        for m in _TRACEBACK_LINE.finditer(text)
    )


def columns_in(text: str, place: Frame) -> tuple[int, int] | None:
    """What a traceback marks in a place's line, the innermost time that the line is in it: all of it where nothing."""
    found = [m for m in _TRACEBACK_LINE.finditer(text) if m["file"] == place.file and int(m["line"]) == place.line]
    if not found or not found[-1]["source"]:
        return None
    if not found[-1]["marks"]:
        return 0, len(found[-1]["source"].rstrip())
    marks, indent = found[-1]["marks"], len(found[-1]["indent"].rpartition("\n")[2])
    return len(marks) - len(marks.lstrip()) - indent, len(marks) - indent
