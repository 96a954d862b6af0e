"""Half of the main job: the compiled step read kernel by kernel, beside Inductor's, and for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from benchkit import Quantity, UserError
from benchkit.device import Device
from benchkit.results import Json
from benchkit.run import Run
from jax_baseline.diff.programs import Program
from jax_baseline.diff.region_diff import Region, compare_programs, instructive
from native_build import missing_inductor
from torch_baseline.config import GPTConfig, TrainConfig

_LONGEST = 8
_EXPLAINED = 3
_QUOTED_LINES = 40


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Return what this half does on a device."""
    if device == "cuda":
        size = {"preset": "gpt2-124m", "batch_size": 16, "dtype": "bfloat16"}
        step = {**size, "layers": 2 if quick else 12, "attention": "cudnn", "repeats": 5}
        # Two blocks show whatever is fused across blocks; more of them show it again.
        # cuDNN's attention is what trains; XLA's own is what XLA fuses, and its values in memory can be taken.
        diffs = [{**size, "layers": 2, "attention": attention, "repeats": 5} for attention in ("cudnn", "xla")]
        return {"step": step, "diffs": diffs[:1] if quick else diffs, "layouts": []}
    size = {"preset": "tiny", "batch_size": 4 if quick else 16, "dtype": "float32"}
    layers = 1 if quick else 2
    step = {**size, "layers": layers, "attention": "xla", "repeats": 3}
    diff = {**size, "layers": layers, "attention": "xla", "repeats": 3}
    layouts = [] if quick else [["one device", 1], ["FSDP", 4]]
    target = {"preset": "gpt2-124m", "layers": 2, "batch_size": 16, "dtype": "bfloat16", "attention": "xla"}
    # Inductor's side of it takes a C++ compiler half a minute.
    return {"step": step, "diffs": [] if quick else [diff], "target": target, "layouts": layouts}


def sections(run: Run) -> list[tuple[str, Callable[[Run], None]]]:
    """What this half measures, part by part: the name under which a report would miss it, and the work."""
    asked = run.configuration["hlo"]
    found: list[tuple[str, Callable[[Run], None]]] = [
        ("XLA's program of the step", partial(_collect_step, asked=asked["step"])),
        *(
            (f"XLA beside Inductor, attention {diff['attention']}", partial(_collect_diff, asked=diff))
            for diff in asked["diffs"]
        ),
    ]
    if asked["layouts"]:
        found.append(("The GPU's program", partial(_collect_target, asked=asked["target"], layouts=asked["layouts"])))
    if not asked["diffs"]:
        found.append(("XLA beside Inductor", _leave_out_others))
    return found


def _leave_out_others(run: Run) -> None:
    run.absent("XLA beside Inductor, and the program of a GPU", "a quick run has the step compiled by XLA for its CPU")


def _shapes(asked: Mapping[str, Any]) -> tuple[GPTConfig, TrainConfig]:
    from jax_baseline.timing.engines import bench_config

    model, training = bench_config(asked["preset"], batch_size=asked["batch_size"], dtype=asked["dtype"])
    return replace(model, n_layer=asked["layers"]), training


def _collect_step(run: Run, asked: Mapping[str, Any]) -> None:
    from jax_baseline.hlo.stablehlo import count_operations
    from jax_baseline.hlo.step_reading import read_step
    from jax_baseline.hlo.summary import summarise

    model, training = _shapes(asked)
    with run.working("XLA's program of the step"):
        read = read_step(model, training, attention=asked["attention"], device=run.device, repeats=asked["repeats"])
    summary = summarise(read.text, read.seconds)
    values = {
        "StableHLO operations": Quantity(count_operations(read.stablehlo).total(), ""),
        "kernels": Quantity(summary.kernels, ""),
        "FLOPs": Quantity(summary.flops, "FLOP"),
        "bytes": Quantity(summary.bytes, "B"),
        "whole bytes": Quantity(summary.whole_bytes, "B"),
        "library FLOPs": Quantity(summary.library_flops, "FLOP"),
        "library bytes": Quantity(summary.library_bytes, "B"),
        "arguments": Quantity(summary.argument_bytes, "B"),
        "donated": Quantity(summary.donated_bytes, "B"),
        "temporaries": Quantity(read.xla_memory["temporaries"], "B"),
        "compile time": Quantity(read.compile_seconds, "s"),
        "kernel time": Quantity(sum(read.seconds.values()), "s"),
        "kernels timed": Quantity(len(read.seconds), ""),
    }
    if read.step_seconds is not None:
        values["step time"] = Quantity(read.step_seconds, "s")
    if read.xla_costs:
        values["XLA FLOPs"] = Quantity(read.xla_costs["flops"], "FLOP")
        values["XLA bytes"] = Quantity(read.xla_costs["bytes accessed"], "B")
    longest = _longest_kernels(read.text, read.seconds)
    run.record("hlo step", dict(asked), values, {**summary.as_plain(), "longest": longest})


def _longest_kernels(text: str, seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    from jax_baseline.diff.programs import short_place
    from jax_baseline.hlo import kernels, parse

    found = sorted(kernels(parse(text)), key=lambda kernel: -seconds.get(kernel.name, 0.0))[:_LONGEST]
    return [
        {
            "name": kernel.name,
            "kind": kernel.description,
            "ops": kernel.ops,
            "region": kernel.region,
            "phase": kernel.phase,
            "place": short_place(kernel.place.file, kernel.place.line) if kernel.place else "",
            "flops": kernel.total.flops,
            "bytes": kernel.total.bytes,
            "seconds": seconds.get(kernel.name),
        }
        for kernel in found
    ]


def _collect_diff(run: Run, asked: Mapping[str, Any]) -> None:
    from jax_baseline.diff.compiled_sides import ModelSide, compile_both

    if (reason := missing_inductor(run.device)) is not None:
        run.absent(f"XLA beside Inductor, attention {asked['attention']}", reason)
        return
    model, training = _shapes(asked)
    side = ModelSide(
        asdict(model), training.batch_size, training.dtype, asked["attention"], run.device, asked["repeats"]
    )
    with run.working("XLA beside Inductor"):
        programs = compile_both(side, side)
    run.record("region diff", dict(asked), *diff_record(*programs))


def diff_record(one: Program, other: Program) -> tuple[dict[str, Quantity], dict[str, Any]]:
    """What is kept of a comparison: figures, and the regions as plain JSON, the most instructive with their sources."""
    found = compare_programs(one, other)
    explained = [(region.name, region.phase) for region in instructive(found.regions, _EXPLAINED)]
    values = {"in both": Quantity(found.same, "B")}
    for program in (one, other):
        name = program.compiler
        values |= {
            f"{name} kernels": Quantity(sum(step.calls for step in program.steps), ""),
            f"{name} bytes": Quantity(sum(step.bytes for step in program.steps), "B"),
            f"{name} compile time": Quantity(program.compile_seconds, "s"),
            f"{name} only": Quantity(found.only[name], "B"),
            f"{name} again": Quantity(found.repeated[name], "B"),
        }
        values |= {
            f"{name} placed by {by}": Quantity(found.placed[name].get(by, 0), "")
            for by in ("label", "value", "nothing")
        }
        if program.seconds is not None:
            values[f"{name} time"] = Quantity(program.seconds, "s")
    if found.largest_difference is not None:
        values["difference of results"] = Quantity(found.largest_difference, "")
    notes = {program.compiler: list(program.notes) for program in (one, other)}
    regions = [_plain(region, (region.name, region.phase) in explained) for region in found.regions]
    return values, {"regions": regions, "explained": explained, "notes": notes}


def _plain(region: Region, explained: bool) -> dict[str, Any]:
    """A region as JSON; sources only where the report quotes them."""
    plain = region.as_plain()
    plain["quotes"] = {name: _shortened(quote) for name, quote in plain["quotes"].items()} if explained else {}
    plain["fusions"] = {
        name: [{**fusion, "source": ""} for fusion in fusions] for name, fusions in plain["fusions"].items()
    }
    return plain


def _shortened(quote: Mapping[str, Any]) -> dict[str, Any]:
    """A source as far as a report could show it, with the number of lines that are left out."""
    lines = quote["source"].splitlines()
    left_out = max(len(lines) - _QUOTED_LINES, 0)
    return {**quote, "source": "\n".join(lines[:_QUOTED_LINES]), "left_out": left_out}


def _collect_target(run: Run, asked: Mapping[str, Any], layouts: list[list[Any]]) -> None:
    from jax_baseline.hlo.gpu_target import compile_step_for_h200, require_gpu_target
    from jax_baseline.hlo.summary import summarise

    try:
        require_gpu_target()
    except UserError as error:
        run.absent("The GPU's program", str(error))
        return
    model, training = _shapes(asked)
    for layout, devices in layouts:
        with run.working(f"the program of an H200, {layout}"):
            made = compile_step_for_h200(model, training, attention=asked["attention"], devices=devices, layout=layout)
        summary = summarise(made.text)
        run.record(
            "hlo target",
            {**asked, "layout": layout, "devices": devices},
            {
                "kernels": Quantity(summary.kernels, ""),
                "bytes": Quantity(summary.bytes, "B"),
                "arguments": Quantity(made.arguments, "B"),
                "temporaries": Quantity(made.temporaries, "B"),
                "compile time": Quantity(made.compile_seconds, "s"),
            },
            summary.as_plain(),
        )
