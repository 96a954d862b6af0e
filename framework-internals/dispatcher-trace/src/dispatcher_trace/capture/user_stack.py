"""The lines of the user's own code on Python's stack."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from pathlib import Path
from types import FrameType

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


def user_stack() -> tuple[str, ...]:
    """``step.py:12 in loss``, innermost line first, at most five lines.

    Frames of torch and of the tracer are left out. The stack ends at a module that declared :func:`calls_user_code`.
    """
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < _MAX_LINES:
        code = frame.f_code
        if lines and code.co_filename in _callers:
            break
        if not code.co_filename.startswith(_NOT_USER_CODE):
            path = Path(code.co_filename)
            lines.append(f"{path.parent.name}/{path.name}:{frame.f_lineno} in {code.co_name}".lstrip("/"))
        frame = frame.f_back
    return tuple(lines)
