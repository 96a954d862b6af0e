"""Profiles and traces a step, to tell where its time goes."""

from __future__ import annotations

import collections
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchkit import UserError
from benchkit.device import Device
from engines.kernel_times import covered
from engines.ranks import RankedEngine
from engines.spec import Engine, EngineSpec
from engines.torch_engine import TorchEngine
from jax_baseline.timing.jax_engine import make_engine
from torch_baseline.config import GPTConfig, TrainConfig
from whole_step.kernel_groups import Work, by_group, device_kernels, operator_calls

# Autograd's own span around a compiled forward or backward that Inductor made.
_COMPILED = "## Call CompiledFxGraph"
_PROFILED_STEPS = 3
_OWN = re.compile(r"(custom_ops|rmsnorm_fused)\w*::")

# The measured hop of dispatcher-trace that stands for a dispatch key. A key that dispatcher-trace does not measure
# counts as an Autograd key that makes no node.
_NODE, _NO_NODE = "AutogradCPU above `add`, a node is made", "AutogradCPU above `add`, no gradient asked for"
_HOP_COSTS = {"ADInplaceOrView": "ADInplaceOrView above `alias`", "BackendSelect": "BackendSelect above `empty`"}


class DissectedEngine:
    """An engine that can also be profiled and traced."""

    def __init__(self, engine: Engine, framework: str, device: Device) -> None:
        self._engine, self._framework, self._device = engine, framework, device
        self.peak_memory, self.next_loss = engine.peak_memory, engine.next_loss
        self._taken = 0

    def prepare(self) -> Any:
        """Take the first step."""
        self._taken += 1
        return self._engine.prepare()

    def run(self, steps: int) -> None:
        """Take steps."""
        self._taken += steps
        self._engine.run(steps)

    def loss_after(self, total: int, steps: int) -> float:
        """Take further steps, ``steps`` in a call as before, until there were ``total``, and return the loss, nats."""
        if self._taken > total:
            raise UserError(f"it had taken {self._taken} steps, more than the {total} of the others")
        while self._taken < total:
            self.run(steps)
        return self._engine.next_loss()

    def losses_from(self, seeds: Sequence[int], steps: int) -> list[float]:
        """Train from the weights of each seed, and return the losses in nats after so many steps."""
        if not isinstance(self._engine, (TorchEngine, RankedEngine)):
            raise UserError("only a step of torch begins again from other weights")
        losses = []
        for seed in seeds:
            self._engine.restart(seed)
            self._engine.run(steps)
            losses.append(self._engine.next_loss())
        return losses

    def dissect(self) -> dict[str, Any]:
        """Profile and trace one step.

        Returns:
            On a GPU, ``kernels`` (a count) and ``kernel_seconds``. Overlapping kernels of torch count once; kernels of
            JAX run one after another and are summed.
            ``groups`` has ``seconds`` and ``calls`` of each kernel group; on a CPU of torch's operators.
            For torch also ``operators`` (calls), ``own`` (names of this repository's operators whose kernels ran) and
            ``hops`` (calls by kind of hop).
            For torch on a CPU also ``profiled_seconds``, the duration of the profiled step, and two parts of it:
            ``operator_seconds``, the operators' own time, and ``compiled_seconds``, the time in compiled programs
            without the operators that they call.
        """
        if self._framework == "jax":
            if self._device == "cpu":
                return {}
            times = self._engine.kernel_times(_PROFILED_STEPS)
            groups = by_group([Work(k.name, 0.0, k.seconds, k.calls) for k in times], steps=1)
            total = {"kernels": sum(k.calls for k in times), "kernel_seconds": sum(k.seconds for k in times)}
            return {**total, "groups": groups}
        from dispatcher_trace.capture.profile import profiled

        with profiled() as profile:
            start = time.perf_counter()
            self._engine.run(_PROFILED_STEPS)
            seconds = (time.perf_counter() - start) / _PROFILED_STEPS
        return {**per_step(profile.events, _PROFILED_STEPS), "profiled_seconds": seconds, "hops": self._hops()}

    def _hops(self) -> dict[str, int]:
        from dispatcher_trace import trace

        with trace(scope="core", kernels=False) as recorded:
            self._engine.run(1)
        made_node = collections.Counter(
            (hop.key, bool(hop.made_node)) for call in recorded.all_calls for hop in call.hops[:-1]
        )
        counts: collections.Counter[str] = collections.Counter()
        for (key, node), count in made_node.items():
            counts[_HOP_COSTS.get(key, _NODE if node else _NO_NODE)] += count
        return dict(counts)


def make_dissected_engine(spec: EngineSpec, model: GPTConfig, training: TrainConfig, device: Device) -> DissectedEngine:
    """Make an engine in the child process that it runs in, as :func:`engines.ranks.make_engine` does."""
    return DissectedEngine(make_engine(spec, model, training, device), spec.framework, device)


def steps_before_loss(rounds: int, steps: int) -> int:
    """Steps of every variant before its last loss is read, at least as many as timing it takes.

    The first step; then samples: one of the preparation, the first call, at most two to choose the calls of a sample,
    one that is not timed, and the rounds.
    """
    return 1 + (5 + rounds) * steps


def per_step(events: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Compute the times and counts of one step from a profile of several."""
    operators = operator_calls(events)
    counts: dict[str, Any] = {"operators": len(operators) / steps, "own": _own_operators(events)}
    if kernels := device_kernels(events):
        times = {"kernels": len(kernels) / steps, "kernel_seconds": sum(kernel.seconds for kernel in kernels) / steps}
        return {**counts, **times, "groups": by_group(kernels, steps)}
    compiled = [
        (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "cpu_op" and e["name"].startswith(_COMPILED)
    ]
    inside = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "cpu_op"
        and not e["name"].startswith(_COMPILED)
        and any(start <= e["ts"] < stop for start, stop in compiled)
    ]
    return counts | {
        "operator_seconds": sum(operator.seconds for operator in operators) / steps,
        "compiled_seconds": (covered(compiled) - covered(inside)) * 1e-6 / steps,
        "groups": by_group(operators, steps),
    }


def _own_operators(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """The operators of this repository whose kernels ran in a forward pass."""
    names = {event["name"] for event in events if event.get("cat") == "cpu_op" and _OWN.match(event["name"])}
    return sorted(name for name in names if not name.endswith("_backward"))


def dispatch_seconds(hops: Mapping[str, int], costs: Mapping[str, float]) -> float:
    """Return the seconds that the hops above the backend take."""
    return sum(count * max(costs[kind], 0.0) for kind, count in hops.items())
