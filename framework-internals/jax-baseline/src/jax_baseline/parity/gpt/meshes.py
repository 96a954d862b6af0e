"""The same training steps on one device and on meshes, in a process whose CPU emulates several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jax_baseline.gpt.sharding import count_collectives, make_mesh, spread, state_sharding, to_mesh
from jax_baseline.gpt.train import initial_state, make_train_step
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.data import batch, load_corpus


@dataclass(frozen=True)
class MeshRun:
    """Result of a run on one mesh."""

    losses: list[float]
    collectives: dict[str, int]
    state_bytes: int  # bytes of weights, moments and counters on the first device


class MeshTrial:
    """Runs one training configuration on meshes of the devices of this process."""

    def __init__(self, model: Mapping[str, Any], training: Mapping[str, Any]) -> None:
        self._model, self._training = GPTConfig(**model), TrainConfig(**training)
        corpus, config = load_corpus(), self._training
        self._batches = [
            batch(corpus.train, config.seed, step, config.batch_size, self._model.block_size)
            for step in range(config.steps)
        ]
        self._compiled: dict[tuple[int, int], Any] = {}

    def run(self, data: int, fsdp: int, rows: Sequence[int] | None = None) -> MeshRun:
        """Train on one mesh.

        ``rows`` orders the batch's rows, which changes rounding alone.
        """
        mesh = make_mesh(data, fsdp)
        state = initial_state(self._model, self._training)
        shardings = state_sharding(state, mesh)
        state = spread(state, shardings)
        order = slice(None) if rows is None else list(rows)
        batches = [to_mesh(tuple(part[order] for part in tokens), mesh) for tokens in self._batches]
        if (data, fsdp) not in self._compiled:
            step: Any = make_train_step(self._model, self._training, shardings=shardings)
            self._compiled[data, fsdp] = step.lower(state, *batches[0]).compile()
        compiled = self._compiled[data, fsdp]
        state_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
        losses = []
        for tokens in batches:
            state, metrics = compiled(state, *tokens)
            losses.append(float(metrics.loss))
        return MeshRun(losses, count_collectives(compiled.as_text()), state_bytes)
