"""Measures the compiled programs for the report: XLA's step, XLA and Inductor compared, and the program of an H200."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchkit import Quantity, UserError
from benchkit.device import Device
from benchkit.results import SMALLER, Json
from benchkit.run import Run
from engines.fit import fit_settings
from engines.spec import EngineSpec, bench_config
from jax_baseline.diff.programs import Program, short_location
from jax_baseline.diff.records import DiffRecord, LongKernel, StepFigures, StepRecord, TargetRecord
from jax_baseline.diff.region_diff import Quote, Region, compare_programs, most_different
from jax_baseline.gpt.devices import TAKEN_BY_PARITY
from jax_baseline.hlo import kernels, parse, summarise
from jax_baseline.hlo.compiled_step import CompiledStep, compile_train_step
from native_build import missing_inductor
from torch_baseline.config import GPTConfig, TrainConfig

_LONGEST = 8
_EXPLAINED = 3
_QUOTED_LINES = 40


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Return the settings of this part."""
    if device == "cuda":
        size = {"preset": "gpt2-124m", "batch_size": 16, "dtype": "bfloat16"}
        step = {**size, "layers": 2 if quick else 12, "attention": "cudnn", "repeats": 5}
        # Two blocks show what is fused across blocks. More blocks repeat it.
        # Training uses cuDNN's attention. XLA's attention shows XLA's fusions, and its intermediates can be read.
        diffs = [{**size, "layers": 2, "attention": attention, "repeats": 5} for attention in ("cudnn", "xla")]
        return {"step": step, "diffs": diffs[:1] if quick else diffs, "layouts": []}
    size = {"preset": "tiny", "batch_size": 4 if quick else 16, "dtype": "float32"}
    step = {**size, "layers": 1 if quick else 2, "attention": "xla", "repeats": 3}
    layouts = [] if quick else [["one device", 1], ["FSDP", 4]]
    target = {"preset": "gpt2-124m", "layers": 2, "batch_size": 16, "dtype": "bfloat16", "attention": "xla"}
    # A quick run has no comparison, because Inductor's C++ compilation takes half a minute.
    return {"step": step, "diffs": [] if quick else [step], "target": target, "layouts": layouts}


def fit(asked: Mapping[str, Json], device: Device, available: int) -> dict[str, Json]:
    """Return what is different in the settings of this part where only so many bytes are free."""
    smaller: list[str] = []

    def fitted(settings: Mapping[str, Json]) -> Json:
        engine = {"jax": EngineSpec("jax", attention=settings["attention"])}
        kept = TAKEN_BY_PARITY[device]
        changes = fit_settings(settings, engine, device=device, available=available, kept=kept)
        smaller.extend(changes.pop(SMALLER, ()))
        return {**settings, **changes}

    changes = {"step": fitted(asked["step"]), "diffs": [fitted(diff) for diff in asked["diffs"]]}
    return {**changes, SMALLER: list(dict.fromkeys(smaller))} if smaller else {}


def sections(run: Run) -> list[tuple[str, Callable[[Run], None]]]:
    """Return the measurements of this part, each with the name that the report uses if it is missing."""
    asked = run.configuration["hlo"]
    measurements: list[tuple[str, Callable[[Run], None]]] = [
        ("XLA's program of the step", partial(_collect_step, asked=asked["step"])),
        *(
            (f"XLA beside Inductor, attention {diff['attention']}", partial(_collect_diff, asked=diff))
            for diff in asked["diffs"]
        ),
    ]
    if asked["layouts"]:
        measurements.append(
            ("The GPU's program", partial(_collect_target, asked=asked["target"], layouts=asked["layouts"]))
        )
    if not asked["diffs"]:
        missing = "XLA beside Inductor, and the program of a GPU"
        why = "a quick run compiles the step for its CPU only"
        measurements.append(("XLA beside Inductor", lambda run: run.absent(missing, why)))
    return measurements


def _shapes(asked: Mapping[str, Any]) -> tuple[GPTConfig, TrainConfig]:
    return bench_config(
        asked["preset"], batch_size=asked["batch_size"], dtype=asked["dtype"], layers=asked["layers"],
        block_size=asked.get("block_size"),
    )  # fmt: skip


def _collect_step(run: Run, asked: Mapping[str, Any]) -> None:
    model, training = _shapes(asked)
    with run.working("XLA's program of the step"):
        step = compile_train_step(
            model, training, attention=asked["attention"], device=run.device, repeats=asked["repeats"]
        )
    run.add(StepRecord(**asked, **vars(step_figures(step, _LONGEST))).record())


def step_figures(step: CompiledStep, longest: int) -> StepFigures:
    """Return a program in numbers, with the kernels that take longest, or move most if they were not measured."""
    xla, seconds = step.xla_costs, step.seconds

    def known(value: float | None, unit: str) -> Quantity | None:
        return Quantity(value, unit) if value else None

    return StepFigures(
        summary=summarise(step.text, seconds),
        longest=_longest_kernels(step.text, seconds, longest),
        stablehlo_operations=known(step.stablehlo_operations, ""),
        temporaries=known(step.temporaries, "B"),
        compile_time=known(step.compile_seconds, "s"),
        kernel_time=known(sum(seconds.values()), "s"),
        kernels_timed=known(len(seconds), ""),
        step_time=known(step.step_seconds, "s"),
        xla_flops=known(xla.get("flops"), "FLOP"),
        xla_bytes=known(xla.get("bytes accessed"), "B"),
    )


def _longest_kernels(text: str, seconds: Mapping[str, float], count: int) -> tuple[LongKernel, ...]:
    listed = sorted(kernels(parse(text)), key=lambda kernel: (-seconds.get(kernel.name, 0.0), -kernel.total.bytes))
    return tuple(
        LongKernel(
            kernel.name,
            kernel.description,
            kernel.ops,
            kernel.region,
            kernel.phase,
            short_location(kernel.location.file, kernel.location.line) if kernel.location else "",
            kernel.total.flops,
            kernel.total.bytes,
            seconds.get(kernel.name),
            kernel.calls,
        )
        for kernel in listed[:count]
    )


def _collect_diff(run: Run, asked: Mapping[str, Any]) -> None:
    # Imported here, so that rendering a report imports neither framework.
    from jax_baseline.diff.compiled_programs import ModelSpec, compile_both

    if (reason := missing_inductor(run.device)) is not None:
        run.absent(f"XLA beside Inductor, attention {asked['attention']}", reason)
        return
    model, training = _shapes(asked)
    spec = ModelSpec(model, training.batch_size, training.dtype, asked["attention"], run.device, asked["repeats"])
    with run.working("XLA beside Inductor"):
        programs = compile_both(spec, spec)
    run.add(diff_record(asked, *programs).record())


def diff_record(asked: Mapping[str, Any], one: Program, other: Program) -> DiffRecord:
    """Return the record of a comparison. Only the regions that differ most keep their sources."""
    diff = compare_programs(one, other)
    explained = tuple((region.name, region.phase) for region in most_different(diff.regions, _EXPLAINED))
    regions = tuple(_without_sources(region, (region.name, region.phase) in explained) for region in diff.regions)
    return DiffRecord(**asked, **vars(replace(diff, regions=regions)), explained=explained)


def _without_sources(region: Region, explained: bool) -> Region:
    """Remove the sources that the report does not quote."""
    quotes = {name: _shortened(quote) for name, quote in region.quotes.items()} if explained else {}
    fusions = {name: tuple(replace(fusion, source="") for fusion in made) for name, made in region.fusions.items()}
    return replace(region, quotes=quotes, fusions=fusions)


def _shortened(quote: Quote) -> Quote:
    lines = quote.source.splitlines()
    left_out = max(len(lines) - _QUOTED_LINES, 0)
    return replace(quote, source="\n".join(lines[:_QUOTED_LINES]), left_out=left_out)


def _collect_target(run: Run, asked: Mapping[str, Any], layouts: list[list[Any]]) -> None:
    from jax_baseline.hlo.gpu_target import compile_step_for_h200, require_gpu_target

    try:
        require_gpu_target()
    except UserError as error:
        run.absent("The GPU's program", str(error))
        return
    model, training = _shapes(asked)
    for layout, devices in layouts:
        with run.working(f"the program of an H200, {layout}"):
            step = compile_step_for_h200(model, training, attention=asked["attention"], devices=devices, layout=layout)
        run.add(
            TargetRecord(
                **asked,
                layout=layout,
                devices=devices,
                arguments=Quantity(step.arguments or 0, "B"),
                temporaries=Quantity(step.temporaries, "B"),
                compile_time=Quantity(step.compile_seconds, "s"),
                summary=summarise(step.text),
            ).record()
        )
