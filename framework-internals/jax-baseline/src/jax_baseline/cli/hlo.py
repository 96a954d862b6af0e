"""``hlo``: what XLA made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from benchkit import UserError, numbers
from benchkit.report import markdown_table
from jax_baseline.cli.options import DTYPES, Preset, user_errors
from torch_baseline.config import Precision


def hlo(
    dump: Annotated[
        Path | None, typer.Argument(help="text of an optimised module, yours [default: our step's]")
    ] = None,
    preset: Preset = "tiny",
    batch_size: Annotated[int, typer.Option(min=1, help="sequences a step")] = 16,
    dtype: Annotated[str, typer.Option(help=DTYPES)] = "float32",
    attention: Annotated[str, typer.Option(help="xla or cudnn")] = "xla",
    save: Annotated[Path | None, typer.Option(help="write the module's text here")] = None,
) -> None:
    """Count what XLA made: kernels by kind and by part of the model, donated buffers, FLOPs."""
    from jax_baseline.hlo import summarise

    with user_errors():
        if dump is not None:
            try:
                text = dump.read_text()
            except OSError as error:
                raise UserError(f"cannot read {dump}: {error.strerror}") from error
            notes = ""
        else:
            text, notes = _compile_step(preset, batch_size, dtype, attention)
        summary = summarise(text)
    if save is not None:
        save.write_text(text)
    print(
        f"{summary.kernels} kernels, {summary.dots} products; "
        f"{summary.donated} of {summary.arguments} arguments donated{notes}"
    )
    print(markdown_table(["kind of kernel", "number"], list(summary.kinds.items())))
    rows = [(group.region or "(no scope)", group.phase, group.kernels, group.dots) for group in summary.regions]
    print(markdown_table(["part", "phase", "kernels", "products"], rows, left=2))


def _compile_step(preset: str, batch_size: int, dtype: str, attention: str) -> tuple[str, str]:
    """The step's optimised HLO, and what XLA says of its cost, in words."""
    import jax
    import jax.numpy as jnp

    from jax_baseline.compilation import compile_step
    from jax_baseline.engines import bench_config
    from jax_baseline.model import ATTENTIONS
    from jax_baseline.train import initial_state, make_train_step

    if attention not in ATTENTIONS:
        raise UserError(f"--attention takes {' or '.join(ATTENTIONS)}, got {attention!r}")
    model, training = bench_config(preset, batch_size=batch_size, dtype=cast(Precision, dtype))
    with jax.enable_x64(dtype == "float64"):
        state = initial_state(model, training)
        tokens_BT = jax.ShapeDtypeStruct((batch_size, model.block_size), jnp.int32)
        step = make_train_step(model, training, attention=ATTENTIONS[attention])
        compiled = compile_step(step, state, tokens_BT, tokens_BT)
    notes = f"; compiled in {numbers.with_unit(compiled.compile_seconds, 's')}"
    if compiled.flops is not None:
        notes += f"; {numbers.with_unit(compiled.flops, 'FLOP')} by XLA's count"
    return compiled.text, notes


COMMANDS = (hlo,)
