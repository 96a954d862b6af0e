"""The command line ``jax-baseline``. Each group of commands is a module of this folder."""

from __future__ import annotations

import typer

from benchkit.command import one_line_errors
from jax_baseline.cli import bench, diff, hlo, training

app = typer.Typer(
    help="The baseline's training loop in JAX, compared step by step.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (*training.COMMANDS, bench.bench, *hlo.COMMANDS, diff.diff):
    app.command()(command)


def main() -> None:
    """Run the command line. An error that the user can fix is one line on standard error and exit status 2."""
    with one_line_errors("jax-baseline"):
        app()
