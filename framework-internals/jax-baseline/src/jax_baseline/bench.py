"""Tokens per second of the same step in either framework, measured round by round in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from tempfile import TemporaryDirectory

from benchkit import Comparison, Timing, UserError, compare
from benchkit.device import Device
from jax_baseline.engines import EngineSpec, KernelTime, Preparation
from jax_baseline.worker import Worker, WorkerError
from torch_baseline.config import GPTConfig, TrainConfig

ENGINE_FACTORY = "jax_baseline.engines:make_engine"

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


@dataclass(frozen=True)
class Trial:
    """What a sweep found of one engine.

    Attributes:
        preparation: its first step, taken while others prepared theirs: the seconds are no compile times to quote.
        timing: seconds of one step, against the others of its group alone.
        peak_memory: bytes; None on a CPU.
        kernels: seconds a step by kernel, the largest first; empty unless asked for.
    """

    preparation: Preparation
    timing: Timing
    peak_memory: int | None
    kernels: tuple[KernelTime, ...]


def measure_engines(
    engines: Mapping[str, EngineSpec],
    model: GPTConfig,
    training: TrainConfig,
    *,
    device: Device,
    rounds: int,
    steps: int = 1,
    factory: str = ENGINE_FACTORY,
    inspect: Callable[[str, Worker], None] | None = None,
) -> Measured:
    """Time the engines in processes of their own that stay alive, one of them running at any time.

    Args:
        engines: by the name they are reported under.
        model: the shape.
        training: batch, dtype, optimizer.
        device: where they run.
        rounds: of one sample each.
        steps: that one sample holds; enough of them that the message to the worker (a tenth of a millisecond) is lost.
        factory: makes an engine in its process, as :func:`jax_baseline.engines.make_engine` does.
        inspect: called with each engine's name and worker when all are timed and have taken the same number of steps.

    Raises:
        RuntimeError: if the first losses differ by more than rounding explains.
    """
    with _workers(device, factory) as start:
        workers, preparations = {}, {}
        for name, spec in engines.items():
            workers[name] = start(spec, model, training)
            preparations[name] = Preparation(**workers[name].call("prepare"))
        _require_agreement({name: preparations[name] for name in engines if engines[name].devices == 1}, training.dtype)
        comparison = _compare(workers, rounds, steps)
        peaks = {name: worker.call("peak_memory") for name, worker in workers.items()}
        for name, worker in workers.items() if inspect else ():
            inspect(name, worker)
    return Measured(preparations, comparison, steps, peaks)


def sweep(
    engines: Mapping[str, EngineSpec],
    model: GPTConfig,
    training: TrainConfig,
    *,
    device: Device,
    rounds: int,
    steps: int,
    together: int,
    kernels: bool,
) -> Iterator[tuple[str, Trial | str]]:
    """Try settings quickly: engines in groups that prepare at the same time, and that memory holds at the same time.

    Args:
        engines: to try; one that fails costs itself alone.
        model: the shape.
        training: batch, dtype, optimizer.
        device: where they run.
        rounds: of one sample each.
        steps: that one sample holds.
        together: engines of a group; ratios across groups are as good as the machine's clocks are steady.
        kernels: profile each engine as well.

    Yields:
        Each engine with what was found, or with the reason why nothing was, group by group.
    """
    names = list(engines)
    for group in (names[index : index + together] for index in range(0, len(names), together)):
        with _workers(device) as start, ThreadPoolExecutor(together) as pool:

            def prepare(name: str, start: _Start = start) -> tuple[Worker, Preparation] | str:
                try:
                    worker = start(engines[name], model, training)
                    return worker, Preparation(**worker.call("prepare"))
                except (WorkerError, UserError) as error:
                    return str(error).strip()

            prepared = dict(zip(group, pool.map(prepare, group), strict=True))
            ready = {name: found for name, found in prepared.items() if not isinstance(found, str)}
            yield from ((name, found) for name, found in prepared.items() if isinstance(found, str))
            if not ready:
                continue
            comparison = _compare({name: worker for name, (worker, _) in ready.items()}, rounds, steps)
            for name, (worker, preparation) in ready.items():
                table = worker.call("kernel_times", steps=steps) if kernels else []
                timing = replace(comparison[name], samples=tuple(sample / steps for sample in comparison[name].samples))
                yield (
                    name,
                    Trial(preparation, timing, worker.call("peak_memory"), tuple(KernelTime(*row) for row in table)),
                )


_Start = Callable[[EngineSpec, GPTConfig, TrainConfig], Worker]


@contextmanager
def _workers(device: Device, factory: str = ENGINE_FACTORY) -> Iterator[_Start]:
    """A function that starts a worker; all of them end with the context."""
    with ExitStack() as stack:
        # Compile times are those of a first run: torch.compile keeps its results on disk, XLA only if it is told to.
        cache = stack.enter_context(TemporaryDirectory())
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_TRACEBACK_FILTERING": "off",  # a failure's last line is then its reason, not advice on tracebacks
        }
        if device == "cpu":
            environment["JAX_PLATFORMS"] = "cpu"

        def start(spec: EngineSpec, model: GPTConfig, training: TrainConfig) -> Worker:
            arguments = {
                "spec": asdict(spec),
                "model": asdict(model),
                "training": training.as_plain(),
                "device": device,
            }
            return stack.enter_context(Worker(factory, arguments, environment={**environment, **spec.environment}))

        yield start


def _compare(workers: Mapping[str, Worker], rounds: int, steps: int) -> Comparison:
    return compare(
        {name: lambda worker=worker: worker.call("run", steps=steps) for name, worker in workers.items()},
        # The workers wait for their device themselves: here a call is over when the work is.
        device="cpu",
        clock="wall-clock",
        warmup_calls=1,
        rounds=rounds,
    )


def _require_agreement(preparations: Mapping[str, Preparation], dtype: str) -> None:
    # Engines of several devices have more rows, and so another loss.
    reference, *others = preparations or [""]
    for name in others:
        difference = abs(preparations[name].loss - preparations[reference].loss)
        if not difference <= _AGREEMENT[dtype]:
            raise RuntimeError(
                f"{name} and {reference} do not compute the same: first losses {preparations[name].loss:.6f} and "
                f"{preparations[reference].loss:.6f}, at most {_AGREEMENT[dtype]:.0e} apart in {dtype}"
            )
