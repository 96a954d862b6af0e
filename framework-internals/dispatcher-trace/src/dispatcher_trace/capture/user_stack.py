"""The lines of the user's own code on Python's stack."""

from __future__ import annotations

import contextlib
import copy
import dis
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
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
    str(Path(copy.__file__)),  # copy.deepcopy is what the user calls
    inspect.getfile(typing_extensions.deprecated),  # wraps what torch deprecates; warnings.py from Python 3.13 on
    "<frozen ",
)
_INSTALLED = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_TRACER = str(Path(__file__).parent) + os.sep
_callers: set[str] = set()

Frame = tuple[CodeType, int]
"""Code, and offset of the instruction that is running. Its line is looked up when the text is made."""


def calls_user_code(file: str) -> None:
    """Declare that a module calls the user's code: the frames outside of its own are not the user's.

    Args:
        file: ``__file__`` of the module.
    """
    _callers.add(file)


def user_frames(above: set[str]) -> tuple[tuple[Frame, ...], bool]:
    """The user's frames, innermost first, at most five; and whether the innermost of all is one of them.

    Frames of torch and of the tracer are left out. The stack ends at a module that declared :func:`calls_user_code`.

    Args:
        above: Gets the qualified names of the ``__torch_function__`` that the stack passes through.
    """
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_TRACER):
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    direct = file in _callers or _users(file)
    while frame is not None and len(frames) < _MAX_LINES:
        code = frame.f_code
        file = code.co_filename
        if file in _callers:
            break
        if code.co_name == "__torch_function__":
            above.add(code.co_qualname)
        if _users(file):
            frames.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(frames), direct


@cache
def _users(file: str) -> bool:
    """Whether a file is the user's code."""
    return not file.startswith(_NOT_USER_CODE)


@lru_cache(maxsize=4096)
def called_name(code: CodeType, offset: int) -> str:
    """The last name of what a frame calls: ``contiguous`` in ``x.t().contiguous()``; the operation if it is no call.

    Empty if the code has no positions (``python -X no_debug_ranges``).

    Args:
        code: The code of the frame.
        offset: Offset of the instruction that runs.
    """
    # A call of a Python function leaves the offset behind the instruction's inline caches.
    *before, instruction = [step for step in dis.get_instructions(code) if step.offset <= max(offset, 0)]
    if not instruction.opname.startswith("CALL"):
        return instruction.opname
    called = _span(instruction)
    if called is None:
        return ""
    # What is called starts where the call starts; the last part of x.t().contiguous is loaded last.
    for loaded in reversed(before):
        span = _span(loaded)
        if span is not None and span[0] == called[0] and span[1] < called[1] and loaded.opname.startswith("LOAD_"):
            return str(loaded.argval) if isinstance(loaded.argval, str) else ""
    return ""


def _span(instruction: dis.Instruction) -> tuple[tuple[int, int], tuple[int, int]] | None:
    at = instruction.positions
    if at is None or at.lineno is None or at.end_lineno is None or at.col_offset is None or at.end_col_offset is None:
        return None
    return (at.lineno, at.col_offset), (at.end_lineno, at.end_col_offset)


def raised(error: BaseException, text: Callable[[str], str] = str) -> str:
    """An exception as part of a sentence: its type, the first line of its message, and the user's line.

    That is the innermost line outside of installed packages and of Python's library if there is one, as there is not
    for the code of a package.

    Args:
        error: The exception.
        text: What is said of its type and message; all by default.
    """
    lines: list[Frame] = []
    step: TracebackType | None = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if code.co_filename in _callers:
            lines = []
        elif not code.co_filename.startswith(_NOT_USER_CODE):
            lines.append((code, step.tb_lasti))
        step = step.tb_next
    own = [line for line in lines if not line[0].co_filename.startswith(_INSTALLED)]
    innermost = stack_lines((own or lines)[-1:])
    message = text(first_line(error))
    return f"{message}, at {innermost[0]}" if innermost else message


def stack_lines(frames: Iterable[Frame]) -> tuple[str, ...]:
    """The lines of :func:`user_frames` as text: ``step.py:12 in loss``."""
    return tuple(f"{_short_path(code.co_filename)}:{_line(code, offset)} in {code.co_name}" for code, offset in frames)


def _line(code: CodeType, offset: int) -> int | None:
    """The line of an instruction, as ``f_lineno`` has it; before the first instruction, the first line."""
    if offset < 0:
        return code.co_firstlineno
    return next((line for start, stop, line in code.co_lines() if start <= offset < stop), None)


@cache
def _short_path(file: str) -> str:
    path = Path(file)
    short = f"{path.parent.name}/{path.name}".lstrip("/")
    return short.encode("utf-8", "backslashreplace").decode()  # a name that is no text can't be printed
