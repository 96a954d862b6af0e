"""Tokens per second of the engines, each in its own process, measured in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchkit import Comparison, Quantity, Timing, UserError, compare
from benchkit.device import Device
from benchkit.processes import ChildFailure, RemoteObject, waiting_threads
from jax_baseline.timing.engines import EngineSpec, Preparation, make_engine
from jax_baseline.timing.kernel_times import KernelTime
from jax_baseline.timing.records import EngineFigures
from torch_baseline.config import GPTConfig, TrainConfig

# Largest difference of the first losses. It is far above the rounding of a mean over thousands of tokens, and far below
# the effect of a different model.
_AGREEMENT = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True)
class MeasuredEngine:
    """One engine, timed against the reference.

    Attributes:
        preparation: Cost and result of the first step.
        timing: Seconds per sample of ``steps`` steps.
        speedup: Speedup over the reference, paired by round; 1 for the reference.
        peak_memory: Peak memory in bytes; None on a CPU.
        missing: Errors of the requests that failed after the timing, by name: ``peak memory`` or ``inspection``.
    """

    preparation: Preparation
    timing: Timing
    speedup: Quantity
    peak_memory: int | None
    missing: Mapping[str, str] = field(default_factory=dict)

    def figures(self, tokens: int, steps: int, mfu: float | None) -> EngineFigures:
        """Return the figures of the report. Figures that were not measured are None.

        Args:
            tokens: Tokens per step, over all devices.
            steps: Steps per sample.
            mfu: MFU at one token per second, see :func:`mfu_per_token`.
        """
        rate, first = self.timing.quantity().per(tokens * steps, "tokens/s"), self.preparation
        return EngineFigures(
            rate=rate,
            step=Quantity(self.timing.median / steps, "s"),
            first_step=Quantity(first.first_step_seconds, "s"),
            loss=Quantity(first.loss, "nats"),
            speedup=self.speedup,
            compile_stages={stage: Quantity(seconds, "s") for stage, seconds in first.compile_seconds.items()},
            peak_memory=None if self.peak_memory is None else Quantity(self.peak_memory, "B"),
            temporaries=None if first.temporaries is None else Quantity(first.temporaries, "B"),
            xla_flops=None if first.flops is None else Quantity(first.flops, "FLOP"),
            mfu=None if mfu is None else Quantity(rate.value * mfu, "share"),
        )


def mfu_per_token(model: GPTConfig, training: TrainConfig, device: Device, devices: int) -> float | None:
    """Return the model FLOPs utilisation at one token per second, over all devices together.

    It is FLOPs per token / the dense peak FLOP/s of the datasheet for the dtype.

    Args:
        model: Shape of the model.
        training: Settings with the dtype.
        device: Kind of device.
        devices: Number of devices.

    Returns:
        None for a CPU, or for a GPU without a known datasheet.
    """
    import torch

    from torch_baseline.model import flops_per_token
    from torch_baseline.throughput import peak_flops

    peak = peak_flops(torch.device(device), training.dtype, devices)
    return None if peak is None else flops_per_token(model) / peak


@dataclass(frozen=True)
class Trial:
    """Result of a sweep for one engine.

    Attributes:
        preparation: Cost and result of the first step. Its times are rough, because other engines are in memory.
        timing: Seconds per step, interleaved with the engines of the same group only.
        peak_memory: Peak memory in bytes; None on a CPU, or if the request failed.
        kernels: Seconds per step by kernel, the largest first; empty unless requested.
        missing: Errors of the requests that failed after the timing, by name: ``peak memory`` or ``kernels``.
    """

    preparation: Preparation
    timing: Timing
    peak_memory: int | None
    kernels: tuple[KernelTime, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


class _ReadyEngine(NamedTuple):
    """An engine in its process, after its first step."""

    remote: RemoteObject
    preparation: Preparation


def measure_engines(
    engines: Mapping[str, EngineSpec],
    model: GPTConfig,
    training: TrainConfig,
    *,
    device: Device,
    rounds: int,
    steps: int = 1,
    together: int | None = None,
    empty_caches: bool = True,
    factory: Callable[..., object] = make_engine,
    inspect: Callable[[str, RemoteObject], None] | None = None,
) -> dict[str, MeasuredEngine | str]:
    """Time the engines, each in its own process. The processes stay alive and run one at a time.

    The first engine is the reference. It is part of every group, so that every engine's samples are paired with
    samples of the reference from the same rounds.

    Args:
        engines: Engines by name. An engine that fails does not affect the others, unless it is the reference.
        model: Shape of the model.
        training: Batch size, dtype and optimizer.
        device: Device of the engines.
        rounds: Number of samples per engine.
        steps: Steps per sample, enough to make the message to the engine's process (0.1 ms) negligible.
        together: Number of engines besides the reference that fit into device memory together. The default is all.
        empty_caches: Start with empty compiler caches. Otherwise Inductor reuses earlier results, and the first step
            does not measure the compile time.
        factory: Function that makes an engine in its process, with the arguments of
            :func:`jax_baseline.timing.engines.make_engine`.
        inspect: Called with the name and the remote object of each engine after its group is timed, when the engine has
            taken :func:`steps_taken` steps. A failure is recorded in :attr:`MeasuredEngine.missing`.

    Returns:
        The measurement of each engine in the given order, or the reason of its failure.

    Raises:
        ChildFailure: If the reference fails in the first group. If it fails later, only the later groups are lost.
        UserError: If the reference fails with an error that the user can fix.
    """
    reference, *others = engines
    results: dict[str, MeasuredEngine | str] = {}
    losses: dict[str, float | None] = {}
    with _engine_processes(device, factory, empty_caches) as start:
        own = {reference: partial(start, engines[reference], model, training)}
        first: _ReadyEngine | None = None
        for group in _groups(others, together) or [[]]:
            with _engine_processes(device, factory, empty_caches) as start_more:
                starts = {name: partial(start_more, engines[name], model, training) for name in group}
                started = _start(starts if first else {**own, **starts})
                if first is None:
                    first = _prepare(started.pop(reference).result(), steps)
                    losses = _expected_losses(engines, reference, first.preparation.loss)
                ready, failed = _prepare_group(started, steps, losses, training.dtype)
                ready = {reference: first, **ready}
                results |= failed
                try:
                    measured = _measure_group(ready, reference, rounds, steps)
                except (ChildFailure, UserError) as error:
                    if reference not in results:
                        raise
                    measured = dict.fromkeys(ready, f"the reference, {reference}, failed beside it: {error}")
                for name, result in measured.items():
                    if name not in results:
                        results[name] = _inspected(name, result, ready[name].remote, inspect)
    return {name: results[name] for name in engines}


def _start(starts: Mapping[str, Callable[[], RemoteObject]]) -> dict[str, Future[RemoteObject]]:
    """Start processes in parallel and wait for them, so that none starts while another one is timed."""
    with waiting_threads(len(starts) or 1) as pool:
        return {name: pool.submit(start) for name, start in starts.items()}


def _expected_losses(engines: Mapping[str, EngineSpec], reference: str, loss: float) -> dict[str, float | None]:
    """The first loss of each engine: the reference's, or None for an engine with another one."""
    # An engine on more devices has a larger batch, and another network is not the same function.
    devices = engines[reference].devices
    return {name: loss if spec.devices == devices and not spec.network else None for name, spec in engines.items()}


def _prepare_group(
    started: Mapping[str, Future[RemoteObject]],
    steps: int,
    expected_losses: Mapping[str, float | None],
    dtype: str,
) -> tuple[dict[str, _ReadyEngine], dict[str, str]]:
    """Take the first steps of a group of engines. What is timed, compilation included, runs one at a time.

    Args:
        started: The process of each engine, or the error of its start.
        steps: Steps per sample.
        expected_losses: Loss that the first step of each engine must have; None for any.
        dtype: Compute dtype.

    Returns:
        The engines that are ready, and the reasons why the others failed.
    """
    ready: dict[str, _ReadyEngine] = {}
    failed: dict[str, str] = {}
    for name, process in started.items():
        try:
            ready[name] = _prepare(process.result(), steps, expected_losses[name], dtype)
        except (ChildFailure, UserError, ValueError) as error:
            failed[name] = str(error)
    return ready, failed


def _inspected(
    name: str, measured: MeasuredEngine | str, remote: RemoteObject, inspect: Callable[[str, RemoteObject], None] | None
) -> MeasuredEngine | str:
    """Call ``inspect`` for a measured engine. Its failure leaves the measurement valid."""
    if inspect is None or isinstance(measured, str):
        return measured
    try:
        inspect(name, remote)
    except (ChildFailure, UserError) as error:
        return replace(measured, missing={**measured.missing, "inspection": str(error)})
    return measured


def _peak_memory(remote: RemoteObject) -> tuple[int | None, dict[str, str]]:
    """Return the bytes, and the error by the name of the request if it fails."""
    try:
        return remote.call("peak_memory"), {}
    except (ChildFailure, UserError) as error:
        return None, {"peak memory": str(error)}


def steps_taken(rounds: int, steps: int) -> int:
    """Return the steps of an engine after :func:`measure_engines`: one, two untimed samples, and the rounds."""
    return 1 + (2 + rounds) * steps


def _prepare(remote: RemoteObject, steps: int, expected_loss: float | None = None, dtype: str = "") -> _ReadyEngine:
    """Take the first step and one more sample, which shows whether the engine fits into memory beside the others."""
    try:
        preparation: Preparation = remote.call("prepare")
        if expected_loss is not None:
            _require_agreement(preparation.loss, expected_loss, dtype)
        remote.call("run", steps=steps)
    except (ChildFailure, UserError, ValueError):
        remote.close()  # frees its device memory
        raise
    return _ReadyEngine(remote, preparation)


def _measure_group(
    ready: Mapping[str, _ReadyEngine], reference: str, rounds: int, steps: int
) -> dict[str, MeasuredEngine | str]:
    """Return the measurement of each engine, or the reason why it failed during the rounds."""
    comparison, failed = _compare(ready, rounds, steps)
    if reference in failed:
        raise failed[reference]
    found: dict[str, MeasuredEngine | str] = {name: str(error) for name, error in failed.items()}
    for name, timing in comparison.timings.items():
        remote, preparation = ready[name]
        speedup = comparison.speedup(name, over=reference)
        found[name] = MeasuredEngine(preparation, timing, speedup, *_peak_memory(remote))
    return found


def _groups(names: Sequence[str], size: int | None) -> list[Sequence[str]]:
    return [names[index : index + size] for index in range(0, len(names), size)] if size else [names]


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
    """Time many engines quickly, in groups that fit into device memory together.

    Args:
        engines: Engines by name. An engine that fails does not affect the others.
        model: Shape of the model.
        training: Batch size, dtype and optimizer.
        device: Device of the engines.
        rounds: Number of samples per engine.
        steps: Steps per sample.
        together: Engines per group. Engines of different groups can be compared only if the clocks are stable.
        kernels: Profile each engine as well.

    Yields:
        The name of an engine and its result, or the reason of its failure, group by group.
    """
    for group in _groups(list(engines), together):
        with _engine_processes(device) as start:
            ready: dict[str, _ReadyEngine] = {}
            for name in group:  # one at a time, because compilers benchmark kernels on the device
                try:
                    ready[name] = _prepare(start(engines[name], model, training), steps)
                except (ChildFailure, UserError) as error:
                    yield name, str(error).strip()
            if not ready:
                continue
            comparison, failed = _compare(ready, rounds, steps)
            yield from ((name, str(error).strip()) for name, error in failed.items())
            for name, timing in comparison.timings.items():
                remote, preparation = ready[name]
                timing = replace(timing, samples=tuple(sample / steps for sample in timing.samples))
                memory, missing = _peak_memory(remote)
                trial = Trial(preparation, timing, memory, missing=missing)
                yield name, _with_kernels(trial, remote, steps) if kernels else trial


def _with_kernels(trial: Trial, remote: RemoteObject, steps: int) -> Trial:
    """Add the times of the kernels to a trial, or the error of the profiler."""
    try:
        return replace(trial, kernels=tuple(remote.call("kernel_times", steps=steps)))
    except (ChildFailure, UserError) as error:
        return replace(trial, missing={**trial.missing, "kernels": str(error)})


@contextmanager
def _engine_processes(
    device: Device, factory: Callable[..., object] = make_engine, empty_caches: bool = True
) -> Iterator[Callable[[EngineSpec, GPTConfig, TrainConfig], RemoteObject]]:
    """Yield a function that starts the process of an engine. All processes end with the context."""
    with ExitStack() as stack:
        environment = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_TRACEBACK_FILTERING": "off",  # so that the last line of an error is its message
        }
        if empty_caches:  # torch.compile caches its results on disk; XLA does so only on request
            environment["TORCHINDUCTOR_CACHE_DIR"] = stack.enter_context(TemporaryDirectory())
        if device == "cpu":
            environment["JAX_PLATFORMS"] = "cpu"

        def start(spec: EngineSpec, model: GPTConfig, training: TrainConfig) -> RemoteObject:
            arguments = {
                "spec": asdict(spec),
                "model": asdict(model),
                "training": training.as_plain(),
                "device": device,
            }
            return stack.enter_context(
                RemoteObject(factory, arguments, environment={**environment, **spec.environment})
            )

        yield start


def _compare(
    engines: Mapping[str, _ReadyEngine], rounds: int, steps: int
) -> tuple[Comparison, dict[str, ChildFailure | UserError]]:
    """Time the engines in interleaved rounds. The rounds continue without an engine that fails.

    Returns:
        The timings of the engines that completed every round, and the errors of the others.
    """
    failed: dict[str, ChildFailure | UserError] = {}

    def run(name: str) -> None:
        if name in failed:
            return
        try:
            engines[name].remote.call("run", steps=steps)
        except (ChildFailure, UserError) as error:
            failed[name] = error
            engines[name].remote.close()  # frees its device memory

    comparison = compare(
        {name: partial(run, name) for name in engines},
        # An engine waits for its device, so the wall clock of a call covers the device's work.
        device="cpu",
        clock="wall-clock",
        warmup_calls=0,  # _prepare() took one sample already
        rounds=rounds,
    )
    return Comparison({name: timing for name, timing in comparison.timings.items() if name not in failed}), failed


def _require_agreement(loss: float, expected: float, dtype: str) -> None:
    if not abs(loss - expected) <= _AGREEMENT[dtype]:
        raise ValueError(
            f"its first loss {loss:.6f} differs from the reference's {expected:.6f}; at most "
            f"{_AGREEMENT[dtype]:.0e} is expected in {dtype}, so the two are not the same model"
        )
