"""Checkpoints that are written atomically, resume bit for bit, and are checked for damage and for the right run.

A checkpoint is one file: a ``torch.save`` archive of tensors and plain values that loads with ``weights_only=True``. It
is written under a temporary name and renamed when it is on the disk, so that its final name always refers to a complete
checkpoint.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchkit import UserError
from benchkit.errors import first_line, machine_fault
from torch_baseline.config import GPTConfig, TrainConfig

FORMAT = 1

# Settings that a resumed run may change: files, how often it validates and saves, and how the work is distributed
# (which changes rounding only). All other settings determine what the next steps compute.
MAY_CHANGE = frozenset(
    {"data", "out", "eval_interval", "eval_batches", "checkpoint_interval", "patience", "parallel", "compile"}
)


@dataclass(frozen=True)
class Checkpoint:
    """Everything that the rest of a run depends on.

    Attributes:
        step: Number of finished optimizer steps, which is also the index of the next batch.
        model: Weights by parameter name.
        optimizer: AdamW's state by parameter name.
        ema: Averaged weights by parameter name; empty without a moving average.
        scaler: State of the gradient scaler; empty unless the dtype is float16.
        rng: States of torch's generators: ``cpu``, and a list ``cuda`` by device.
        best_loss: Lowest validation loss so far, nats per byte.
        stale: Number of validations since the lowest one.
        model_config: Fields of :class:`GPTConfig`.
        train_config: Fields of :class:`TrainConfig` as plain values.
        data_sha256: SHA-256 of the corpus.
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
    """Write a checkpoint atomically: ``path`` is the old or the new checkpoint, whenever the process ends.

    Raises:
        UserError: If the folder cannot be written or the disk is full; ``path`` then stays as it is.
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
            os.fsync(folder)  # the new name must reach the disk too
        finally:
            os.close(folder)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        # After a write that failed, torch's archive writer complains of positions in the file.
        refused = error.__context__ if isinstance(error, RuntimeError) else error
        fault = machine_fault(refused) if isinstance(refused, OSError) else None
        raise UserError(
            f"cannot write the checkpoint {path} ({first_line(fault or error)}); the one before is unchanged"
        ) from error


def load(path: Path) -> Checkpoint:
    """Read a checkpoint on the CPU, without executing code that the file may contain.

    Raises:
        UserError: If the file does not exist, is damaged or has another format.
    """
    try:
        content = torch.load(_verified(path), map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"there is no checkpoint {path}; name a folder of train --out, or a file in it") from error
    except Exception as error:  # damage to the directory of an archive, or to a pickle, raises anything
        raise UserError(
            f"the checkpoint {path} cannot be read ({first_line(error)}); use another, or start a new run"
        ) from error
    expected = {"format", *Checkpoint.__dataclass_fields__}
    if not isinstance(content, dict) or content.keys() != expected or content["format"] != FORMAT:
        raise UserError(f"{path} is not a checkpoint of this program (format {FORMAT})")
    del content["format"]
    return Checkpoint(**content)


def _verified(path: Path) -> io.BytesIO:
    """The archive written anew in memory, from records whose checksums hold.

    torch.load does not verify checksums, and reads damaged fields of the directory in another way than zipfile does:
    of a record that is marked as a folder it makes a tensor of whatever is in memory.
    """
    copy = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copy, "w") as verified:
        names = archive.namelist()
        if len(set(names)) < len(names):
            raise zipfile.BadZipFile("two records have one name")
        for name in names:
            verified.writestr(zipfile.ZipInfo(name), archive.read(name))
    copy.seek(0)
    return copy


def require_same_run(checkpoint: Checkpoint, model_config: GPTConfig, config: TrainConfig, data_sha256: str) -> None:
    """Check that a checkpoint belongs to the run that is about to resume from it.

    Raises:
        UserError: If a setting or the data differ; the message names the first difference.
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


def require_shapes(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a checkpoint has the tensors of a model: copying a smaller one would repeat it.

    Args:
        checkpoint: Its weights, their averages and AdamW's moments are compared.
        shapes: Those of the model's parameters by name.

    Raises:
        UserError: If a tensor is missing or has another shape; the message names the first.
    """
    for name, shape in shapes.items():
        own = {"weights": checkpoint.model.get(name)}
        if checkpoint.ema:
            own["averages"] = checkpoint.ema.get(name)
        if name not in checkpoint.optimizer:
            own["optimizer"] = None
        own |= {key: value for key, value in checkpoint.optimizer.get(name, {}).items() if value.ndim}  # not the step
        for part, found in own.items():
            if found is None or tuple(found.shape) != shape:
                received = "none" if found is None else f"one of shape {list(found.shape)}"
                raise UserError(
                    f"the checkpoint's {part}: expected {name} of shape {list(shape)}, received {received}; use "
                    "another checkpoint, or start a new run"
                )


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    # dataclasses.asdict would copy every tensor.
    return {name: getattr(checkpoint, name) for name in Checkpoint.__dataclass_fields__}
