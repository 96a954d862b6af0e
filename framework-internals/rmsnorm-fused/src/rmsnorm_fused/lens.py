"""What a run of the report measures on which machine, in which order, and in how much time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchkit.device import Device
from benchkit.processes import budget, memory
from benchkit.results import SMALLER
from benchkit.run import Lens, Run, Step
from benchkit.timing.comparison import last_level_cache
from benchkit.timing.freed_memory import keep_freed_memory
from benchkit.timing.limits import memory_limits, product_limits
from rmsnorm_fused.bench.candidates import Candidate, compiled_quantisers, usable
from rmsnorm_fused.bench.layer import measure_layer
from rmsnorm_fused.bench.measure import Case, Pass, measure_calls, measure_case, measure_determinism, measure_quantised
from rmsnorm_fused.bench.operators_alone import measure_operators
from rmsnorm_fused.bench.training import measure_training
from rmsnorm_fused.report.sections import report
from torch_baseline.config import TrainConfig
from torch_baseline.throughput import eager_step_that_fits

# The check against float64 has about twenty tensors of it at once, for each element of the tensors that are measured.
_ELEMENT_BYTES = 224
# The norms that a training step is timed with, at most: torch's, and three of this package.
_MODELS = 4


def configure(device: Device, quick: bool) -> dict[str, Any]:
    """The sizes and times of a run on a type of device, as plain JSON."""
    if device == "cuda":
        widths = [65536, 262144, 8192, 1024, 16384, 131072, 32768, 2048, 512]
        return {
            "dtype": "bfloat16",
            "other_dtypes": [] if quick else ["float32"],
            "elements": 1 << (24 if quick else 27),
            "headline": [1 << (12 if quick else 15), 4096],
            "widths": [65536] if quick else widths,
            "batches": [1, 64] if quick else [1, 8, 64, 256],
            "batch_columns": [4096] if quick else [4096, 8192],
            "determinism_columns": [4096] if quick else [4096, 65536, 262144],
            "compile_modes": {
                "headline": ["default"] if quick else ["default", "max-autotune-no-cudagraphs"],
                **({} if quick else {group: ["default"] for group in ("add", "widths", "batches")}),
            },
            "training": {
                "preset": "tiny" if quick else "gpt2-124m",  # the initial weights of four large models take 14 s
                "batch_size": None,
                "modes": ["eager"] if quick else ["eager", "compiled"],
                "seconds": 1.0 if quick else 5.0,
            },
            "seconds": 0.3 if quick else 1.5,
            "call_seconds": 0.6 if quick else 9.0,
            "shape_seconds": 3.0 if quick else 15.0,
        }
    return {
        "dtype": "float32",
        "other_dtypes": [] if quick else ["bfloat16"],
        "elements": 1 << (18 if quick else 22),
        "headline": [1 << (8 if quick else 12), 1024],
        # The larger tensors are the last-level cache in 16 bits and twice that in float32.
        "operator_rows": [1 << 8] if quick else [1 << 12, max(1 << 14, last_level_cache() >> 11)],
        "widths": [4096] if quick else [256, 4096, 65536],
        "batches": [1] if quick else [1, 16],
        "batch_columns": [1024] if quick else [1, 1024],
        "determinism_columns": [1024] if quick else [1024, 65536],
        "compile_modes": {} if quick else {"headline": ["default"]},
        "training": {
            "preset": "tiny",
            "batch_size": 2 if quick else None,
            "modes": ["eager"],
            "seconds": 0.5 if quick else 6.0,
        },
        "seconds": 0.15 if quick else 1.2,
        "call_seconds": 0.05 if quick else 1.4,
        "shape_seconds": 4.0,
    }


def fit(asked: Mapping[str, Any], device: Device, available: int) -> Mapping[str, Any]:
    """Make the tensors and the batch of the training step so small that they fit."""
    elements = memory.largest_that_fits(
        memory.halved(asked["elements"], asked["headline"][1]), lambda count: _ELEMENT_BYTES * count, available
    )
    training = asked["training"]
    wanted = (training["preset"], training["batch_size"] or TrainConfig.preset(training["preset"]).batch_size)
    chosen = eager_step_that_fits(*wanted, models=_MODELS, available=available)
    changes: dict[str, Any] = {}
    smaller = []
    if elements < asked["elements"]:
        rows, columns = asked["headline"]
        changes |= {"elements": elements, "headline": [max(rows * elements // asked["elements"], 1), columns]}
        smaller.append(f"tensors have {elements:,} elements instead of {asked['elements']:,}")
    if chosen != wanted:
        changes["training"] = {**training, "preset": chosen[0], "batch_size": chosen[1]}
        smaller.append(f"the training step takes batch {chosen[1]} of `{chosen[0]}` instead of {wanted[1]}")
    if smaller:
        changes[SMALLER] = [f"{' and '.join(smaller)}, since {memory.gib(available)} were free"]
    return changes


def collect(run: Run) -> None:
    """Take the measurements of :func:`configure`, the most important first."""
    if run.device == "cpu":
        run.record("freed memory", data={"kept": keep_freed_memory()})
    with run.working("building the extensions"), budget.apart():
        candidates, absent = usable(run.device)
    for what, why in absent.items():
        run.absent(what, why)
    run.steps(_steps(run, candidates))
    if "compiled" not in run.configuration["training"]["modes"]:
        run.absent(
            "The compiled training step", "compiling a model for each norm takes longer than everything else here"
        )


def _steps(run: Run, candidates: Mapping[str, Candidate]) -> Iterator[Step]:
    """All measurements, the most important first."""
    configuration = run.configuration
    rows, columns = configuration["headline"]
    headline = Case("headline", rows, columns, getattr(torch, configuration["dtype"]))
    a_shape = configuration["shape_seconds"]  # for all candidates, some of which compile for the shape
    all_calls = (
        a_shape + configuration["call_seconds"]
    )  # more than for a shape: if a shape is skipped, so are the calls
    batches: dict[Case, tuple[str, ...]] = {}

    def measure_shape(case: Case) -> None:
        names = measure_case(run, case, candidates)
        if case.group == "batches":
            batches[case] = names

    limit_seconds = min(configuration["seconds"], 0.5)
    yield Step("The memory limits", partial(memory_limits, run.device, seconds=limit_seconds))
    for case in cases(configuration, run.device):
        yield Step(_title(case), partial(measure_shape, case), a_shape)
    for gradient in (False, True):
        title = f"Calls from Python{', with a weight that requires a gradient' if gradient else ''}"
        yield Step(title, partial(measure_calls, run, batches, candidates, gradient=gradient), all_calls)
    for columns in configuration["determinism_columns"]:
        case = replace(headline, group="determinism", rows=configuration["elements"] // columns, columns=columns)
        yield Step(f"Determinism at {columns} columns", partial(measure_determinism, run, case, candidates), a_shape)
    for name in (configuration["dtype"], *configuration["other_dtypes"]):
        for rows in configuration.get("operator_rows", ()) if "cpp" in candidates else ():
            case = replace(headline, group="operators", rows=rows, dtype=getattr(torch, name))
            title = f"The operators alone at {_title(case)}"
            yield Step(title, partial(measure_operators, run, case), a_shape)
    yield Step("The quantised result", lambda: _measure_quantised(run, headline, candidates), a_shape)
    yield Step("Layer normalisation", lambda: measure_layer(run, replace(headline, group="layer"), candidates), a_shape)
    yield Step("The product limits", partial(product_limits, run.device, seconds=limit_seconds), a_shape)
    for mode in configuration["training"]["modes"]:
        needs = a_shape + configuration["training"]["seconds"] if mode == "eager" else 120.0
        yield Step(f"The {mode} training step", partial(measure_training, run, mode, candidates), needs)
    for name in configuration["other_dtypes"]:
        case = replace(headline, group="dtypes", dtype=getattr(torch, name))
        yield Step(_title(case), partial(measure_shape, case), a_shape)


def cases(configuration: Mapping[str, Any], device: Device) -> Iterator[Case]:
    """The cases to check and time, the most important first."""
    dtype = getattr(torch, configuration["dtype"])
    modes = configuration["compile_modes"]
    rows, columns = configuration["headline"]
    headline = Case("headline", rows, columns, dtype, compile_modes=tuple(modes.get("headline", ())))
    yield headline
    yield replace(headline, group="add", compile_modes=tuple(modes.get("add", ())))
    for width in configuration["widths"]:
        rows = max(configuration["elements"] // width, 1)
        yield Case("widths", rows, width, dtype, compile_modes=tuple(modes.get("widths", ())))
    # Without CUDA graphs a kernel cannot be timed apart from its call: on a CPU only the calls are timed.
    passes: tuple[Pass, ...] = ("forward",) if device == "cuda" else ()
    for columns in configuration["batch_columns"]:
        for rows in configuration["batches"]:
            yield Case("batches", rows, columns, dtype, passes, tuple(modes.get("batches", ())))


def _title(case: Case) -> str:
    kind = str(case.dtype).removeprefix("torch.")
    return f"{case.rows} × {case.columns} {kind}{' with a residual' if case.residual else ''}"


def _measure_quantised(run: Run, case: Case, candidates: Mapping[str, Candidate]) -> None:
    quantisers = compiled_quantisers() if "headline" in run.configuration["compile_modes"] else {}
    quantisers |= {name: candidate.quantise for name, candidate in candidates.items() if candidate.quantise is not None}
    measure_quantised(run, case, quantisers)


def build_lens(root: Path) -> Lens:
    """The lens of this package."""
    return Lens("rmsnorm-fused", root, configure, collect, report, fit=fit)
