"""The command ``catalogue``. What imports torch is imported when the command runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from benchkit import UserError
from benchkit.command.progress import working
from compile_bench.capture.text import plural
from compile_bench.catalogue import CAUSES, Cause


def catalogue(
    name: Annotated[str | None, typer.Argument(help="Name of a cause. Without it, all are listed.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run it on this torch: does it happen, and does the fix remove it?")
    ] = False,
    record: Annotated[Path | None, typer.Option(help="Run and add the outcomes of this torch to a JSON file.")] = None,
    render: Annotated[
        Path | None, typer.Option(help="Write INDEX.md, CATALOGUE.md and CATALOGUE.html to a folder.")
    ] = None,
) -> int:
    """List the causes of breaks, recompilations and silent eager execution; show one; run them."""
    from compile_bench.catalogue.page import describe, listing, write_page

    if name is not None and name not in CAUSES:
        near = [known for known in CAUSES if name in known or known in name] or get_close_matches(name, CAUSES)
        like = f"; like it: {', '.join(near)}" if near else ""
        raise UserError(f"no cause {name!r} in the catalogue{like}; compile-bench catalogue lists them all")
    if render is not None:
        write_page(render)
        return 0
    chosen = list(CAUSES.values()) if name is None else [CAUSES[name]]
    if record is not None or check:
        return _run(chosen, record)
    print(listing() if name is None else describe(CAUSES[name]))
    return 0


def _run(chosen: Sequence[Cause], record: Path | None) -> int:
    from compile_bench.catalogue.versions import examine_all, write_outcomes

    with working("running the catalogue"):
        outcomes = examine_all(chosen)
    if record is not None:
        write_outcomes(record, outcomes)
    wrong = {name: outcome for name, outcome in outcomes.items() if not outcome.as_stated}
    for name, outcome in wrong.items():
        print(
            f"{name}: {outcome.error or 'not as stated'}; seen: {'; '.join(outcome.seen) or 'nothing'}", file=sys.stderr
        )
    print(f"{len(outcomes) - len(wrong)} of {plural(len(outcomes), 'cause')} as stated on this torch")
    return 1 if wrong else 0
