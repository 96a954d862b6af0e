"""What the targets of a sweep are, for the tables of a report, from ``zoo.toml``. Nothing here imports torch."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from benchkit.device import Device

MODELS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("zoo.toml").read_text(encoding="utf-8"))


class Workload(NamedTuple):
    """A target of the zoo on one kind of device."""

    model: str  # by the name of its preset or of its publication
    batch: tuple[int, ...]  # shape of its first argument
    unit: str = ""  # what the last dimension of the batch counts; empty for features and pixels
    cut: str = ""  # how many of its layers it has, for a model that is not whole

    def __str__(self) -> str:
        cut = f", {self.cut}" if self.cut else ""
        return f"{self.model}{cut}, {' × '.join(f'{size:,}' for size in self.batch)} {self.unit}".rstrip()


def workload(target: str, device: Device) -> Workload | None:
    """What a target of the sweep is on a device; None for another target."""
    if (entry := MODELS.get(target)) is None:
        return None
    model, unit = entry["model"], entry.get("unit", "")
    if isinstance(model, str):  # the published one, on a GPU
        model = {"cpu": f"small {model}", "cuda": model}
    cut = entry.get("cut", "") if device == "cuda" else ""
    return Workload(model[device], tuple(entry["batch"][device]), unit if isinstance(unit, str) else unit[device], cut)
