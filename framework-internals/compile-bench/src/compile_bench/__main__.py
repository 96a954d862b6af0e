"""``python -m compile_bench``: the command line without an installed script."""

from compile_bench.cli import app

app(prog_name="compile-bench")
