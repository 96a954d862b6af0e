"""Orbax checkpoints that survive a kill, resume bit for bit, and are refused when they are damaged or of another run.

Orbax writes a step beside its final name and names it when it is whole; a killed write leaves a step that the next run
does not see. Every array has a checksum, computed on the device where it lies and kept with the step: orbax itself does
not notice a changed byte.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from benchkit import UserError
from jax_baseline.gpt.train import TrainState
from torch_baseline.records import Validated

LAST, BEST = "last", "best"

# The one before the last is kept as well: what to go on from when the last is damaged.
_KEPT = {LAST: 2, BEST: 1}


@dataclass
class Standing(Validated):
    """What a run is, and how it stands, besides its arrays.

    Attributes:
        model_config: fields of the shape.
        train_config: fields of the settings as plain values.
        data_sha256: of the corpus.
        best_loss: lowest validation loss so far, nats per byte.
        stale: validations since then.
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
        folder: of the run; ``last`` and ``best`` are made in it.
    """

    folder: Path
    _managers: dict[str, ocp.CheckpointManager] = field(default_factory=dict)

    def save(self, kind: str, state: TrainState, standing: Standing) -> None:
        """Write a step; when this returns it is whole, and until then the one before is what there is.

        Args:
            kind: ``last`` or ``best``.
            state: all processes must call this with their shares of it.
            standing: of the run.

        Raises:
            UserError: if the folder cannot be written.
        """
        step = int(state.step)
        meta = {**asdict(standing), "best_loss": standing.best_loss.hex(), "checksums": checksums(state)}
        try:
            manager = self._manager(kind)
            # A run that was killed and resumed comes by the same step again, in the same state.
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

    def restore(self, kind: str, like: TrainState) -> tuple[TrainState, Standing]:
        """Read the latest whole step.

        Args:
            kind: ``last`` or ``best``.
            like: a state of the same shapes; what is read is spread over devices as it is.

        Raises:
            UserError: if there is none, or it is damaged.
        """
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)
        step, found = self._read(kind, state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore())
        path, meta = self.folder / kind / str(step), dict(found.meta)
        expected, actual = meta.pop("checksums"), checksums(found.state)
        if damaged := sorted(
            name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)
        ):
            raise UserError(f"the checkpoint {path} is damaged (checksum of {damaged[0]}); {self._remedy(kind, step)}")
        return found.state, _standing(meta)

    def standing(self, kind: str) -> Standing:
        """Read what the latest whole step says of its run, without its arrays.

        Raises:
            UserError: if there is none, or it cannot be read.
        """
        _, found = self._read(kind, meta=ocp.args.JsonRestore())
        return _standing({name: value for name, value in found.meta.items() if name != "checksums"})

    def exists(self, kind: str) -> bool:
        """Whether there is a whole step."""
        return (self.folder / kind).is_dir() and self._manager(kind).latest_step() is not None

    def close(self) -> None:
        """Let go of orbax's threads."""
        for manager in self._managers.values():
            manager.close()
        self._managers.clear()

    def _read(self, kind: str, **parts: Any) -> tuple[int, Any]:
        """The number of the latest whole step, and the parts of it that are asked for."""
        if not (self.folder / kind).is_dir() or (step := self._manager(kind).latest_step()) is None:
            raise UserError(f"there is no checkpoint in {self.folder / kind}; train --out {self.folder} writes one")
        try:
            return step, self._manager(kind).restore(step, args=ocp.args.Composite(**parts))
        except Exception as error:  # the storage below orbax raises whatever it meets in damaged files
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"the checkpoint {self.folder / kind / str(step)} cannot be read ({reason}); {self._remedy(kind, step)}"
            ) from error

    def _manager(self, kind: str) -> ocp.CheckpointManager:
        if kind not in self._managers:
            # Synchronous: a checkpoint that a run reports is on the disk.
            options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT[kind], enable_async_checkpointing=False)
            self._managers[kind] = ocp.CheckpointManager((self.folder / kind).absolute(), options=options)
        return self._managers[kind]

    def _remedy(self, kind: str, step: int) -> str:
        earlier = [found for found in self._manager(kind).all_steps() if found < step]
        other = f"delete it to go on from step {max(earlier)}" if earlier else "start anew"
        return f"{other}, or put a whole copy in its place"


def _standing(meta: dict[str, Any]) -> Standing:
    return Standing(**{**meta, "best_loss": float.fromhex(meta["best_loss"])})


def checksums(state: TrainState) -> dict[str, int]:
    """Return Σ (2·i + 1) · bits_i modulo 2³² of every array, i its place and bits_i its 32-bit words."""
    found = _checksums(state)
    return {jax.tree_util.keystr(path): int(value) for path, value in jax.tree_util.tree_leaves_with_path(found)}


@jax.jit
def _checksums(state: TrainState) -> TrainState:
    def checksum(leaf: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(leaf, jnp.uint32).ravel()
        return jnp.sum(words * (2 * jnp.arange(words.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)

    return jax.tree.map(checksum, state)
