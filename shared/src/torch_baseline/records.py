"""The events of a training run, and the files that record them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchkit.results import write_text_atomically

METRICS, METADATA = "metrics.jsonl", "run.json"


@dataclass(frozen=True)
class Start:
    """The start of a run.

    Attributes:
        corpus: Name of the text.
        note: What is unusual about the text; often empty.
        sha256: SHA-256 of the text.
        unigram_bits: Entropy of the byte frequencies of the validation data, bits per byte. No model that ignores
            context has a lower loss.
        parameters: Number of trained scalars.
        device: Device of the model.
        step: Number of finished steps; above 0 if the run was resumed.
    """

    corpus: str
    note: str
    sha256: str
    unigram_bits: float
    parameters: int
    device: str
    step: int


@dataclass(frozen=True)
class StepLog:
    """One optimizer step.

    Attributes:
        step: Number of finished steps, including this one.
        loss: Mean cross-entropy of its batch before the update, nats per byte.
        lr: Learning rate.
        gradient_norm: Gradient norm before clipping; not finite if the float16 scaler skipped the update.
        seconds: Seconds from the gradients of the step before to those of this one.
        tokens_per_second: Tokens per second of this step, over all processes.
        mfu: Model FLOPs utilization, the share of the datasheet's peak; None for an unknown peak.
    """

    step: int
    loss: float
    lr: float
    gradient_norm: float
    seconds: float
    tokens_per_second: float
    mfu: float | None


@dataclass(frozen=True)
class ValidationLog:
    """One validation.

    Attributes:
        step: Number of finished steps.
        bits: Bits per validation byte, with the current weights.
        ema_bits: Bits per validation byte with the averaged weights; None without an average.
        best: Whether no earlier validation was lower.
    """

    step: int
    bits: float
    ema_bits: float | None
    best: bool


@dataclass(frozen=True)
class Summary:
    """The outcome of a run.

    Attributes:
        steps: Number of finished steps, including those before the run was resumed.
        stopped_early: Whether patience ran out.
        bits: Bits per validation byte after the last step.
        ema_bits: Bits per validation byte with the averaged weights; None without an average.
        best_bits: Lowest ``bits`` of all validations.
        unigram_bits: See :class:`Start`.
        tokens_per_second: Tokens per second over the steps of this process after the first
            ``throughput.WARMUP_STEPS``, without validation and saving. None if there are no such steps.
        mfu: Model FLOPs utilization over the same steps; None for an unknown peak.
    """

    steps: int
    stopped_early: bool
    bits: float
    ema_bits: float | None
    best_bits: float
    unigram_bits: float
    tokens_per_second: float | None
    mfu: float | None


Event = Start | StepLog | ValidationLog
Report = Callable[[Event], None]


class RunFiles:
    """Writes ``metrics.jsonl``, one event per line, and ``run.json``, the metadata of the run.

    Args:
        folder: The folder, which exists; None to write nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def append(self, event: StepLog | ValidationLog) -> None:
        """Add one line to the metrics."""
        if self.folder is not None:
            line = json.dumps({"event": type(event).__name__, **asdict(event)})
            with (self.folder / METRICS).open("a") as file:
                file.write(line + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the events of a killed run after its last checkpoint, because these steps are repeated.

        A damaged line, such as a loss of power leaves, is dropped too.
        """
        if self.folder is None or not (self.folder / METRICS).exists():
            return
        lines = (self.folder / METRICS).read_text(errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= step]
        write_text_atomically(self.folder / METRICS, "".join(kept))

    def describe(self, metadata: Mapping[str, Any]) -> None:
        """Write ``run.json``."""
        if self.folder is not None:
            write_text_atomically(self.folder / METADATA, json.dumps(metadata, indent=2) + "\n")


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):
        return math.inf
