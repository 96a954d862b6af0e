"""On which versions of torch a cause holds: recorded outcomes, as data beside the code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchkit.command.progress import working
from compile_bench.catalogue.cause import Cause
from compile_bench.catalogue.examine import Outcome, examine

_FOLDER = Path(__file__).parent / "outcomes"


def this_torch() -> str:
    """The version of the torch that runs, without its build."""
    return torch.__version__.split("+")[0]


def examine_all(causes: Iterable[Cause]) -> dict[str, Outcome]:
    """Run causes on this torch; one that fails outright counts as not happening."""
    outcomes = {}
    for cause in causes:
        with working(cause.name):
            try:
                outcomes[cause.name] = examine(cause)
            except Exception as error:  # a repro may need what an older torch does not have
                outcomes[cause.name] = Outcome(False, (), (), False, None, f"{type(error).__name__}: {error}"[:200])
    return outcomes


def write_outcomes(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Write outcomes as :func:`recorded` reads them."""
    entries = {name: asdict(outcome) for name, outcome in outcomes.items()}
    text = json.dumps({"torch": this_torch(), "outcomes": entries}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


@cache
def recorded() -> dict[str, dict[str, dict[str, Any]]]:
    """Recorded outcomes by version of torch, oldest first, and by cause."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in _FOLDER.glob("*.json")]
    documents.sort(key=lambda document: [int(part) for part in document["torch"].split(".")])
    return {document["torch"]: document["outcomes"] for document in documents}


def standing(name: str, version: str) -> str:
    """One word for a cause on a version of torch: ``holds``, ``does not happen``, ``fix fails`` or ``unknown``."""
    outcome = recorded().get(version, {}).get(name)
    if outcome is None:
        return "unknown"
    if not outcome["happens"]:
        return "does not happen"
    return "holds" if outcome["whole"] and outcome["equal"] is not False else "fix fails"
