"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterator
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


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a ValueError about an option into a UserError: one line, exit status 2."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error
