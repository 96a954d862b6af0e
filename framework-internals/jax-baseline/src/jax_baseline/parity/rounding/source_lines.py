"""The line of the user's code that runs, or that an operation of JAX comes from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import torch

_LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (os, torch, jax, np) if module.__file__)
_PACKAGE = str(Path(__file__).parents[2])
_HANDLERS = tuple(str(Path(__file__).parents[1] / room) for room in ("rounding", "location"))  # run inside user's code


def running_line() -> str:
    """The innermost line of the user's code that this package runs; empty if a library runs without any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and not file.startswith(_HANDLERS):
            return ""
        if _is_users(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_of(eqn: Any) -> str:
    """The user's line that an operation of JAX was traced from; empty if it is not known."""
    trace = eqn.source_info.traceback
    for frame in trace.frames if trace is not None else ():
        if _is_users(frame.file_name):
            return f"{Path(frame.file_name).name}:{frame.line_num}"
    return ""


def _is_users(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, _PACKAGE)) and "site-packages" not in file
