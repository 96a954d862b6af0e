"""Write framework-internals/versions/report.md from what scripts/versions.sh left of each combination.

./scripts/python.sh scripts/version_matrix.py                 add what was tried to results.json
./scripts/python.sh scripts/version_matrix.py --render-only   render the report from results.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchkit.command import one_line_errors
from benchkit.environment import capture
from benchkit.report import write
from benchkit.results import dump, only_writer, write_text_atomically
from tested_versions.records import merged
from tested_versions.report import declare

ROOT = Path(__file__).resolve().parents[1]
DIRECTORY = ROOT / "framework-internals" / "versions"


def main(
    tried: Annotated[Path, typer.Option(help="Folder of what nox left.")] = ROOT / "build" / "versions",
    out: Annotated[Path, typer.Option(help="Folder of results.json and report.md.")] = DIRECTORY,
    render_only: Annotated[bool, typer.Option("--render-only", help="Render the report from results.json.")] = False,
) -> None:
    """Write the table of what passed with which versions, and why the others were not tried."""
    with one_line_errors("version_matrix"):
        if not render_only:
            with only_writer(out):
                write_text_atomically(out / "results.json", dump(merged(out, tried, capture("cpu", root=ROOT))))
        print(write(out, declare), flush=True)


if __name__ == "__main__":
    typer.run(main)
