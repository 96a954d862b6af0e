"""Tokens per second of the same step in either framework, measured round by round in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from tempfile import TemporaryDirectory

from benchkit import Comparison, Quantity, Timing, UserError, compare
from benchkit.device import Device
from benchkit.processes import ChildFailure, RemoteObject
from jax_baseline.timing.engines import EngineSpec, Preparation, make_engine
from jax_baseline.timing.kernel_times import KernelTime
from torch_baseline.config import GPTConfig, TrainConfig

# First losses must agree this well before anything is timed: far above what rounding does to a mean over thousands of
# tokens, far below what any difference of the model would.
_AGREEMENT = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True)
class MeasuredEngine:
    """One engine, timed against the reference.

    Attributes:
        preparation: what its first step took.
        timing: seconds of the steps of one sample.
        speedup: over the reference, paired round by round; 1 for the reference itself.
        peak_memory: bytes; None on a CPU.
        missing: what was asked of the engine once it was timed and came to nothing, ``peak memory`` or ``inspection``,
            and why.
    """

    preparation: Preparation
    timing: Timing
    speedup: Quantity
    peak_memory: int | None
    missing: Mapping[str, str] = field(default_factory=dict)

    def figures(self, tokens: int, steps: int, mfu: float | None) -> dict[str, Quantity]:
        """What a report keeps of it; what was not measured is left out.

        Args:
            tokens: of a step, over all devices.
            steps: of a sample.
            mfu: of a token a second, see :func:`mfu_per_token`.
        """
        rate = self.timing.quantity().per(tokens * steps, "tokens/s")
        values = {
            "rate": rate,
            "step": Quantity(self.timing.median / steps, "s"),
            "first step": Quantity(self.preparation.first_step_seconds, "s"),
            "loss": Quantity(self.preparation.loss, "nats"),
            "speedup": self.speedup,
        }
        stages = self.preparation.compile_seconds
        values |= {f"{stage} time": Quantity(seconds, "s") for stage, seconds in stages.items()}
        optional: dict[str, tuple[float | None, str]] = {
            "peak memory": (self.peak_memory, "B"),
            "temporaries": (self.preparation.temporaries, "B"),
            "XLA FLOPs": (self.preparation.flops, "FLOP"),
            "MFU": (None if mfu is None else rate.value * mfu, "share"),
        }
        return values | {key: Quantity(value, unit) for key, (value, unit) in optional.items() if value is not None}


def mfu_per_token(model: GPTConfig, training: TrainConfig, device: Device, devices: int) -> float | None:
    """Model FLOPs utilisation of one token a second, of all devices together.

    It is the model's operations a second over the datasheet's dense peak for the dtype.

    Args:
        model: says what a token costs.
        training: says in which dtype.
        device: the kind.
        devices: that share the work.

    Returns:
        None for a CPU or a GPU whose datasheet is not kept.
    """
    import torch

    from torch_baseline.model import flops_per_token
    from torch_baseline.throughput import peak_flops

    peak = peak_flops(torch.device(device), training.dtype, devices)
    return None if peak is None else flops_per_token(model) / peak


@dataclass(frozen=True)
class Trial:
    """What a sweep found of one engine.

    Attributes:
        preparation: its first step, taken while others prepared theirs: the seconds are no compile times to quote.
        timing: seconds of one step, against the others of its group alone.
        peak_memory: bytes; None on a CPU, and where asking for it failed.
        kernels: seconds a step by kernel, the largest first; empty unless asked for.
        unprofiled: why there are none although they were asked for.
        memory_unknown: why asking for the peak memory failed.
    """

    preparation: Preparation
    timing: Timing
    peak_memory: int | None
    kernels: tuple[KernelTime, ...] = ()
    unprofiled: str = ""
    memory_unknown: str = ""


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
    """Time the engines in processes of their own that stay alive, one of them running at any time.

    The first engine is the reference. It is in every group, so that each engine's samples are paired with its own.

    Args:
        engines: by the name they are reported under; one that fails costs itself alone, unless it is the reference.
        model: the shape.
        training: batch, dtype, optimizer.
        device: where they run.
        rounds: of one sample each.
        steps: that one sample holds; enough of them that the message to the worker (a tenth of a millisecond) is lost.
        together: how many engines besides the reference the device's memory holds at a time; by default all of them.
        empty_caches: begin with nothing compiled. Else Inductor has what it compiled before for this user, and a first
            step is no measure of what compiling takes.
        factory: makes an engine in its process, as :func:`jax_baseline.timing.engines.make_engine` does.
        inspect: called once with each engine's name and worker, when its group is timed and all in it have taken
            :func:`steps_taken` steps; what the worker fails of there, the engine has under ``missing``.

    Returns:
        What was measured by engine, in their order, or the reason why nothing was.

    Raises:
        ChildFailure: if the reference fails before it is timed. If it fails later, only the groups without it are lost.
        UserError: if it fails for what the user can mend.
    """
    reference, *others = engines
    found: dict[str, MeasuredEngine | str] = {}
    with _workers(device, factory, empty_caches) as start:
        first = start(engines[reference], model, training)
        expected = _prepare(first, steps)
        devices = engines[reference].devices
        for group in _groups(others, together) or [[]]:
            with _workers(device, factory, empty_caches) as start_more, ThreadPoolExecutor(len(group) or 1) as pool:
                # Processes start at the same time; what is timed, compiling included, they do one after another.
                starting = {name: pool.submit(start_more, engines[name], model, training) for name in group}
                wait(starting.values())
                ready = {reference: (first, expected)}
                for name, started in starting.items():
                    try:
                        worker = started.result()
                        # More devices have more rows, and so another loss.
                        loss = expected.loss if engines[name].devices == devices else None
                        ready[name] = (worker, _prepare(worker, steps, loss, training.dtype))
                    except (ChildFailure, UserError, ValueError) as error:
                        found[name] = str(error)
                try:
                    group_found = _measure_group(ready, reference, rounds, steps)
                except (ChildFailure, UserError) as error:
                    if reference not in found:
                        raise
                    group_found = dict.fromkeys(ready, f"the reference, {reference}, failed beside it: {error}")
                for name, measured in group_found.items():
                    if name not in found:
                        found[name] = _inspected(name, measured, ready[name][0], inspect)
    return {name: found[name] for name in engines}


def _inspected(
    name: str, measured: MeasuredEngine | str, worker: RemoteObject, inspect: Callable[[str, RemoteObject], None] | None
) -> MeasuredEngine | str:
    """What was measured; an inspection that fails, or takes the worker with it, costs itself alone."""
    if inspect is None or isinstance(measured, str):
        return measured
    try:
        inspect(name, worker)
    except (ChildFailure, UserError) as error:
        return replace(measured, missing={**measured.missing, "inspection": str(error)})
    return measured


def _peak_memory(worker: RemoteObject) -> tuple[int | None, str]:
    """Bytes, or None and why asking failed."""
    try:
        return worker.call("peak_memory"), ""
    except (ChildFailure, UserError) as error:
        return None, str(error)


def steps_taken(rounds: int, steps: int) -> int:
    """Steps that an engine has taken once :func:`measure_engines` has timed it: one, two samples and the rounds."""
    return 1 + (2 + rounds) * steps


def _prepare(worker: RemoteObject, steps: int, expected_loss: float | None = None, dtype: str = "") -> Preparation:
    """The first step, and a sample's worth of others, which shows whether they fit into memory beside those before."""
    try:
        preparation = Preparation(**worker.call("prepare"))
        if expected_loss is not None:
            _require_agreement(preparation.loss, expected_loss, dtype)
        worker.call("run", steps=steps)
    except (ChildFailure, UserError, ValueError):
        worker.close()  # and with it what it holds of the device
        raise
    return preparation


def _measure_group(
    ready: Mapping[str, tuple[RemoteObject, Preparation]], reference: str, rounds: int, steps: int
) -> dict[str, MeasuredEngine | str]:
    """What was measured of each engine, or the reason why it failed in a round that was timed."""
    comparison, failed = _compare({name: worker for name, (worker, _) in ready.items()}, rounds, steps)
    if reference in failed:
        raise failed[reference]
    found: dict[str, MeasuredEngine | str] = {name: str(error) for name, error in failed.items()}
    for name, timing in comparison.timings.items():
        worker, preparation = ready[name]
        speedup = comparison.speedup(name, over=reference)
        memory, why = _peak_memory(worker)
        found[name] = MeasuredEngine(preparation, timing, speedup, memory, {"peak memory": why} if why else {})
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
    """Try settings quickly: engines in groups that memory holds at the same time.

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
    for group in _groups(list(engines), together):
        with _workers(device) as start:
            prepared: dict[str, tuple[RemoteObject, Preparation] | str] = {}
            for name in group:  # one after another: compilers time their kernels on the device
                try:
                    worker = start(engines[name], model, training)
                    prepared[name] = worker, _prepare(worker, steps)
                except (ChildFailure, UserError) as error:
                    prepared[name] = str(error).strip()
            ready = {name: found for name, found in prepared.items() if not isinstance(found, str)}
            yield from ((name, found) for name, found in prepared.items() if isinstance(found, str))
            if not ready:
                continue
            comparison, failed = _compare({name: worker for name, (worker, _) in ready.items()}, rounds, steps)
            yield from ((name, str(error).strip()) for name, error in failed.items())
            for name, timing in comparison.timings.items():
                worker, preparation = ready[name]
                timing = replace(timing, samples=tuple(sample / steps for sample in timing.samples))
                memory, why = _peak_memory(worker)
                trial = Trial(preparation, timing, memory, memory_unknown=why)
                yield name, _with_kernels(trial, worker, steps) if kernels else trial


def _with_kernels(trial: Trial, worker: RemoteObject, steps: int) -> Trial:
    """The trial with its kernels; a profiler that fails, or takes the worker with it, costs them alone."""
    try:
        table = worker.call("kernel_times", steps=steps)
    except (ChildFailure, UserError) as error:
        return replace(trial, unprofiled=str(error))
    return replace(trial, kernels=tuple(KernelTime(*row) for row in table))


_Start = Callable[[EngineSpec, GPTConfig, TrainConfig], RemoteObject]


@contextmanager
def _workers(
    device: Device, factory: Callable[..., object] = make_engine, empty_caches: bool = True
) -> Iterator[_Start]:
    """A function that starts a worker; all of them end with the context."""
    with ExitStack() as stack:
        environment = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_TRACEBACK_FILTERING": "off",  # a failure's last line is then its reason, not advice on tracebacks
        }
        if empty_caches:  # torch.compile keeps its results on disk, XLA only if it is told to
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
    workers: Mapping[str, RemoteObject], rounds: int, steps: int
) -> tuple[Comparison, dict[str, ChildFailure | UserError]]:
    """Time the engines round by round; one that fails leaves the rounds, which go on for the others.

    Returns:
        The timings of those that took every round, and what the others failed of.
    """
    failed: dict[str, ChildFailure | UserError] = {}

    def run(name: str) -> None:
        if name in failed:
            return
        try:
            workers[name].call("run", steps=steps)
        except (ChildFailure, UserError) as error:
            failed[name] = error
            workers[name].close()  # and with it what it holds of the device

    comparison = compare(
        {name: partial(run, name) for name in workers},
        # The workers wait for their device themselves: here a call is over when the work is.
        device="cpu",
        clock="wall-clock",
        warmup_calls=0,  # the first sample's worth of steps was taken when they were prepared
        rounds=rounds,
    )
    return Comparison({name: timing for name, timing in comparison.timings.items() if name not in failed}), failed


def _require_agreement(loss: float, expected: float, dtype: str) -> None:
    if not abs(loss - expected) <= _AGREEMENT[dtype]:
        raise ValueError(
            f"it does not compute the same as the reference: first losses {loss:.6f} and {expected:.6f}, "
            f"at most {_AGREEMENT[dtype]:.0e} apart in {dtype}"
        )
