"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

import typer

from benchkit import UserError
from torch_baseline.config import GPTConfig

DTYPES = "float64, float32 or bfloat16"

Preset = Annotated[str, typer.Option(help="tiny (CPU) or gpt2-124m (GPU)")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda")]
BatchSize = Annotated[int, typer.Option(min=1, help="number of sequences")]
Layers = Annotated[int | None, typer.Option(min=1, help="number of blocks [default: the preset's]")]
Dtype = Annotated[str, typer.Option(help=DTYPES)]
AttentionOption = Annotated[str, typer.Option(help="attention of the JAX model: xla or cudnn")]
Seed = Annotated[int, typer.Option(min=0, help="seed of weights and batches")]


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a ValueError about an option into a UserError: one line, exit status 2."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def with_layers(preset: str, layers: int | None) -> GPTConfig:
    """Return the shape of a preset, with another number of blocks if one is given."""
    model = GPTConfig.preset(preset)
    return replace(model, n_layer=layers) if layers else model
