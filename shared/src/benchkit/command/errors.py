"""How every command line of this repository ends on an error that the user can mend."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchkit.errors import UserError, machine_fault

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Inside, what the user can mend ends the process with one line and status 2; what the machine refuses, too.

    Args:
        program: opens the line.

    Raises:
        SystemExit: with status 2.
    """
    try:
        yield
    except UserError as error:
        line = str(error)
    except OSError as error:
        if (fault := machine_fault(error)) is None:
            raise
        line = str(fault)
    else:
        return
    # A name that is shown must not steer the terminal.
    print(f"{program}: {_CONTROL.sub(lambda found: repr(found[0])[1:-1], line)}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # it is standard output that cannot be written: Python would try once more when it exits
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 # until then
    raise SystemExit(2)
