"""Tokens per second of the engines, each in its own process, measured in interleaved rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

from benchkit import Comparison, Quantity, Timing, UserError, compare
from benchkit.device import Device
from benchkit.errors import lacks_memory, why_missing
from benchkit.processes import ChildFailure, RemoteObject, budget, result_of, waiting_threads
from benchkit.processes.memory import DoesNotFit, free, gib, lack
from engines.fit import engine_bytes, held_bytes, jax_memory
from engines.kernel_times import KernelTime
from engines.ranks import make_engine
from engines.spec import EngineSpec, Preparation
from torch_baseline.config import GPTConfig, TrainConfig

Answer = TypeVar("Answer")

# Largest difference of the first losses. It is far above the rounding of a mean over thousands of tokens, and far below
# the effect of a different model.
_AGREEMENT = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 2e-2}

# With a budget: engines that are prepared however late, since fewer make no comparison, and the least time for rounds,
# in samples of every engine: two before the rounds, which may take half of the rest, and verdicts need six rounds. On a
# slow machine it is longer than budget.TIMING.
_FEWEST, _TIMING_SAMPLES = 2, 16

_SETTLING_SECONDS = 1.0

# Engines are taken to need at most so many times as much as expected: other programs take memory meanwhile, too.
_LARGEST_SCALE = 2.0

# The part of the memory that a group leaves which its engines of JAX reserve as well; the others may need the rest.
_SHARED_SPARE = 0.5


@dataclass(frozen=True)
class EngineFigures:
    """Figures of one engine.

    Attributes:
        rate: Tokens per second, over all devices.
        step: Median time of a step.
        first_step: Time of the first step, compilation included.
        loss: Loss of the first step.
        speedup: Speedup over the reference, paired by round; 1 for the reference. None if the reference failed.
        compile_stages: Times of ``trace``, ``lower`` and ``compile``. Empty for torch.
        peak_memory: Peak memory in bytes. None on a CPU.
        temporaries: Bytes of scratch memory. None if the compiler does not report them.
        xla_flops: XLA's count of floating-point operations. None for torch.
        mfu: Model FLOPs utilisation. None on a CPU.
    """

    rate: Quantity
    step: Quantity
    first_step: Quantity
    loss: Quantity
    speedup: Quantity | None = None
    compile_stages: Mapping[str, Quantity] = field(default_factory=dict)
    peak_memory: Quantity | None = None
    temporaries: Quantity | None = None
    xla_flops: Quantity | None = None
    mfu: Quantity | None = None


@dataclass(frozen=True)
class MeasuredEngine:
    """One engine, timed against the reference, or in a sweep without one.

    Attributes:
        preparation: Cost and result of the first step. In a sweep its times are rough, as other engines are in memory.
        timing: Seconds per sample of ``steps`` steps; in a sweep, per step.
        speedup: Speedup over the reference, paired by round; 1 for the reference. None if the reference failed.
        peak_memory: Peak memory in bytes; None on a CPU.
        missing: Reasons of the figures that could not be had, by name: ``speedup``, ``peak memory``, ``inspection`` or
            ``kernels``.
        rounds: Timings of all engines that ran in the same rounds, by name. Only these can be paired with this engine.
        kernels: Seconds per step by kernel, the largest first; for a sweep that was asked for them.
    """

    preparation: Preparation
    timing: Timing
    speedup: Quantity | None
    peak_memory: int | None
    missing: Mapping[str, str] = field(default_factory=dict)
    rounds: Comparison = field(default_factory=lambda: Comparison({}))
    kernels: tuple[KernelTime, ...] = ()

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

    Returns:
        None for a CPU, or for a GPU without a known datasheet.
    """
    import torch

    from torch_baseline.model import flops_per_token
    from torch_baseline.throughput import peak_flops

    peak = peak_flops(torch.device(device), training.dtype, devices)
    return None if peak is None else flops_per_token(model) / peak


class _ReadyEngine(NamedTuple):
    """An engine in its process, after its first step."""

    remote: RemoteObject
    preparation: Preparation
    sample_seconds: float = 0.0


def measure_engines(
    engines: Mapping[str, EngineSpec],
    model: GPTConfig,
    training: TrainConfig,
    *,
    device: Device,
    rounds: int,
    steps: int = 1,
    references: Sequence[str] = (),
    empty_caches: bool = True,
    at_once: bool = False,
    factory: Callable[..., object] = make_engine,
    inspect: Callable[[str, RemoteObject], None] | None = None,
) -> dict[str, MeasuredEngine | str]:
    """Time the engines, each in its own process. The processes stay alive and run one at a time.

    Where not all of them fit into the free memory at once (:mod:`engines.fit`), they run in groups, and their needs are
    those of the engines that ran. The first engine is the reference. It is part of every group, so that every engine's
    samples are paired with samples of the reference from the same rounds.

    Args:
        engines: Engines by name. An engine that fails, for want of memory, by an error or because its process dies,
            does not affect the others. If the reference fails, the others are timed without a speedup.
        model: Shape of the model.
        training: Batch size, dtype and optimizer.
        device: Device of the engines.
        rounds: Number of samples per engine.
        steps: Steps per sample, enough to make the message to the engine's process (0.1 ms) negligible.
        references: Further engines that are part of every group. Their own figures are those of the first group.
        empty_caches: Start with empty compiler caches. Otherwise Inductor reuses earlier results, and the first step
            does not measure the compile time.
        at_once: Compile the engines of torch at the same time, so that the times of their first steps mean nothing.
            Those of JAX follow one by one, since XLA chooses kernels by timing them.
        factory: Makes an engine in its process, as :func:`engines.ranks.make_engine` does those of torch.
        inspect: Called with the name and the remote object of each engine after its group is timed: a first step, two
            untimed samples and the rounds. A reference has a new process in the next group then. A failure is recorded
            in :attr:`MeasuredEngine.missing`.

    Returns:
        The measurement of each engine in the given order, or the reason of its failure.

    Raises:
        ValueError: If a reference is not among the engines.
        ChildFailure: If no engine could be measured: the error of the first.
        UserError: The same, where the error is one that the user can fix.
    """
    if unknown := [name for name in references if name not in engines]:
        raise ValueError(f"references must be among the engines {', '.join(engines)}; got {unknown[0]!r}")
    reference = next(iter(engines))
    lasting = dict.fromkeys([reference, *references])
    queue = _Queue(engines, model, training, device, lasting)
    results, errors = dict[str, MeasuredEngine | str](), dict[str, Exception]()
    losses, alive = dict[int, tuple[str, float]](), dict[str, _ReadyEngine]()
    with _engine_processes(device, factory, empty_caches) as start:
        references_to_start = {name: partial(start, engines[name], model, training) for name in lasting}
        new_references = references_to_start
        while new_references or queue.waiting:
            if results and budget.left() <= 0:
                errors |= dict.fromkeys(queue.waiting, _out_of_time())
                break
            group = queue.next_group(new_references)
            with _engine_processes(device, factory, empty_caches) as start_more:
                more = partial(start_more, model=model, training=training)
                starts = {name: partial(more, engines[name], reserved=queue.reservation(name)) for name in group}
                started = _start({**new_references, **starts})
                ready, failed = _prepare_group(started, engines, steps, losses, training.dtype, at_once)
                errors |= queue.put_back_crowded(failed, group, ready)
                beside = {**alive, **ready}
                measured, stopped = _measure_group(beside, reference, errors, rounds, steps)
                errors |= stopped
                alive = {name: engine for name, engine in beside.items() if name in lasting and name in measured}
                new_references = {}
                for name in [name for name in measured if name not in results]:
                    results[name] = _inspected(name, measured[name], beside[name].remote, inspect)
                    if inspect and queue.waiting and name in alive:  # a profiler leaves its process slower than before
                        alive.pop(name).remote.close()
                        new_references[name] = references_to_start[name]
    if not results:
        raise errors[reference]
    return {name: results.get(name) or str(errors[name]) for name in engines}


def _out_of_time() -> budget.OutOfTime:
    return budget.OutOfTime("no time was left for it; give the run more with --budget")


class _Queue:
    """The engines that have not run yet, and which of them fit at once beside the references.

    Attributes:
        waiting: Their names, in order.
    """

    def __init__(
        self,
        engines: Mapping[str, EngineSpec],
        model: GPTConfig,
        training: TrainConfig,
        device: Device,
        lasting: Collection[str],
    ) -> None:
        self.waiting = [name for name in engines if name not in lasting]
        self._device = device
        self._held = {
            name: held_bytes(spec, model, training, device)
            for name, spec in engines.items()
            if spec.framework == "jax" and device == "cuda"
        }
        self._spare = 0.0  # what each engine of the group that reserves memory reserves beyond what it needs
        self._needs = {name: engine_bytes(spec, model, training, device) for name, spec in engines.items()}
        self._scale = 1.0  # of the needs: what the engines that ran took, as a multiple of what was expected
        self._free = 0
        self._alone: set[str] = set()  # they did not fit beside others

    def next_group(self, references: Collection[str]) -> list[str]:
        """Take the engines off the queue that fit beside references that start with them; at least one."""
        self._free = _settled_free(self._device)
        room = self._free - self._expected_bytes(references)
        group: list[str] = []
        while self.waiting:
            name = self.waiting[0]
            room -= self._expected_bytes([name])
            if group and (room < 0 or name in self._alone):
                break
            group.append(self.waiting.pop(0))
            if name in self._alone:
                break
        left = self._free - self._expected_bytes([*references, *group])
        self._spare = _SHARED_SPARE * max(left, 0.0) / max(sum(map(self.reserves, group)), 1)
        return group

    def put_back_crowded(
        self, failed: Mapping[str, Exception], group: Collection[str], ready: Collection[str]
    ) -> dict[str, Exception]:
        """Put engines that did not fit beside others back, each to run alone, and learn what the others took.

        Returns:
            The errors that are final.
        """
        if ready and not any(map(lacks_memory, failed.values())):
            spare = self._spare * sum(self.reserves(name) for name in ready if name in group)
            taken, expected = self._free - free(self._device) - spare, sum(self._needs[name] for name in ready)
            self._scale = min(max(taken / expected, self._scale), _LARGEST_SCALE)
        final: dict[str, Exception] = {}
        for name, error in failed.items():
            if lacks_memory(error) and name in group and (len(group) > 1 or self.reserves(name)):
                self.waiting.insert(0, name)
                self._alone.add(name)
            else:
                final[name] = self._lack(name, error) if lacks_memory(error) else error
        return final

    def reserves(self, name: str) -> bool:
        """Whether an engine takes its memory at once; one for which that was too little takes what it needs, alone."""
        return name in self._held and name not in self._alone

    def reservation(self, name: str) -> float | None:
        """Return the bytes that an engine reserves, see :func:`engines.fit.jax_memory`; None if it does not."""
        return self._held[name] + self._spare if self.reserves(name) else None

    def _lack(self, name: str, error: Exception) -> DoesNotFit:
        needs, left = self._expected_bytes([name]), free(self._device)
        return DoesNotFit(lack(needs, left) if needs > left else f"{why_missing(error)}; {gib(left)} were free for it")

    def _expected_bytes(self, names: Collection[str]) -> float:
        return self._scale * sum(self._needs[name] for name in names)


def _settled_free(device: Device) -> int:
    """The free memory, once it grows no more: the driver of a GPU takes a moment to free that of killed processes."""
    before, now = -1, free(device)
    while device == "cuda" and now > before:
        time.sleep(_SETTLING_SECONDS)
        before, now = now, free(device)
    return now


def _start(starts: Mapping[str, Callable[[], RemoteObject]]) -> dict[str, Future[RemoteObject]]:
    """Start processes in parallel and wait for them, so that none starts while another one is timed."""
    with waiting_threads(len(starts) or 1) as pool:
        return {name: pool.submit(start) for name, start in starts.items()}


def _prepare_group(
    started: Mapping[str, Future[RemoteObject]],
    engines: Mapping[str, EngineSpec],
    steps: int,
    losses: dict[int, tuple[str, float]],
    dtype: str,
    at_once: bool,
) -> tuple[dict[str, _ReadyEngine], dict[str, Exception]]:
    """Take the first steps of a group of engines: one at a time, or those of torch ``at_once``.

    ``losses`` has the first engine of each number of devices, and its first loss, with which the others must agree.
    """
    ready: dict[str, _ReadyEngine] = {}
    failed: dict[str, Exception] = {}
    with waiting_threads(len(started) or 1) as pool:
        calls: dict[str, Callable[[], _ReadyEngine]] = {
            name: partial(_first_step, partial(result_of, process)) for name, process in started.items()
        }
        begun = [name for name in started if at_once and engines[name].framework == "torch"]
        calls = {name: partial(result_of, pool.submit(calls.pop(name))) for name in begun} | calls
        for name, call in calls.items():
            if name not in begun and len(ready) >= _FEWEST and budget.left() <= _timing_seconds(ready):
                failed[name] = _out_of_time()
                continue
            try:
                engine = call()
                _require_agreement(name, engines[name], engine, losses, dtype)
                ready[name] = _sampled(engine, steps)
            except (ChildFailure, UserError, ValueError) as error:
                failed[name] = error
    return ready, failed


def _timing_seconds(ready: Mapping[str, _ReadyEngine]) -> float:
    return _TIMING_SAMPLES * sum(engine.sample_seconds for engine in ready.values())


def _inspected(
    name: str, measured: MeasuredEngine, remote: RemoteObject, inspect: Callable[[str, RemoteObject], None] | None
) -> MeasuredEngine:
    """Call ``inspect`` for a measured engine. Its failure leaves the measurement valid."""
    if inspect is None:
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


def _first_step(start: Callable[[], RemoteObject]) -> _ReadyEngine:
    remote = start()
    try:
        return _ReadyEngine(remote, remote.call("prepare"))
    except (ChildFailure, UserError):
        remote.close()  # frees its device memory
        raise


def _sampled(engine: _ReadyEngine, steps: int) -> _ReadyEngine:
    """Take one more sample, which shows whether the engine fits into memory beside the others."""
    start = time.monotonic()
    try:
        engine.remote.call("run", steps=steps)
    except (ChildFailure, UserError):
        engine.remote.close()
        raise
    return engine._replace(sample_seconds=time.monotonic() - start)


def _measure_group(
    ready: Mapping[str, _ReadyEngine], reference: str, errors: Mapping[str, Exception], rounds: int, steps: int
) -> tuple[dict[str, MeasuredEngine], dict[str, ChildFailure | UserError]]:
    """Return the measurement of each engine, and the errors of those that failed during the rounds."""
    if not ready:
        return {}, {}
    with budget.at_least(max(budget.TIMING, _timing_seconds(ready))):
        comparison, failed = _compare(ready, rounds, steps)
    lost = failed.get(reference) or errors.get(reference)
    measured = {}
    for name, timing in comparison.timings.items():
        remote, preparation, _ = ready[name]
        memory, missing = _peak_memory(remote)
        speedup = None if lost else comparison.speedup(name, over=reference)
        if lost:
            missing["speedup"] = f"the reference, {reference}, failed: {lost}"
        measured[name] = MeasuredEngine(preparation, timing, speedup, memory, missing, comparison)
    return measured, failed


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
    factory: Callable[..., object] = make_engine,
) -> Iterator[tuple[str, MeasuredEngine | str]]:
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
        factory: See :func:`measure_engines`.

    Yields:
        The name of an engine and its result, or the reason of its failure, group by group.
    """
    names = list(engines)
    for group in (names[index : index + together] for index in range(0, len(names), together)):
        with _engine_processes(device, factory) as start:
            ready: dict[str, _ReadyEngine] = {}
            for name in group:  # one at a time, because compilers benchmark kernels on the device
                try:
                    ready[name] = _sampled(_first_step(partial(start, engines[name], model, training)), steps)
                except (ChildFailure, UserError) as error:
                    yield name, str(error).strip()
            if not ready:
                continue
            comparison, failed = _compare(ready, rounds, steps)
            yield from ((name, str(error).strip()) for name, error in failed.items())
            for name, timing in comparison.timings.items():
                remote, preparation, _ = ready[name]
                timing = replace(timing, samples=tuple(sample / steps for sample in timing.samples))
                memory, missing = _peak_memory(remote)
                profile: tuple[KernelTime, ...] = ()
                if kernels:
                    try:
                        profile = tuple(remote.call("kernel_times", steps=steps))
                    except (ChildFailure, UserError) as error:
                        missing["kernels"] = str(error)
                yield name, MeasuredEngine(preparation, timing, None, memory, missing, kernels=profile)


def ask_engines(
    engines: Mapping[str, EngineSpec],
    model: GPTConfig,
    training: TrainConfig,
    ask: Callable[[str, RemoteObject], Answer],
    *,
    device: Device,
    factory: Callable[..., object] = make_engine,
) -> dict[str, Answer | Exception]:
    """Start the processes of engines and use them, all at once; nothing is timed.

    Args:
        engines: Engines by name.
        model: Shape of the model.
        training: Settings.
        ask: Called with the name and the engine, which has taken no step, in a thread of its own.
        device: Device of the engines.
        factory: Function that makes an engine, see :func:`measure_engines`.

    Returns:
        What ``ask`` returned for each engine, or the error of one that failed.
    """

    def use(name: str, start: Callable[[], RemoteObject]) -> Answer | Exception:
        try:
            return ask(name, start())
        except (ChildFailure, UserError) as error:
            return error

    with (
        _engine_processes(device, factory, empty_caches=False) as start,
        waiting_threads(len(engines) or 1) as pool,
    ):
        asked = {name: pool.submit(use, name, partial(start, spec, model, training)) for name, spec in engines.items()}
    return {name: answer.result() for name, answer in asked.items()}


@contextmanager
def _engine_processes(
    device: Device, factory: Callable[..., object], empty_caches: bool = True
) -> Iterator[Callable[..., RemoteObject]]:
    """Yield a function that starts the process of an engine. All processes end with the context."""
    with ExitStack() as stack:
        environment = {
            "JAX_TRACEBACK_FILTERING": "off",  # so that the last line of an error is its message
        }
        if empty_caches:  # torch.compile caches its results on disk; XLA does so only on request
            environment["TORCHINDUCTOR_CACHE_DIR"] = stack.enter_context(TemporaryDirectory())
        if device == "cpu":
            environment["JAX_PLATFORMS"] = "cpu"

        def start(
            spec: EngineSpec, model: GPTConfig, training: TrainConfig, *, reserved: float | None = None
        ) -> RemoteObject:
            arguments = {"spec": spec, "model": spec.model(model), "training": training, "device": device}
            made = RemoteObject(
                factory, arguments, environment={**environment, **jax_memory(reserved), **spec.environment}
            )
            return stack.enter_context(made)

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
        warmup_calls=0,  # _sampled() took one already
        rounds=rounds,
    )
    return Comparison({name: timing for name, timing in comparison.timings.items() if name not in failed}), failed


def _require_agreement(
    name: str, spec: EngineSpec, engine: _ReadyEngine, losses: dict[int, tuple[str, float]], dtype: str
) -> None:
    """Check the first loss against that of the first engine with as many devices, or note it as that."""
    if spec.network:  # another network is not the same function
        return
    loss = engine.preparation.loss
    other, expected = losses.setdefault(spec.devices, (name, loss))  # more devices have a larger batch
    if not abs(loss - expected) <= _AGREEMENT[dtype]:
        engine.remote.close()
        raise ValueError(
            f"its first loss {loss:.6f} differs from {expected:.6f}, that of {other}; at most "
            f"{_AGREEMENT[dtype]:.0e} is expected in {dtype}, so the two are not the same model"
        )
