"""The main job: every implementation checked against float64, then timed against the copy limit of the machine."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchkit import Quantity, Record, compare
from benchkit.device import Device
from benchkit.limits import memory_limits
from benchkit.results import Label
from benchkit.run import Lens, Run
from benchkit.timing import capturable_stream, rotating_inputs
from rmsnorm_fused.accuracy import Part, expected
from rmsnorm_fused.contestants import COMPILED, COPY, EAGER, EPS, OWN, RmsNorm, compiled, usable
from rmsnorm_fused.report import REPORT
from rmsnorm_fused.torch_private import kept_graphs

Pass = Literal["forward", "backward"]

# Tensors of rows x columns that a pass must read or write at least: forward x and y; backward x, dy and dx. The
# weight, its gradient and one number a row are left out: a few thousandths at 4096 columns. The copy that is the limit
# moves the same: clone() forward, an addition backward.
TENSORS_MOVED: dict[Pass, int] = {"forward": 2, "backward": 3}
PARTS: dict[Pass, tuple[Part, ...]] = {"forward": ("y",), "backward": ("dx", "dweight")}


@dataclass(frozen=True)
class Case:
    """One shape to time.

    Attributes:
        group: ``"headline"``, ``"widths"`` or ``"batches"``.
        rows: M.
        columns: N.
        passes: which of them.
        with_compile: whether torch.compile takes part; it compiles for each shape.
    """

    group: str
    rows: int
    columns: int
    passes: tuple[Pass, ...]
    with_compile: bool


def configure(device: Device, quick: bool) -> dict[str, Any]:
    """Sizes and times for a machine, as plain JSON."""
    if device == "cuda":
        elements = 1 << (24 if quick else 27)
        widths = [4096, 65536] if quick else [512, 2048, 8192, 16384, 65536, 262144]
        return {
            "dtype": "bfloat16",
            "headline": [elements // 4096, 4096],
            "widths": widths,
            "elements": elements,
            "batches": [1, 8, 64, 256],
            "batch_columns": 4096,
            "seconds": 0.3 if quick else 1.5,
            "compiled_groups": ["headline"] if quick else ["headline", "widths"],
        }
    return {
        "dtype": "float32",
        "headline": [1024 if quick else 4096, 1024],
        "widths": [256, 4096] if quick else [256, 4096, 65536],
        "elements": 1 << (20 if quick else 22),
        "batches": [1, 16],
        "batch_columns": 1024,
        "seconds": 0.3 if quick else 2.0,
        "compiled_groups": ["headline"],
    }


def cases(configuration: Mapping[str, Any]) -> Iterator[Case]:
    """The shapes to time, the most important one first."""
    rows, columns = configuration["headline"]
    both: tuple[Pass, ...] = ("forward", "backward")
    with_compile = configuration["compiled_groups"]
    yield Case("headline", rows, columns, both, "headline" in with_compile)
    for width in configuration["widths"]:
        yield Case("widths", max(configuration["elements"] // width, 1), width, both, "widths" in with_compile)
    for batch in configuration["batches"]:
        yield Case("batches", batch, configuration["batch_columns"], ("forward",), False)


def collect(run: Run) -> None:
    """Measure everything that :func:`configure` asks for."""
    configuration = run.configuration
    dtype: torch.dtype = getattr(torch, configuration["dtype"])
    rows, columns = configuration["headline"]
    with run.working("memory limits"):
        for record in memory_limits(run.device, bytes_per_tensor=rows * columns * dtype.itemsize):
            run.add(record)
    with run.working("building the extensions"):
        functions, absent = usable(run.device)
    for name, why in absent.items():
        run.absent(f"`{name}`", why)
    for case in cases(configuration):
        with kept_graphs(), run.working(f"{case.group}: {case.rows} x {case.columns}"):
            contestants = {**functions, COMPILED: compiled()} if case.with_compile else functions
            _measure_case(run, case, contestants, dtype)


def _measure_case(run: Run, case: Case, contestants: Mapping[str, RmsNorm], dtype: torch.dtype) -> None:
    errors = _errors(case, contestants, dtype, run.device)
    for which in case.passes:
        timings = _timings(run, case, contestants, dtype, which)
        moved = TENSORS_MOVED[which] * case.rows * case.columns * dtype.itemsize
        for name in (COPY, *contestants):
            time = timings[name].quantity()
            values = {"time": time, "bandwidth": time.per(moved, "B/s")}
            if name != COPY:
                values |= errors[name, which] | {"fraction": timings.speedup(name, over=COPY)}
            if name not in (COPY, EAGER):
                values["speedup"] = timings.speedup(name, over=EAGER)
            labels: dict[str, Label] = {"group": case.group, **_shape_labels(case), "implementation": name}
            run.add(Record(which, labels, values, {"clock": timings[name].method, "note": timings[name].note}))
    if case.group == "batches" and run.device == "cuda":
        _measure_calls(run, case, contestants, dtype)
    gc.collect()  # autograd graphs of the last shape hold gigabytes
    if run.device == "cuda":
        torch.cuda.empty_cache()


def _shape_labels(case: Case) -> dict[str, Label]:
    return {"rows": case.rows, "columns": case.columns}


def _tensors(case: Case, dtype: torch.dtype, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    x, dy = (torch.randn(case.rows, case.columns, device=device).to(dtype) for _ in range(2))
    return x, dy


def _weight(case: Case, dtype: torch.dtype, device: Device) -> torch.Tensor:
    return (1 + 0.1 * torch.randn(case.columns, device=device)).to(dtype).requires_grad_()


def _errors(
    case: Case, contestants: Mapping[str, RmsNorm], dtype: torch.dtype, device: Device
) -> dict[tuple[str, Pass], dict[str, Quantity]]:
    """Errors against float64, before anything is timed.

    Raises:
        RuntimeError: when an implementation of this package is beyond its bound: its speed would mean nothing.
    """
    torch.manual_seed(0)
    x, dy = _tensors(case, dtype, device)
    weight = _weight(case, dtype, device)
    references = expected(x, weight, dy, EPS)
    found: dict[tuple[str, Pass], dict[str, Quantity]] = {}
    for name, function in contestants.items():
        leaf = x.detach().requires_grad_()
        y = function(leaf, weight)
        results: dict[Part, torch.Tensor] = {"y": y.detach()}
        results["dx"], results["dweight"] = torch.autograd.grad(y, (leaf, weight), dy)
        for which in case.passes:
            shares = {part: references[part].share_of_bound(results[part]) for part in PARTS[which]}
            if name in OWN and not max(shares.values()) <= 1:
                raise RuntimeError(f"{name}, {case.rows} x {case.columns} {dtype}: error over its bound: {shares}")
            found[name, which] = {"share_of_bound": Quantity(max(shares.values()), "")} | {
                f"error_{part}": Quantity(references[part].relative_error(results[part]), "") for part in PARTS[which]
            }
    return found


def _timings(run: Run, case: Case, contestants: Mapping[str, RmsNorm], dtype: torch.dtype, which: Pass) -> Any:
    weight = _weight(case, dtype, run.device)
    sets = rotating_inputs(lambda: _tensors(case, dtype, run.device), device=run.device)
    seconds = run.configuration["seconds"] * (0.3 if case.group == "batches" else 1.0)
    if which == "forward":
        functions: dict[str, Any] = {COPY: lambda x, _: x.clone()}
        functions |= {name: lambda x, _, f=function: f(x, weight) for name, function in contestants.items()}
        with torch.no_grad():
            return compare(functions, device=run.device, inputs=sets, seconds=seconds)
    # Through autograd, as a training step calls it, on graphs that are kept.
    with capturable_stream(run.device):
        graphs: dict[str, list[tuple[Any, ...]]] = {COPY: [(None, x, dy) for x, dy in sets]}
        for name, function in contestants.items():
            leaves = [(x.detach().requires_grad_(), dy) for x, dy in sets]
            graphs[name] = [(function(leaf, weight), leaf, dy) for leaf, dy in leaves]
        return compare(
            dict.fromkeys(contestants, lambda y, x, dy: torch.autograd.grad(y, (x, weight), dy, retain_graph=True))
            | {COPY: lambda _, x, dy: x + dy},
            device=run.device,
            inputs=graphs,
            seconds=seconds,
        )


def _measure_calls(run: Run, case: Case, contestants: Mapping[str, RmsNorm], dtype: torch.dtype) -> None:
    """The time until a call returns to Python, the GPU working behind: what a small batch pays."""
    weight = _weight(case, dtype, run.device).detach()
    x, _ = _tensors(case, dtype, run.device)
    with torch.no_grad():
        timings = compare(
            {name: lambda f=function: f(x, weight) for name, function in contestants.items()},
            device=run.device,
            clock="wall-clock",
            block=lambda result: None,
            seconds=0.3 * run.configuration["seconds"],
        )
    torch.cuda.synchronize()
    for name in contestants:
        labels: dict[str, Label] = {**_shape_labels(case), "implementation": name}
        run.record("call", labels, {"time": timings[name].quantity()})


def build_lens(root: Path) -> Lens:
    """The lens of this package.

    Args:
        root: the folder with ``reports/``.
    """
    return Lens("rmsnorm-fused", root, configure, collect, REPORT)
