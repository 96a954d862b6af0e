"""The lines of the user's own code on Python's stack."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch
import typing_extensions

from benchkit.errors import first_line

_MAX_LINES = 5
# Frames of these files are never the user's.
_NOT_USER_CODE = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parent) + os.sep,
    str(Path(contextlib.__file__)),
    inspect.getfile(typing_extensions.deprecated),  # wraps what torch deprecates; warnings.py from Python 3.13 on
    "<frozen ",
)
_INSTALLED = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_callers: set[str] = set()


def calls_user_code(file: str) -> None:
    """Declare that a module calls the user's code: the frames outside of its own are not the user's.

    Args:
        file: ``__file__`` of the module.
    """
    _callers.add(file)


def user_frames() -> tuple[tuple[CodeType, int], ...]:
    """Code and line number of the user's frames, innermost first, at most five.

    Frames of torch and of the tracer are left out. The stack ends at a module that declared :func:`calls_user_code`.
    """
    frames: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < _MAX_LINES:
        code = frame.f_code
        if code.co_filename in _callers:
            break
        if not code.co_filename.startswith(_NOT_USER_CODE):
            frames.append((code, frame.f_lineno))
        frame = frame.f_back
    return tuple(frames)


def raised(error: BaseException) -> str:
    """An exception as part of a sentence: its type, the first line of its message, and the user's line.

    That is the innermost line outside of installed packages and of Python's library if there is one, as there is not
    for the code of a package.
    """
    lines: list[tuple[CodeType, int]] = []
    step: TracebackType | None = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if code.co_filename in _callers:
            lines = []
        elif not code.co_filename.startswith(_NOT_USER_CODE):
            lines.append((code, step.tb_lineno))
        step = step.tb_next
    own = [line for line in lines if not line[0].co_filename.startswith(_INSTALLED)]
    innermost = stack_lines((own or lines)[-1:])
    return f"{first_line(error)}, at {innermost[0]}" if innermost else first_line(error)


def stack_lines(frames: Iterable[tuple[CodeType, int]]) -> tuple[str, ...]:
    """The lines of :func:`user_frames` as text: ``step.py:12 in loss``."""
    return tuple(f"{_place(code.co_filename)}:{line} in {code.co_name}" for code, line in frames)


@cache
def _place(file: str) -> str:
    path = Path(file)
    return f"{path.parent.name}/{path.name}".lstrip("/")
