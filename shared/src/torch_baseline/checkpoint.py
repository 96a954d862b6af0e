"""Checkpoints that survive a kill, resume bit for bit, and are refused when they are damaged or of another run.

A checkpoint is one file, a ``torch.save`` archive of tensors and plain values (loadable with ``weights_only=True``),
written beside its final name and moved there when it is safely on the disk: at any moment the final name holds a whole
one.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchkit import UserError
from benchkit.errors import first_line
from torch_baseline.config import GPTConfig, TrainConfig

FORMAT = 1

# What a resumed run may do differently: where it reads and writes and how often it looks, and how the work is spread
# (which changes rounding, not mathematics). Everything else decides what the next steps compute.
MAY_CHANGE = frozenset(
    {"data", "out", "eval_interval", "eval_batches", "checkpoint_interval", "patience", "parallel", "compile"}
)


class SavedRun(Protocol):
    """What a checkpoint, of whatever framework, says of its run; see :class:`Checkpoint`."""

    @property
    def model_config(self) -> dict[str, Any]:
        """Fields of the shape."""

    @property
    def train_config(self) -> dict[str, Any]:
        """Fields of the settings."""

    @property
    def data_sha256(self) -> str:
        """Of the corpus."""


@dataclass(frozen=True)
class Checkpoint:
    """All that the rest of a run depends on.

    Attributes:
        step: optimizer steps done; the next batch is that of this step.
        model: weights by parameter name.
        optimizer: AdamW's state by parameter name.
        ema: averaged weights by parameter name; empty without a moving average.
        scaler: state of the gradient scaler; empty unless float16.
        rng: states of torch's generators: ``cpu``, and ``cuda``, a list by device.
        best_loss: lowest validation loss so far, nats per byte.
        stale: validations since then.
        model_config: fields of :class:`GPTConfig`.
        train_config: fields of :class:`TrainConfig` as plain values.
        data_sha256: of the corpus.
    """

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    ema: dict[str, Tensor]
    scaler: dict[str, Any]
    rng: dict[str, Any]
    best_loss: float
    stale: int
    model_config: dict[str, Any]
    train_config: dict[str, Any]
    data_sha256: str


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint so that ``path`` holds the old one or the new one, whole, whenever the process dies.

    Raises:
        UserError: if the folder cannot be written or the disk is full; ``path`` is then as it was.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            torch.save({"format": FORMAT, **_fields(checkpoint)}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name itself must reach the disk, too
        finally:
            os.close(folder)
    except (OSError, RuntimeError) as error:  # torch's archive writer turns a failed write into a RuntimeError
        partial.unlink(missing_ok=True)
        raise UserError(
            f"cannot write the checkpoint {path} ({first_line(error)}); what it held before is kept"
        ) from error


def load(path: Path) -> Checkpoint:
    """Read a checkpoint back, on the CPU, without running any code that the file might hold.

    Raises:
        UserError: if there is none, it is damaged, or it is of another format.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load itself does not compare the checksums of tensors
        if damaged is not None:
            raise UserError(f"the checkpoint {path} is damaged (checksum of {damaged}); use another, or start anew")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"there is no checkpoint {path}; name a folder of train --out, or a file in it") from error
    except (OSError, zipfile.BadZipFile, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(
            f"the checkpoint {path} cannot be read ({first_line(error)}); use another, or start anew"
        ) from error
    expected = {"format", *Checkpoint.__dataclass_fields__}
    if not isinstance(content, dict) or content.keys() != expected or content["format"] != FORMAT:
        raise UserError(f"{path} is not a checkpoint of this program (format {FORMAT})")
    del content["format"]
    return Checkpoint(**content)


def require_same_run(checkpoint: SavedRun, model_config: GPTConfig, config: TrainConfig, data_sha256: str) -> None:
    """Check that going on from a checkpoint continues the same run.

    Raises:
        UserError: naming the first setting that differs, or the data.
    """
    now = {"model": asdict(model_config), "training": config.as_plain()}
    saved = {"model": checkpoint.model_config, "training": checkpoint.train_config}
    for part, fields in now.items():
        for name in sorted(fields.keys() | saved[part].keys()):
            then, wanted = saved[part].get(name), fields.get(name)
            if name not in MAY_CHANGE and then != wanted:
                raise UserError(
                    f"the checkpoint was made with {name}={then} ({part}), this run asks for {name}={wanted}; "
                    "resume with the same settings, or start a new run"
                )
    if checkpoint.data_sha256 != data_sha256:
        raise UserError(
            f"the checkpoint was trained on data with SHA-256 {checkpoint.data_sha256[:16]}…, "
            f"this is {data_sha256[:16]}…; resume with the same data"
        )


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    # Not dataclasses.asdict: that would copy every tensor once more.
    return {name: getattr(checkpoint, name) for name in Checkpoint.__dataclass_fields__}
