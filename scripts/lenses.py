"""The lenses of this repository: each is a folder whose ``pyproject.toml`` declares the entry point of its lens.

The manifests are read from the tree, not from installed metadata, since everything runs without an installation too.
"""

from __future__ import annotations

import importlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchkit.run import Lens

HOUSE = Path(__file__).resolve().parents[1] / "framework-internals"
GROUP = "framework_internals.lenses"


@dataclass(frozen=True)
class Manifest:
    """What a lens declares.

    Attributes:
        name: Name of the lens and of its folder.
        entry_point: Where the function is that builds the lens from its folder: ``"package.lens:build_lens"``.
        place: Its place among the lenses, from 1. They run in this order.
        seconds: What its run takes on two cores of an AVX-512 server; its share of a whole run's time.
        quick_seconds_gpu: What its main tables take in a quick run on a GPU, where others of its parts are the longest.
        question: What it answers.
    """

    name: str
    entry_point: str
    place: int
    seconds: int
    quick_seconds_gpu: int
    question: str

    def build(self) -> Lens:
        """Import the package, and return its lens."""
        module, _, function = self.entry_point.partition(":")
        lens: Lens = getattr(importlib.import_module(module), function)(HOUSE / self.name)
        return lens


def read(manifest: Path) -> Manifest:
    """Read the declaration of one lens; a manifest with none or several is an error."""
    document = tomllib.loads(manifest.read_text(encoding="utf-8"))
    ((name, entry_point),) = document["project"]["entry-points"][GROUP].items()
    return Manifest(name, entry_point, **document["tool"]["framework-internals"])


def manifests() -> dict[str, Manifest]:
    """Return every lens by name, in their order."""
    declared = sorted(map(read, HOUSE.glob("*/pyproject.toml")), key=lambda manifest: manifest.place)
    return {manifest.name: manifest for manifest in declared}
