"""The same steps on one device and on meshes, in a process whose CPU pretends to be several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_baseline.gpt.sharding import count_collectives, make_mesh, spread, state_sharding, to_mesh
from jax_baseline.gpt.train import initial_state, make_train_step
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.data import Tokens, batch, load_corpus


@dataclass(frozen=True)
class MeshRun:
    """What came of a run on one mesh.

    Attributes:
        losses: by step.
        collectives: instructions of the compiled step by kind.
        state_bytes: of weights, moments and counters on the first device.
    """

    losses: list[float]
    collectives: dict[str, int]
    state_bytes: int


class MeshTrial:
    """Runs one training configuration on meshes of its process's devices.

    Args:
        model: fields of the shape.
        training: fields of the settings, those left out at their defaults.
    """

    def __init__(self, model: Mapping[str, Any], training: Mapping[str, Any]) -> None:
        self._model, self._training = GPTConfig(**model), TrainConfig(**training)
        corpus = load_corpus()
        config = self._training
        self._batches = [
            batch(corpus.train, config.seed, step, config.batch_size, self._model.block_size)
            for step in range(config.steps)
        ]
        self._compiled: dict[tuple[int, int], Any] = {}

    def run(self, data: int, fsdp: int, rows: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the fields of a :class:`MeshRun`.

        Args:
            data: copies of the weights.
            fsdp: shares of each copy.
            rows: an order of the batch's rows, which changes rounding alone; by default as they are.
        """
        mesh = make_mesh(data, fsdp)
        state = initial_state(self._model, self._training)
        shardings = state_sharding(state, mesh)
        state = spread(state, shardings)
        batches = [to_mesh(self._ordered(tokens, rows), mesh) for tokens in self._batches]
        if (data, fsdp) not in self._compiled:
            step: Any = make_train_step(self._model, self._training, shardings=shardings)
            self._compiled[data, fsdp] = step.lower(state, *batches[0]).compile()
        compiled = self._compiled[data, fsdp]
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
        losses = []
        for tokens in batches:
            state, metrics = compiled(state, *tokens)
            losses.append(float(metrics.loss))
        return vars(MeshRun(losses, count_collectives(compiled.as_text()), held))

    @staticmethod
    def _ordered(tokens: tuple[Tokens, Tokens], rows: Sequence[int] | None) -> tuple[Tokens, ...]:
        return tokens if rows is None else tuple(np.ascontiguousarray(part[list(rows)]) for part in tokens)
