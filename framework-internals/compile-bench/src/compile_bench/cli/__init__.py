"""The command ``compile-bench``: its sub-commands are registered here."""

from __future__ import annotations

import typer

from compile_bench.cli.cataloguing import catalogue
from compile_bench.cli.checking import cache_diff, cache_key, check, lock, upgrade
from compile_bench.cli.measuring import run, shapes, zoo
from compile_bench.cli.options import leaving
from compile_bench.cli.triaging import triage
from compile_bench.cli.tuning import tune

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="What torch.compile costs, what it gains and what breaks the graph, for any model.",
)
for command in (run, triage, tune, catalogue, check, lock, cache_key, cache_diff, upgrade, shapes, zoo):
    app.command()(leaving(command))
