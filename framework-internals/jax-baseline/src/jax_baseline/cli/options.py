"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from benchkit import UserError

DTYPES = "float64, float32 or bfloat16"

Preset = Annotated[str, typer.Option(help="tiny (CPU) or gpt2-124m (GPU)")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda")]
BatchSize = Annotated[int, typer.Option(min=1, help="number of sequences")]
Dtype = Annotated[str, typer.Option(help=DTYPES)]
AttentionOption = Annotated[str, typer.Option(help="attention of the JAX model: xla or cudnn")]


def refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Refuse options that were given on the command line and would change nothing.

    Raises:
        UserError: If there is one; it ends with ``why``.
    """
    sources = {name: context.get_parameter_source(name) for name in names}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    options = [option.opts[0] for option in context.command.params if option.name in given]
    if options:
        raise UserError(f"{', '.join(options)} would change nothing here: {why}")


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a ValueError about an option into a UserError: one line, exit status 2."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error
