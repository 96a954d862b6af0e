"""How every command line of this repository reports an error that the user can fix."""

from __future__ import annotations

import _thread
import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchkit.errors import UserError, machine_fault

# Seconds after which an interrupt is sent again that a callback had swallowed: the callback has returned by then.
_AGAIN_SECONDS = 0.05

_INTERRUPTED = 130  # the exit status of a command that was interrupted, as shells have it

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return a text whose control characters are shown, so that a name cannot steer the terminal."""
    return _CONTROL.sub(lambda character: repr(character[0])[1:-1], text)


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Turn errors that the user can fix, and those of the operating system, into one line and exit status 2.

    An interrupt inside is never lost, see :func:`_interrupts_arrive`, and its exit status neither, see
    :func:`_end_before_jax_does`. A character that the terminal's encoding lacks is printed as an escape.

    Raises:
        SystemExit: with status 2.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error is
    try:
        with _interrupts_arrive():
            yield
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:
            _end_before_jax_does()
        raise
    except UserError as error:
        line = str(error)
    except OSError as error:
        if (fault := machine_fault(error)) is None:
            raise
        line = str(fault)
    else:
        return
    print(f"{program}: {printable(line)}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # standard output itself cannot be written, and Python would try once more when it exits
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 # open until then
    raise SystemExit(2)


def _end_before_jax_does() -> None:
    """End an interrupted process that has JAX, without what Python does at exit.

    JAX compiles in threads of its own, which an interrupt does not end, and at exit destroys the devices that they use:
    the process would end by SIGSEGV (jaxlib 0.11). Children end when they lose their parent.
    """
    if "jaxlib" in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(_INTERRUPTED)


@contextmanager
def _interrupts_arrive() -> Iterator[None]:
    """Send an interrupt again if it was raised where Python drops exceptions: in a callback of the garbage collector,
    in a destructor. JAX has such a callback, and a run that was interrupted there would go on.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Timer(_AGAIN_SECONDS, _thread.interrupt_main).start()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def with_tools(distribution: str) -> Iterator[None]:
    """Turn the lack of a package that only command lines need into a line that says how to install it.

    Args:
        distribution: Name of the distribution whose extra ``tools`` has the package.

    Raises:
        UserError: If an import within the block finds no package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(
            f"the command line needs the package {error.name}, which is not installed: "
            f"pip install '{distribution}[tools]'"
        ) from error
