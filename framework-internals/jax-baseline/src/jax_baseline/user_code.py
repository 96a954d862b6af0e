"""The user's functions: loaded by ``file.py:name``, blamed for what they raise, and the lines of their source."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchkit import UserError
from benchkit.command import user_file
from benchkit.errors import first_line

_SPECS = (find_spec(name) for name in ("torch", "jax", "numpy"))
_LIBRARIES = tuple(str(Path(file).parent) for file in (os.__file__, *(spec.origin for spec in _SPECS if spec)) if file)
_PACKAGE = str(Path(__file__).parent)
_HANDLERS = tuple(f"{_PACKAGE}{os.sep}parity{os.sep}{room}" for room in ("rounding", "location"))  # in the user's code


def load_function(reference: str, *, what: str) -> Callable[..., Any]:
    """Import ``path/to/file.py:name``.

    The name may be ``object.method``; ``what`` is its purpose, for the error message.

    Raises:
        UserError: If the file or the name does not exist, or cannot be imported or called.
    """
    path, separator, name = reference.rpartition(":")
    if not separator or not path.endswith(".py") or not name:
        raise UserError(f"{what} must be given as file.py:function, got {reference!r}")
    if not Path(path).is_file():
        raise UserError(f"{what}: there is no file {path}")
    try:
        module = user_file.load_file(Path(path), "_jax_baseline_user_")
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    function = user_file.find(module, name)
    if not callable(function):
        public = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise UserError(f"{what}: {path} has no function {name!r}; it has {', '.join(public) or 'none'}")
    return function


class FunctionRaisedError(UserError):
    """A function of the user raised its cause."""


@contextmanager
def errors_of(reference: str, remedy: str = "") -> Iterator[None]:
    """Turn an exception in the user's function into one line that names the function, and ends with the remedy.

    Raises:
        FunctionRaisedError: In place of any exception but a :class:`UserError`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = first_line(error)[:300]
        # A tracer of JAX in the message means that the torch function received JAX arrays.
        swapped = "; name torch's function first and JAX's second" if "Tracer" in text else ""
        raise FunctionRaisedError(f"{reference} raised {text}{swapped}{remedy}") from error


def require_32_bits(array: NDArray, what: str) -> None:
    """Check that JAX keeps whole numbers as they are.

    Raises:
        UserError: If one is beyond the 32 bits that JAX keeps by default.
    """
    if array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(f"{array.dtype.kind}4")
        if outside := [value for value in (array.min(), array.max()) if not limits.min <= value <= limits.max]:
            raise UserError(
                f"{what} is {array.dtype} and contains {outside[0]}; JAX converts it to 32 bits: use smaller numbers, "
                "such as ids % vocabulary"
            )


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
