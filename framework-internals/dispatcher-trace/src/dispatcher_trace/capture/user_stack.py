"""The lines of the user's own code on Python's stack."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch
import typing_extensions

_MAX_LINES = 5
# Frames of these files are never the user's.
_NOT_USER_CODE = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parent) + os.sep,
    str(Path(contextlib.__file__)),
    inspect.getfile(typing_extensions.deprecated),  # wraps what torch deprecates; warnings.py from Python 3.13 on
    "<frozen ",
)
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
        if frames and code.co_filename in _callers:
            break
        if not code.co_filename.startswith(_NOT_USER_CODE):
            frames.append((code, frame.f_lineno))
        frame = frame.f_back
    return tuple(frames)


def stack_lines(frames: Iterable[tuple[CodeType, int]]) -> tuple[str, ...]:
    """The lines of :func:`user_frames` as text: ``step.py:12 in loss``."""
    return tuple(f"{_place(code.co_filename)}:{line} in {code.co_name}" for code, line in frames)


@cache
def _place(file: str) -> str:
    path = Path(file)
    return f"{path.parent.name}/{path.name}".lstrip("/")
