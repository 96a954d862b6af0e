"""What a run says about itself: events as they happen, and the files that keep them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchkit import UserError
from benchkit.results import write_text_atomically

METRICS, METADATA = "metrics.jsonl", "run.json"


@dataclass(frozen=True)
class Start:
    """What a run starts from.

    Attributes:
        corpus: name of the text.
        note: what is unusual about it; often empty.
        sha256: of the text.
        unigram_bits: entropy of the held-out bytes' frequencies, bits per byte: the best that a model reaches which
            knows how frequent each byte is and nothing about order.
        parameters: trained scalars.
        device: of the model.
        step: steps already done, more than 0 on resuming.
    """

    corpus: str
    note: str
    sha256: str
    unigram_bits: float
    parameters: int
    device: str
    step: int


class Validated:
    """What a run remembers of its validations; a dataclass that inherits this declares both fields.

    Attributes:
        best_loss: lowest validation loss so far, nats per byte.
        stale: validations since then.
    """

    best_loss: float
    stale: int

    def note_validation(self, loss: float) -> bool:
        """Take in a validation loss; return whether it is the lowest so far, which no loss that is not finite is."""
        best = math.isfinite(loss) and loss < self.best_loss
        if best:
            self.best_loss = loss
        self.stale = 0 if best else self.stale + 1
        return best


@dataclass(frozen=True)
class StepLog:
    """One optimizer step.

    Attributes:
        step: steps done, this one included.
        loss: mean cross-entropy of its batch before the update, nats per byte.
        lr: its learning rate.
        gradient_norm: before clipping; not finite where the float16 scaler skipped the update.
        seconds: from one step's gradients to the next one's.
        tokens_per_second: of this step, over all processes.
        mfu: model FLOPs over the datasheet's peak; None where no peak is known.
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
        step: steps done.
        bits: bits per held-out byte with the weights as they are.
        ema_bits: with the averaged weights; None without an average.
        best: no earlier validation was lower.
    """

    step: int
    bits: float
    ema_bits: float | None
    best: bool


@dataclass(frozen=True)
class Summary:
    """What came of a run.

    Attributes:
        steps: done, resumed ones included.
        stopped_early: whether patience ran out.
        bits: bits per held-out byte after the last step.
        ema_bits: with the averaged weights; None without an average.
        best_bits: the lowest ``bits`` of any validation.
        unigram_bits: see :class:`Start`.
        tokens_per_second: over all steps of this process but the first few (``throughput.WARMUP_STEPS``); validation
            and saving are left out. None if there were no others.
        mfu: the same as a share of the datasheet's peak; None where no peak is known.
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
    """``metrics.jsonl``, an event a line, and ``run.json``, what the run was; nothing at all without a folder.

    Args:
        folder: made if it is not there; None to write nothing.

    Raises:
        UserError: if the folder cannot be made.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"cannot make the output folder {folder}: {error.strerror}") from error

    def append(self, event: StepLog | ValidationLog) -> None:
        """Add one line to the metrics."""
        if self.folder is not None:
            line = json.dumps({"event": type(event).__name__, **asdict(event)})
            with (self.folder / METRICS).open("a") as file:
                file.write(line + "\n")

    def forget_after(self, step: int) -> None:
        """Drop what a killed run logged after its last checkpoint: it is about to happen again."""
        if self.folder is None or not (self.folder / METRICS).exists():
            return
        kept = []
        for line in (self.folder / METRICS).read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # the kill came in the middle of a line
            if json.loads(line)["step"] <= step:
                kept.append(line)
        write_text_atomically(self.folder / METRICS, "".join(kept))

    def describe(self, metadata: Mapping[str, Any]) -> None:
        """Write ``run.json``."""
        if self.folder is not None:
            write_text_atomically(self.folder / METADATA, json.dumps(metadata, indent=2) + "\n")
