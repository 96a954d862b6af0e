"""Orbax checkpoints that survive a kill and resume bit for bit. Damaged ones are refused.

Orbax writes a step under a temporary name and renames it when it is complete, so the next run does not see an
interrupted write. Every array has a checksum, which is computed on its device and stored with the step, because orbax
does not detect a changed byte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from benchkit import UserError
from benchkit.errors import first_line
from jax_baseline.gpt.train import TrainState
from torch_baseline.records import Validated

LAST, BEST = "last", "best"

# The checkpoint before the last is kept too, so that a run can resume when the last one is damaged.
_KEPT = {LAST: 2, BEST: 1}


@dataclass
class RunProgress(Validated):
    """The part of a checkpoint besides its arrays: configuration of the run, and its validation losses so far.

    Attributes:
        model_config: Fields of the model's shape.
        train_config: Fields of the settings as plain values.
        data_sha256: Hash of the corpus.
        best_loss: Lowest validation loss so far, in nats per byte.
        stale: Number of validations since the lowest loss.
    """

    model_config: dict[str, Any]
    train_config: dict[str, Any]
    data_sha256: str
    best_loss: float = math.inf
    stale: int = 0


@dataclass
class Checkpoints:
    """The checkpoints of a run.

    Attributes:
        folder: Folder of the run, with the subfolders ``last`` and ``best``.
    """

    folder: Path
    _managers: dict[str, ocp.CheckpointManager] = field(default_factory=dict)

    def save(self, kind: str, state: TrainState, progress: RunProgress) -> None:
        """Write a checkpoint of this step and wait until it is complete. Until then the previous one stays valid.

        Args:
            kind: ``last`` or ``best``.
            state: State to save. All processes must call this with their shards of it.
            progress: Progress of the run.

        Raises:
            UserError: If the folder cannot be written.
        """
        step = int(state.step)
        meta = {**asdict(progress), "best_loss": progress.best_loss.hex(), "checksums": checksums(state)}
        try:
            manager = self._manager(kind)
            # A resumed run reaches a step again that it saved before it was killed; the state is the same.
            if step in manager.all_steps():
                return
            manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)),
                force=True,
            )
            manager.wait_until_finished()
        except OSError as error:
            raise UserError(f"cannot write the checkpoint {self.folder / kind / str(step)}: {error}") from error

    def restore(self, kind: str, like: TrainState) -> tuple[TrainState, RunProgress]:
        """Read the latest complete checkpoint.

        Args:
            kind: ``last`` or ``best``.
            like: State of the same shapes; the restored arrays get its shardings.

        Raises:
            UserError: If there is no checkpoint, or if it is damaged.
        """
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)
        step, restored = self._read(kind, state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore())
        expected, actual = restored.meta["checksums"], checksums(restored.state)
        if damaged := sorted(name for name, _ in expected.items() ^ actual.items()):
            path = self.folder / kind / str(step)
            raise UserError(f"the checkpoint {path} is damaged (checksum of {damaged[0]}); {self._remedy(kind, step)}")
        return restored.state, _run_progress(restored.meta)

    def progress(self, kind: str) -> RunProgress:
        """Read the run's progress from the latest complete checkpoint, without the arrays.

        Raises:
            UserError: If there is no checkpoint, or if it cannot be read.
        """
        _, restored = self._read(kind, meta=ocp.args.JsonRestore())
        return _run_progress(restored.meta)

    def exists(self, kind: str) -> bool:
        """Whether there is a complete checkpoint."""
        return (self.folder / kind).is_dir() and self._manager(kind).latest_step() is not None

    def close(self) -> None:
        """Stop orbax's threads."""
        for manager in self._managers.values():
            manager.close()
        self._managers.clear()

    def _read(self, kind: str, **parts: Any) -> tuple[int, Any]:
        """Return the step of the latest complete checkpoint, and the requested parts of it."""
        if not (self.folder / kind).is_dir() or (step := self._manager(kind).latest_step()) is None:
            raise UserError(f"there is no checkpoint in {self.folder / kind}; train --out {self.folder} writes one")
        try:
            return step, self._manager(kind).restore(step, args=ocp.args.Composite(**parts))
        except Exception as error:  # the storage layer of orbax raises many types for damaged files
            path, reason = self.folder / kind / str(step), first_line(error)
            raise UserError(f"the checkpoint {path} cannot be read ({reason}); {self._remedy(kind, step)}") from error

    def _manager(self, kind: str) -> ocp.CheckpointManager:
        if kind not in self._managers:
            # Synchronous, so that a reported checkpoint is on the disk.
            options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT[kind], enable_async_checkpointing=False)
            self._managers[kind] = ocp.CheckpointManager((self.folder / kind).absolute(), options=options)
        return self._managers[kind]

    def _remedy(self, kind: str, step: int) -> str:
        earlier = [saved for saved in self._manager(kind).all_steps() if saved < step]
        other = f"delete it to resume from step {max(earlier)}" if earlier else "start a new run"
        return f"{other}, or replace it by an intact copy"


def _run_progress(meta: Mapping[str, Any]) -> RunProgress:
    fields = {name: value for name, value in meta.items() if name != "checksums"}
    return RunProgress(**{**fields, "best_loss": float.fromhex(meta["best_loss"])})


def checksums(state: TrainState) -> dict[str, int]:
    """Return Σ (2·i + 1) · word_i modulo 2³² for every array, over its 32-bit words."""
    leaves = jax.tree_util.tree_leaves_with_path(_checksums(state))
    return {jax.tree_util.keystr(path): int(value) for path, value in leaves}


@jax.jit
def _checksums(state: TrainState) -> TrainState:
    def checksum(leaf: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(leaf, jnp.uint32).ravel()
        return jnp.sum(words * (2 * jnp.arange(words.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)

    return jax.tree.map(checksum, state)
