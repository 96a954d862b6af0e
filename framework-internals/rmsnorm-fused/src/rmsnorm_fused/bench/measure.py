"""Measurements of one shape: errors against float64, and times against a copy of the same bytes."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch

from benchkit import Comparison, Quantity, Record, compare
from benchkit.device import Device
from benchkit.errors import first_line, lacks_memory, why_missing, without_frames
from benchkit.processes import budget
from benchkit.results import Label
from benchkit.run import Run, Step
from benchkit.timing import Inputs, capturable_stream, rotating_inputs
from benchkit.timing.limits import fraction_of_limit
from benchkit.timing.plain_copies import plain_copy
from benchkit.timing.statistics import worst
from rmsnorm_fused.bench.accuracy import Part, expected, expected_quantised, expected_row_scales
from rmsnorm_fused.bench.candidates import (
    COPY,
    EAGER,
    EPS,
    OWN,
    Candidate,
    CompileMode,
    Quantiser,
    compiled,
    compiled_name,
)
from rmsnorm_fused.options import Options
from rmsnorm_fused.torch_private import kept_graphs

Pass = Literal["forward", "backward"]
Tensors = tuple[torch.Tensor, ...]
PASSES: tuple[Pass, ...] = get_args(Pass)

# How many rows x columns tensors a pass must at least read or write. Forward: x and y; backward: x, dy and dx. With a
# residual: x, residual, y and s; and s, dy, ds and dx. The weight, its gradient and one number per row are not counted;
# they are a few thousandths at 4096 columns.
_TENSORS_MOVED: dict[tuple[Pass, bool], int] = {
    ("forward", False): 2,
    ("backward", False): 3,
    ("forward", True): 4,
    ("backward", True): 4,
}
READS: dict[Pass, Literal[1, 2]] = {"forward": 1, "backward": 2}  # tensors that a pass without a residual reads
PARTS: dict[Pass, tuple[Part, ...]] = {"forward": ("y", "s"), "backward": ("dx", "dweight", "dbias")}
_REPEATS = 3  # runs of a backward pass whose bits are compared


@dataclass(frozen=True)
class Case:
    """One shape to time.

    Attributes:
        group: Section of the report: ``"headline"``, ``"widths"``, ``"add"``, ``"batches"``, ``"dtypes"`` or
            ``"operators"``.
        rows: Number of rows, M.
        columns: Number of columns, N.
        dtype: Dtype of the tensors and the weight.
        passes: Which passes to time.
        compile_modes: Modes of ``torch.compile`` to time as well; each compiles for each shape.
    """

    group: str
    rows: int
    columns: int
    dtype: torch.dtype
    passes: tuple[Pass, ...] = ("forward", "backward")
    compile_modes: tuple[CompileMode, ...] = ()

    @property
    def residual(self) -> bool:
        """Whether a residual is added first."""
        return self.group == "add"

    @property
    def labels(self) -> dict[str, Label]:
        """The labels that identify the case in a record."""
        kind = str(self.dtype).removeprefix("torch.")
        return {"group": self.group, "rows": self.rows, "columns": self.columns, "dtype": kind}

    def bytes_moved(self, which: Pass) -> int:
        """The least number of bytes that a pass must read and write."""
        return _TENSORS_MOVED[which, self.residual] * self.rows * self.columns * self.dtype.itemsize

    def tensors(self, device: Device) -> Tensors:
        """(x, dy), or with a residual (x, residual, dy, ds): the inputs, then the gradients of the outputs."""
        shape = (self.rows, self.columns)
        return tuple(torch.randn(shape, device=device).to(self.dtype) for _ in range(4 if self.residual else 2))

    def weight(self, device: Device) -> torch.Tensor:
        """A weight near one that requires a gradient."""
        return (1 + 0.1 * torch.randn(self.columns, device=device)).to(self.dtype).requires_grad_()

    @staticmethod
    def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
        """Split the result of :meth:`tensors` into the inputs and the gradients of the outputs."""
        middle = len(tensors) // 2
        return tensors[:middle], tensors[middle:]

    def outputs(self, candidate: Candidate, inputs: Tensors, weight: torch.Tensor) -> Tensors:
        """(y,), or with a residual (y, s)."""
        if not self.residual:
            (x,) = inputs
            return (candidate.plain(x, weight),)
        assert candidate.add is not None
        x, residual = inputs
        return candidate.add(x, residual, weight)


class PartError(NamedTuple):
    """The error of one result of an implementation.

    Attributes:
        relative: Largest error divided by the largest value.
        share_of_bound: Largest error divided by the bound for an implementation that rounds once, see ``accuracy``.
    """

    relative: float
    share_of_bound: float


def measure_case(run: Run, case: Case, candidates: Mapping[str, Candidate]) -> tuple[str, ...]:
    """Check and time every candidate at one shape; for the headline, also measure the memory of each."""
    with kept_graphs():
        timed = {**candidates, **_compiling(case)}
        errors = _errors(run, case, timed)
        timed = {name: timed[name] for name in errors}
        for which in case.passes:
            failed: dict[str, Exception] = {}
            with budget.at_least(budget.TIMING):
                timings = _timings(run, case, timed, which, failed)
            for name in timings.timings:
                run.add(_record(case, which, name, timings, {} if name == COPY else errors[name]))
            for name, cause in failed.items():
                run.absent(f"The {which} pass of {_case_of(name, case)}", why_missing(cause))
        if case.group == "headline" and run.device == "cuda":
            run.steps(
                Step(f"the memory of {_case_of(name, case)}", partial(_peak_memory, case, name, candidate))
                for name, candidate in timed.items()
            )
    return tuple(timed)


def measure_calls(
    run: Run,
    taking_part: Mapping[Case, Collection[str]],
    candidates: Mapping[str, Candidate],
    *,
    gradient: bool,
) -> None:
    """Time a call until it returns to Python, without waiting for a GPU's kernel: the overhead that small batches see.

    All shapes are timed in the same rounds. A shared host has phases of about ten seconds in which every call takes
    half as long again; they should affect every shape equally. Candidates of torch.compile take no part with a
    gradient: compiling each for training would take seconds per shape.
    """
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    labels: dict[str, dict[str, Label]] = {}
    for case, names in taking_part.items():
        timed = candidates if gradient else {**candidates, **_compiling(case)}
        x, _ = case.tensors(run.device)
        weight = case.weight(run.device).requires_grad_(gradient)
        for name in names:
            if name in timed:
                calls[_case_of(name, case)] = partial(timed[name].plain, x, weight)
                labels[_case_of(name, case)] = {**case.labels, "implementation": name, "gradient": gradient}
    failed: dict[str, Exception] = {}
    with kept_graphs(), torch.set_grad_enabled(gradient):
        timings = compare(
            calls,
            device=run.device,
            clock="wall-clock",
            block=lambda result: None,
            seconds=run.configuration["call_seconds"],
            failed=failed,
        )
    if run.device == "cuda":
        torch.cuda.synchronize()
    run.add_all(Record("call", labels[call], {"time": timing.quantity()}) for call, timing in timings.timings.items())
    for call, cause in failed.items():
        run.absent(f"A call of {call}", why_missing(cause))


def _compiling(case: Case) -> dict[str, Candidate]:
    """The torch.compile candidates of a case by name; they compile at their first call."""
    return {compiled_name(mode): compiled(mode) for mode in case.compile_modes}


def measure_determinism(run: Run, case: Case, candidates: Mapping[str, Candidate]) -> None:
    """Measure the backward pass with torch's deterministic mode on and off: its time, and whether its bits repeat."""
    own = [name for name in candidates if name in OWN]
    if not own:
        return
    weight = case.weight(run.device)
    sets = rotating_inputs(lambda: case.tensors(run.device), device=run.device)
    default, deterministic = _gradients_in_mode(False), _gradients_in_mode(True)
    with capturable_stream(run.device):
        graphs = {name: _graphs(case, candidates[name], sets, weight) for name in own}
        timings = compare(
            dict.fromkeys(own, default) | {f"{name}, deterministic": deterministic for name in own},
            device=run.device,
            inputs=graphs | {f"{name}, deterministic": graphs[name] for name in own},
            seconds=run.configuration["seconds"],
        )
        for name in own:
            other = f"{name}, deterministic"
            values = {
                "default": timings[name].quantity(),
                "deterministic": timings[other].quantity(),
                "speedup": timings.speedup(name, over=other),
            }
            data = {
                "default repeats": _repeats(default, graphs[name][0]),
                "deterministic repeats": _repeats(deterministic, graphs[name][0]),
                "note": timings[name].note,
            }
            run.record("determinism", {**case.labels, "implementation": name}, values, data)


def measure_quantised(run: Run, case: Case, quantisers: Mapping[str, Quantiser]) -> None:
    """Measure float8 results with one scale per row, computed in one kernel or in several.

    PyTorch has no copy that writes fewer bytes than it reads, so the limit is the rate of a plain copy.
    """
    torch.manual_seed(0)
    x, _ = case.tensors(run.device)
    weight = case.weight(run.device).detach()
    shares: dict[str, float] = {}
    failed: dict[str, Exception] = {}
    for name, quantise in quantisers.items():
        try:
            shares[name] = _float8_share_of_bound(quantise, x, weight)
        except Exception as error:
            failed[name] = without_frames(error)
            continue
        if name in OWN and not shares[name] <= 1:
            raise RuntimeError(f"{name}, float8 {case.rows} x {case.columns}: error over its bound: {shares[name]}")
    sets = rotating_inputs(lambda: (case.tensors(run.device)[0],), device=run.device)
    timings = compare(
        {COPY: plain_copy(run.device, sets)}
        | {name: lambda x, f=quantise: f(x, weight) for name, quantise in quantisers.items() if name in shares},
        device=run.device,
        inputs=sets,
        seconds=run.configuration["seconds"],
        failed=failed,
    )
    if COPY in failed:
        raise failed[COPY]
    for name, cause in failed.items():
        run.absent(f"The quantised result of {name}", why_missing(cause))
    limit = case.bytes_moved("forward") / timings[COPY].median
    moved = case.rows * case.columns * (case.dtype.itemsize + torch.float8_e4m3fn.itemsize)
    for name in [name for name in quantisers if name in timings.timings]:
        time = timings[name].quantity()
        values = {
            "time": time,
            "bandwidth": time.per(moved, "B/s"),
            "fraction": Quantity(fraction_of_limit(moved, time.value, limit), ""),
            "share_of_bound": Quantity(shares[name], ""),
        }
        if name != EAGER and EAGER in timings.timings:
            values["speedup"] = timings.speedup(name, over=EAGER)
        run.add(Record("quantised", {**case.labels, "implementation": name}, values, {"note": timings[name].note}))


def _float8_share_of_bound(quantise: Quantiser, x: torch.Tensor, weight: torch.Tensor) -> float:
    y, scales = quantise(x, weight)
    options = Options(EPS)
    return worst(
        (
            expected_quantised(x, weight, scales, options).share_of_bound(y),
            expected_row_scales(x, weight, options).share_of_bound(scales),
        )
    )


def _errors(run: Run, case: Case, candidates: Mapping[str, Candidate]) -> dict[str, dict[Part, PartError]]:
    """Compute the errors against float64 of every candidate for this case, before anything is timed."""
    torch.manual_seed(0)
    inputs, gradients = case.halves(case.tensors(run.device))
    weight = case.weight(run.device)
    residual, ds = (inputs[1], gradients[1]) if case.residual else (None, None)
    references = expected(inputs[0], weight, gradients[0], EPS, residual=residual, ds=ds)
    errors_of: dict[str, dict[Part, PartError]] = {}
    for name, candidate in candidates.items():
        if case.residual and candidate.add is None:
            continue
        if candidate.widest is not None and case.columns > candidate.widest:
            run.absent(_case_of(name, case), f"it takes at most {candidate.widest} columns")
            continue
        try:
            if errors_of and name not in OWN:
                budget.require("it")  # those that passed are timed
            results = _results(case, candidate, inputs, gradients, weight)
        except Exception as error:  # an optional library may not support this shape
            if lacks_memory(error) or isinstance(error, budget.OutOfTime):
                run.absent(_case_of(name, case), why_missing(error))
            elif name in (EAGER, *OWN):
                raise
            else:
                run.absent(_case_of(name, case), f"it raised {first_line(error)}")
            continue
        errors = {
            part: PartError(references[part].relative_error(result), references[part].share_of_bound(result))
            for part, result in results.items()
        }
        share = worst(error.share_of_bound for error in errors.values())
        if name in OWN and not share <= 1:
            raise RuntimeError(f"{_case_of(name, case)}, {case.dtype}: error over its bound: {errors}")
        if not math.isfinite(share):  # a record holds finite numbers only
            run.absent(_case_of(name, case), "its results are not finite")
            continue
        errors_of[name] = errors
    return errors_of


def _case_of(name: str, case: Case) -> str:
    return f"{name} at {case.rows} × {case.columns}{' with a residual' if case.residual else ''}"


def _results(
    case: Case, candidate: Candidate, inputs: Tensors, gradients: Tensors, weight: torch.Tensor
) -> dict[Part, torch.Tensor]:
    backward = "backward" in case.passes
    with torch.set_grad_enabled(backward):
        leaves = tuple(x.detach().requires_grad_(backward) for x in inputs)
        outputs = case.outputs(candidate, leaves, weight)
        names: tuple[Part, ...] = ("y", "s")
        results = dict(zip(names, (output.detach() for output in outputs), strict=False))
        if backward:
            dx, *_, dweight = torch.autograd.grad(outputs, (*leaves, weight), gradients)
            results |= {"dx": dx, "dweight": dweight}
    return results


def _timings(
    run: Run, case: Case, candidates: Mapping[str, Candidate], which: Pass, failed: dict[str, Exception]
) -> Comparison:
    """Time a pass of every candidate; those that fail are entered in ``failed``."""
    weight = case.weight(run.device)
    sets = rotating_inputs(lambda: case.tensors(run.device), device=run.device)
    seconds = run.configuration["seconds"] * (0.3 if case.group == "batches" else 1.0)
    copy = copy_of(case, which, run.device, sets)
    functions: dict[str, Callable[..., Any]] = {} if copy is None else {COPY: copy}
    if which == "forward":
        for name, candidate in candidates.items():
            functions[name] = lambda *tensors, c=candidate: case.outputs(c, case.halves(tensors)[0], weight)
        with torch.no_grad():
            return compare(functions, device=run.device, inputs=sets, seconds=seconds, failed=failed)
    # Through autograd, as in a training step, on retained graphs.
    with capturable_stream(run.device):
        inputs: dict[str, Inputs] = {} if copy is None else {COPY: sets}
        for name, candidate in candidates.items():
            try:
                inputs[name] = _graphs(case, candidate, sets, weight)
            except Exception as error:  # all graphs are kept at once, which may be too much
                failed[name] = without_frames(error)
        functions |= {name: gradients for name in inputs if name != COPY}
        return compare(functions, device=run.device, inputs=inputs, seconds=seconds, failed=failed)


def copy_of(case: Case, which: Pass, device: Device, sets: Sequence[Tensors]) -> Callable[..., Any] | None:
    """A function with as many reads and writes as the pass, into new memory; None on a CPU with a residual."""
    if not case.residual:
        return plain_copy(device, sets, reads=READS[which])
    if device == "cpu":
        return None
    from benchkit.timing.stream_kernels import add_and_subtract

    return lambda x, residual, *_: add_and_subtract(x, residual, torch.empty_like(x), torch.empty_like(x))


def _graphs(case: Case, candidate: Candidate, sets: Sequence[Tensors], weight: torch.Tensor) -> Inputs:
    """Run the forward pass and return the arguments of :func:`gradients`."""
    graphs: list[tuple[Tensors, Tensors, Tensors]] = []
    for tensors in sets:
        inputs, gradients = case.halves(tensors)
        leaves = tuple(x.detach().requires_grad_() for x in inputs)
        graphs.append((case.outputs(candidate, leaves, weight), (*leaves, weight), gradients))
    return graphs


def gradients(outputs: Tensors, inputs: Tensors, incoming: Tensors) -> Tensors:
    """The gradients of what a function returned, on a graph that is kept."""
    return torch.autograd.grad(outputs, inputs, incoming, retain_graph=True)


def _gradients_in_mode(deterministic: bool) -> Callable[..., Tensors]:
    """:func:`gradients` with torch's deterministic mode on or off; both set it in every call, at the same cost."""

    def in_mode(outputs: Tensors, inputs: Tensors, given: Tensors) -> Tensors:
        with _deterministic_algorithms(deterministic):
            return gradients(outputs, inputs, given)

    return in_mode


@contextmanager
def _deterministic_algorithms(on: bool) -> Iterator[None]:
    """Set torch's deterministic mode without its filling of new memory, which is not part of any kernel."""
    settings: Any = torch.utils.deterministic
    enabled, fills = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(on)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled)
        settings.fill_uninitialized_memory = fills


def _repeats(function: Callable[..., Tensors], arguments: tuple[Any, ...]) -> bool:
    """Whether a backward pass gives the same bits in every run."""
    first = function(*arguments)
    again = [function(*arguments) for _ in range(_REPEATS - 1)]
    return all(torch.equal(a, b) for other in again for a, b in zip(first, other, strict=True))


def rates(case: Case, which: Pass, name: str, timings: Comparison) -> dict[str, Quantity]:
    """The time of an implementation, its bandwidth, and its share of the copy's if there is one."""
    time = timings[name].quantity()
    values = {"time": time, "bandwidth": time.per(case.bytes_moved(which), "B/s")}
    if name != COPY and COPY in timings.timings:
        values["fraction"] = timings.speedup(name, over=COPY)
    return values


def _record(case: Case, which: Pass, name: str, timings: Comparison, errors: Mapping[Part, PartError]) -> Record:
    values = rates(case, which, name, timings)
    of_pass = {part: error for part, error in errors.items() if part in PARTS[which]}
    if of_pass:
        values["share_of_bound"] = Quantity(worst(error.share_of_bound for error in of_pass.values()), "")
        values |= {f"error_{part}": Quantity(error.relative, "") for part, error in of_pass.items()}
    if name not in (COPY, EAGER) and EAGER in timings.timings:
        values["speedup"] = timings.speedup(name, over=EAGER)
    data = {"clock": timings[name].method, "note": timings[name].note}
    return Record(which, {**case.labels, "implementation": name}, values, data)


def _peak_memory(case: Case, name: str, candidate: Candidate) -> Iterator[Record]:
    """The peak memory of forward and backward, with their results but without their inputs: a record ``memory``."""
    inputs, gradients = case.halves(case.tensors("cuda"))
    weight = case.weight("cuda")
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = case.outputs(candidate, leaves, weight)
    leaf_gradients = torch.autograd.grad(outputs, (*leaves, weight), gradients)
    peak = torch.cuda.max_memory_allocated() - before
    del outputs, leaf_gradients
    yield Record("memory", {**case.labels, "implementation": name}, {"peak": Quantity(peak, "B")})
