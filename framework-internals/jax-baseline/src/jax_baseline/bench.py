"""Tokens per second of the same step in either framework, measured round by round in one run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory

from benchkit import Comparison, compare
from benchkit.device import Device
from jax_baseline.engines import EngineSpec, Preparation
from jax_baseline.worker import Worker
from torch_baseline.config import GPTConfig, TrainConfig

# First losses must agree this well before anything is timed: far above what rounding does to a mean over thousands of
# tokens, far below what any difference of the model would.
_AGREEMENT = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Measured:
    """Several engines, timed against one another.

    Attributes:
        preparations: what the first step took, by engine.
        comparison: seconds of ``steps`` steps.
        steps: that one sample holds.
        peak_memory: bytes by engine; None on a CPU.
    """

    preparations: Mapping[str, Preparation]
    comparison: Comparison
    steps: int
    peak_memory: Mapping[str, int | None]


def measure_engines(
    engines: Mapping[str, EngineSpec],
    model: GPTConfig,
    training: TrainConfig,
    *,
    device: Device,
    rounds: int,
    steps: int = 1,
) -> Measured:
    """Time the engines in processes of their own that stay alive, one of them running at any time.

    Args:
        engines: by the name they are reported under.
        model: the shape.
        training: batch, dtype, optimizer.
        device: where they run.
        rounds: of one sample each.
        steps: that one sample holds; enough of them that the message to the worker (a tenth of a millisecond) is lost.

    Raises:
        RuntimeError: if the first losses differ by more than rounding explains.
    """
    with ExitStack() as stack:
        # Compile times are those of a first run: torch.compile keeps its results on disk, XLA only if it is told to.
        cache = stack.enter_context(TemporaryDirectory())
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if device == "cpu":
            environment["JAX_PLATFORMS"] = "cpu"
        workers, preparations = {}, {}
        for name, spec in engines.items():
            arguments = {
                "spec": asdict(spec),
                "model": asdict(model),
                "training": training.as_plain(),
                "device": device,
            }
            workers[name] = stack.enter_context(
                Worker("jax_baseline.engines:make_engine", arguments, environment=environment)
            )
            preparations[name] = Preparation(**workers[name].call("prepare"))
        _require_agreement(preparations, training.dtype)
        comparison = compare(
            {name: lambda worker=worker: worker.call("run", steps=steps) for name, worker in workers.items()},
            # The workers wait for their device themselves: here a call is over when the work is.
            device="cpu",
            clock="wall-clock",
            warmup_calls=1,
            rounds=rounds,
        )
        peaks = {name: worker.call("peak_memory") for name, worker in workers.items()}
    return Measured(preparations, comparison, steps, peaks)


def _require_agreement(preparations: Mapping[str, Preparation], dtype: str) -> None:
    reference, *others = preparations
    for name in others:
        difference = abs(preparations[name].loss - preparations[reference].loss)
        if not difference <= _AGREEMENT[dtype]:
            raise RuntimeError(
                f"{name} and {reference} do not compute the same: first losses {preparations[name].loss:.6f} and "
                f"{preparations[reference].loss:.6f}, at most {_AGREEMENT[dtype]:.0e} apart in {dtype}"
            )
