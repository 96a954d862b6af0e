"""Test this repository with other versions of Python, torch and jax. Writes framework-internals/versions/report.md.

./scripts/python.sh scripts/version_matrix.py                              every combination this machine can install
./scripts/python.sh scripts/version_matrix.py --python 3.11 --torch 2.13   only these (options may be repeated)
./scripts/python.sh scripts/version_matrix.py --render-only                render the report from results.json

Each combination is kept as soon as it is done, with its commit. A combination that was tried at this commit is not
tried again, so an interrupted run continues. Combinations that are not asked for stay in the report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchkit import UserError
from benchkit.command import one_line_errors
from benchkit.environment import capture
from benchkit.report import write
from benchkit.run import only_writer
from tested_versions.machine import ThisMachine
from tested_versions.matrix import run
from tested_versions.plan import JAXES, PYTHONS, TORCHES, combinations
from tested_versions.report import REPORT

ROOT = Path(__file__).resolve().parents[1]
DIRECTORY = ROOT / "framework-internals" / "versions"


def chosen(option: str, given: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the chosen versions of one axis.

    Raises:
        UserError: If a version is not part of the matrix.
    """
    if unknown := [one for one in given or () if one not in known]:
        raise UserError(f"{option} takes one of {', '.join(known)}; got {', '.join(unknown)}")
    return tuple(one for one in known if not given or one in given)


def main(
    python: Annotated[
        list[str] | None, typer.Option(help="A version such as 3.12; may be repeated [default: all]")
    ] = None,
    torch: Annotated[
        list[str] | None, typer.Option(help="A version such as 2.13; may be repeated [default: all]")
    ] = None,
    jax: Annotated[
        list[str] | None, typer.Option(help="A version such as 0.10; may be repeated [default: all]")
    ] = None,
    cuda: Annotated[
        bool, typer.Option("--cuda", help="Allow builds of torch that download gigabytes of CUDA libraries.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Repeat combinations that were tried at this commit.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the virtual environments in --cache.")] = False,
    cache: Annotated[Path, typer.Option(help="Folder for the virtual environments.")] = ROOT / "build" / "versions",
    out: Annotated[Path, typer.Option(help="Folder of results.json and report.md.")] = DIRECTORY,
    render_only: Annotated[
        bool, typer.Option("--render-only", help="Render the report from results.json; test nothing.")
    ] = False,
) -> None:
    """Try combinations of versions, and write a table of what passed and why the others were not tried."""
    with one_line_errors("version_matrix"):
        if not render_only:
            wanted = combinations(
                chosen("--python", python, PYTHONS), chosen("--torch", torch, TORCHES), chosen("--jax", jax, JAXES)
            )
            machine = ThisMachine(ROOT, cache.resolve(), cuda=cuda, keep=keep)
            with only_writer(out):
                run(machine, wanted, out, capture("cpu", root=ROOT), fresh=fresh)
        print(write(out, REPORT), flush=True)


if __name__ == "__main__":
    typer.run(main)
