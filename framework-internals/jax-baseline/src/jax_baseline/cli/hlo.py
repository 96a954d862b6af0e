"""The commands ``hlo``, ``lock`` and ``diff``: read XLA's program, lock its fusions, compare it with Inductor's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, cast

import typer

from benchkit import UserError, numbers
from benchkit.device import Device, resolve_device
from benchkit.report import markdown_table
from benchkit.results import write_text_atomically
from jax_baseline.cli.options import DTYPES, DeviceOption, Preset, user_errors
from jax_baseline.diff.programs import Program, short_location
from jax_baseline.diff.region_diff import CompiledRegion, compare_programs, difference_between, most_different
from jax_baseline.hlo import Summary, parse, summarise
from jax_baseline.hlo.lock import compare_locks, make_lock, read_lock
from torch_baseline.config import GPTConfig, Precision, TrainConfig

Dump = Annotated[Path | None, typer.Argument(help="text of your optimised module [default: the train step]")]
BatchSize = Annotated[int, typer.Option(min=1, help="number of sequences")]
Layers = Annotated[int | None, typer.Option(min=1, help="number of blocks [default: the preset's]")]
Dtype = Annotated[str, typer.Option(help=DTYPES)]
AttentionOption = Annotated[str, typer.Option(help="attention of the JAX model: xla or cudnn")]
Measure = Annotated[bool, typer.Option("--measure", help="run the program and time every kernel with the profiler")]
Target = Annotated[
    str, typer.Option(help="h200: compile for this GPU on a machine without it (optional extra) [default: --device]")
]

# Largest relative difference between the results of two equal functions, and between sums over them. Whole numbers
# are equal.
_SAME = {"float64": 1e-9, "float32": 2e-4, "float16": 1e-2, "bfloat16": 1e-2}
_SIXTEEN_BITS = re.compile(r"bf16|float16|\bf16\b|\bhalf\b", re.IGNORECASE)


@dataclass(frozen=True)
class _Program:
    """An optimised module with its description, compiler versions, notes and times."""

    text: str
    subject: str
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()
    stablehlo: str = ""
    seconds: Mapping[str, float] | None = None


def hlo(
    dump: Dump = None,
    preset: Preset = "tiny",
    layers: Layers = None,
    batch_size: BatchSize = 16,
    dtype: Dtype = "float32",
    attention: AttentionOption = "xla",
    device: DeviceOption = "auto",
    target: Target = "",
    measure: Measure = False,
    kernels: Annotated[int, typer.Option(min=0, help="number of kernels to list, the longest or largest first")] = 0,
    save: Annotated[Path | None, typer.Option(help="file for the text of the module")] = None,
    save_stablehlo: Annotated[Path | None, typer.Option(help="file for the StableHLO that JAX passes to XLA")] = None,
    check: Annotated[Path | None, typer.Option(help="a fusion lock; exit status 1 if the fusions differ")] = None,
) -> None:
    """Summarise XLA's program: kernels by kind and part of the model, FLOPs, bytes, buffers and measured times."""
    with user_errors():
        program = _program(dump, preset, layers, batch_size, dtype, attention, device, target, measure)
        summary = summarise(program.text, program.seconds)
        if check is not None:
            _check(program, check)
    for path, text in ((save, program.text), (save_stablehlo, program.stablehlo)):
        if path is not None:
            write_text_atomically(path, text)
    _print_program(program, summary, kernels)


def lock(
    file: Annotated[Path, typer.Argument(help="lock file to write")],
    dump: Dump = None,
    preset: Preset = "tiny",
    layers: Layers = None,
    batch_size: BatchSize = 16,
    dtype: Dtype = "float32",
    attention: AttentionOption = "xla",
    device: DeviceOption = "auto",
    target: Target = "",
) -> None:
    """Write the fusions of a program to a lock file; `hlo --check FILE` fails when they change."""
    with user_errors():
        program = _program(dump, preset, layers, batch_size, dtype, attention, device, target, measure=False)
        made = make_lock(program.text, subject=program.subject, versions=program.versions)
    write_text_atomically(file, made.dump())
    print(f"{file}: {sum(made.kernels.values())} kernels with {len(made.kernels)} signatures; {made.subject}")


def diff(
    torch_function: Annotated[
        str | None, typer.Argument(help="file.py:function of torch tensors [default: the baseline's loss]")
    ] = None,
    jax_function: Annotated[str | None, typer.Argument(help="file.py:function of JAX arrays")] = None,
    inputs: Annotated[
        str | None, typer.Option(help="file.py:function that returns the arguments [default: inputs in the first file]")
    ] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="compare gradients too; the functions return one scalar")
    ] = False,
    preset: Preset = "tiny",
    layers: Layers = 2,
    batch_size: BatchSize = 16,
    dtype: Dtype = "float32",
    attention: AttentionOption = "xla",
    device: DeviceOption = "auto",
    repeats: Annotated[int, typer.Option(min=0, help="number of runs to time")] = 5,
    show: Annotated[int, typer.Option(min=0, help="number of regions to explain, with both sources")] = 3,
) -> None:
    """Compare XLA's and Inductor's programs of one function; exit status 1 if their results differ."""
    from benchkit.processes import ChildFailure
    from jax_baseline.diff.compiled_programs import FunctionSpec, ModelSpec, compile_both

    with user_errors():
        if (torch_function is None) != (jax_function is None):
            raise UserError("diff takes two functions (torch's, then JAX's) or none (the baseline's loss), got one")
        where = resolve_device(device)
        jax_spec: ModelSpec | FunctionSpec
        torch_spec: ModelSpec | FunctionSpec
        if torch_function and jax_function:
            made = inputs or f"{torch_function.rpartition(':')[0]}:inputs"
            torch_spec = FunctionSpec(torch_function, made, gradients, where, repeats)
            jax_spec = replace(torch_spec, function=jax_function)
        else:
            model = _shape(preset, layers)
            torch_spec = ModelSpec(model, batch_size, cast(Precision, dtype), attention, where, repeats)
            jax_spec = torch_spec
        try:
            programs = compile_both(jax_spec, torch_spec)
        except ChildFailure as error:  # exit status 2, because nothing was compared
            raise UserError(f"compiling or running one of the programs failed: {error}") from error
    if not _print_diff(programs, show, coarse=where != "cpu"):  # a GPU multiplies float32 matrices in TF32
        raise typer.Exit(1)


def _print_program(program: _Program, summary: Summary, kernels: int) -> None:
    print(program.subject)
    print(
        f"{summary.kernels} kernels, {summary.dots} matmuls; {numbers.with_unit(summary.flops, 'FLOP')}, "
        f"{numbers.with_unit(summary.bytes, 'B')} read and written; "
        f"{summary.donated} of {summary.arguments} arguments donated "
        f"({numbers.with_unit(summary.donated_bytes, 'B')} of {numbers.with_unit(summary.argument_bytes, 'B')})"
    )
    for note in (*program.notes, parse(program.text).assumptions):
        if note:
            print(note)
    print(markdown_table(["kind of kernel", "number"], list(summary.kinds.items())))
    timed = program.seconds is not None
    rows = [
        (
            group.region or "(no scope)",
            group.phase,
            group.kernels,
            group.dots,
            numbers.with_unit(group.flops, "FLOP"),
            numbers.with_unit(group.bytes, "B"),
            *((numbers.with_unit(group.seconds or 0.0, "s"),) if timed else ()),
        )
        for group in summary.regions
    ]
    header = ["part", "phase", "kernels", "matmuls", "FLOPs", "bytes", *(["time"] if timed else [])]
    print(markdown_table(header, rows, left=2))
    if kernels:
        print(_kernel_table(program, kernels))


def _print_diff(programs: tuple[Program, Program], show: int, *, coarse: bool) -> bool:
    """Print the comparison, explain the regions that differ most, and return whether the results agree."""
    from jax_baseline.report.explanation import explain

    found = compare_programs(*programs)
    rows = [
        (
            region.name or "(not assigned)",
            region.phase,
            *(cell for compiled in region.compiled.values() for cell in _cells(compiled)),
        )
        for region in found.regions
    ]
    header = [
        "part",
        "phase",
        *(f"{name} {what}" for name in ("XLA", "Inductor") for what in ("kernels", "bytes", "time")),
    ]
    print(markdown_table(header, rows, left=2))
    for program in programs:
        assigned = found.assigned[program.compiler]
        print(
            f"{program.compiler}: compiled in {numbers.with_unit(program.compile_seconds, 's')}"
            + (f", runs {numbers.with_unit(program.seconds, 's')}" if program.seconds else "")
            + f"; kernels assigned by label {assigned.get('label', 0)}, by value {assigned.get('value', 0)}, "
            f"not assigned {assigned.get('nothing', 0)}; writes {numbers.with_unit(found.only[program.compiler], 'B')} "
            "that the other does not" + "".join(f"; {note}" for note in program.notes)
        )
    same, verdict = _agreement(programs, found.largest_difference, coarse)
    print(verdict)
    for region in most_different(found.regions, show):
        print()
        print(explain(region))
    return same


def _agreement(programs: tuple[Program, Program], difference: float | None, coarse: bool) -> tuple[bool, str]:
    """Return whether the results of two programs agree, and a line that says so.

    Args:
        programs: XLA's program and Inductor's.
        difference: Largest difference between two results.
        coarse: Whether float32 results may differ like 16-bit results, because matmuls round their inputs.
    """
    xla, inductor = (program.values for program in programs)
    if difference is None:
        return False, f"NOT COMPARABLE: XLA's program has {len(xla)} results, Inductor's has {len(inductor)}"
    if math.isinf(difference):
        pairs = enumerate(zip(xla, inductor, strict=True))
        index, (one, other) = next(pair for pair in pairs if pair[1][0].shape != pair[1][1].shape)
        return False, f"NOT THE SAME FUNCTION: result {index} is {one} in XLA's program and {other} in Inductor's"
    if math.isnan(difference):
        return False, "NOT COMPARABLE: results are not finite; use inputs with finite results"
    sketched = all(value.sketch for value in (*xla, *inductor))
    size = numbers.error_size(difference)
    text = (
        f"results differ by about {size} (estimate of the norm of the difference over the larger norm)"
        if sketched
        else f"sums over the results differ by at most {size}, relative"
    )
    coarse = coarse or any(map(_rounds_to_sixteen_bits, programs))
    for index, (one, other) in enumerate(zip(xla, inductor, strict=True)):
        bound = max(_bound(value.dtype, coarse) for value in (one, other))
        if difference_between(one, other) > bound:
            allowed = f"rounding explains {numbers.error_size(bound)}" if bound else "whole numbers must be equal"
            return False, f"NOT THE SAME FUNCTION: {text}; of result {index}, {one}, {allowed}"
    return True, text


def _bound(dtype: str, coarse: bool) -> float:
    """Return the largest relative difference that rounding in a dtype explains."""
    if dtype.startswith(("int", "uint", "bool")):
        return 0.0
    return _SAME.get("float16" if coarse and dtype == "float32" else dtype, _SAME["float16"])


def _rounds_to_sixteen_bits(program: Program) -> bool:
    """Whether a kernel writes 16-bit numbers to memory or computes with them."""
    return any(
        _SIXTEEN_BITS.search(text) for launch in program.launches for text in (launch.source, *map(str, launch.writes))
    )


def _cells(compiled: CompiledRegion) -> tuple[str, str, str]:
    return (
        str(compiled.kernels),
        numbers.with_unit(compiled.bytes, "B"),
        "–" if compiled.seconds is None else numbers.with_unit(compiled.seconds, "s"),
    )


def _program(
    dump: Path | None,
    preset: str,
    layers: int | None,
    batch_size: int,
    dtype: str,
    attention: str,
    device: str,
    target: str,
    measure: bool,
) -> _Program:
    """Return the module of a file, or compile the train step for this machine or for the target."""
    if dump is not None:
        try:
            return _Program(dump.read_text(), str(dump), {})
        except OSError as error:
            raise UserError(f"cannot read {dump}: {error.strerror}") from error
    model, training = _shapes(preset, layers, batch_size, dtype)
    subject = f"train step of {preset}, {model.n_layer} blocks, {batch_size} sequences, {dtype}, {attention} attention"
    if target:
        return _ahead_of_time(model, training, attention, subject, target, measure)
    return _compiled_here(model, training, attention, subject, resolve_device(device), measure)


def _compiled_here(
    model: GPTConfig, training: TrainConfig, attention: str, subject: str, device: Device, measure: bool
) -> _Program:
    from jax_baseline.hlo.compiled_step import compile_train_step
    from jax_baseline.hlo.stablehlo import count_operations

    step = compile_train_step(model, training, attention=attention, device=device, repeats=5 if measure else 0)
    operations = count_operations(step.stablehlo).total()
    notes = [
        f"compiled from {operations} StableHLO operations in {numbers.with_unit(step.compile_seconds, 's')}; "
        f"{numbers.with_unit(step.xla_memory['temporaries'], 'B')} of temporaries"
    ]
    if step.xla_costs:
        notes.append(
            f"XLA's own count, with loop bodies once: {numbers.with_unit(step.xla_costs['flops'], 'FLOP')}, "
            f"{numbers.with_unit(step.xla_costs['bytes accessed'], 'B')}"
        )
    if step.step_seconds is not None:
        notes.append(
            f"a step takes {numbers.with_unit(step.step_seconds, 's')}; the profiler's times of its kernels add up to "
            f"{numbers.with_unit(sum(step.seconds.values()), 's')}"
        )
    seconds = step.seconds if measure else None
    return _Program(step.text, f"{subject}, on {device}", step.versions, tuple(notes), step.stablehlo, seconds)


def _ahead_of_time(
    model: GPTConfig, training: TrainConfig, attention: str, subject: str, target: str, measure: bool
) -> _Program:
    from jax_baseline.hlo.gpu_target import compile_step_for_h200

    if target != "h200":
        raise UserError(f"--target takes h200, got {target!r}")
    if measure:
        raise UserError("--measure runs the program and --target h200 only compiles it; use one of them")
    made = compile_step_for_h200(model, training, attention=attention)
    notes = (
        f"compiled ahead of time in {numbers.with_unit(made.compile_seconds, 's')}, without autotuning or times; "
        f"{numbers.with_unit(made.temporaries, 'B')} of temporaries",
    )
    return _Program(made.text, f"{subject}, for an H200", made.versions, notes)


def _shape(preset: str, layers: int | None) -> GPTConfig:
    model = GPTConfig.preset(preset)
    return replace(model, n_layer=layers) if layers else model


def _shapes(preset: str, layers: int | None, batch_size: int, dtype: str) -> tuple[GPTConfig, TrainConfig]:
    from jax_baseline.timing.engines import bench_config

    _, training = bench_config(preset, batch_size=batch_size, dtype=cast(Precision, dtype))
    return _shape(preset, layers), training


def _check(program: _Program, path: Path) -> None:
    """Compare the program with a lock file; print the differences and exit with status 1 if there are any."""
    try:
        then = read_lock(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; write it with jax-baseline lock") from error
    drift = compare_locks(then, make_lock(program.text, subject=program.subject, versions=program.versions))
    if not drift:
        print(f"LOCKED {path}: {drift.kernels[1]} kernels, as in the lock")
        return
    print(f"DRIFT {path}: {drift.kernels[0]} kernels in the lock, {drift.kernels[1]} now; {then.subject}")
    print("\n".join(drift.lines()))
    raise typer.Exit(1)


def _kernel_table(program: _Program, count: int) -> str:
    """Return the kernels that take longest, or that move most bytes if they are not measured."""
    from jax_baseline.hlo import kernels

    seconds = program.seconds or {}
    found = sorted(kernels(parse(program.text)), key=lambda one: (-seconds.get(one.name, 0.0), -one.total.bytes))[
        :count
    ]
    rows = [
        (
            one.name,
            one.description,
            " ".join(f"{op}×{times}" if times > 1 else op for op, times in one.ops.items()),
            f"{one.region or '–'} ({one.phase})",
            short_location(one.location.file, one.location.line) if one.location else "–",
            one.calls,
            numbers.with_unit(one.total.flops, "FLOP"),
            numbers.with_unit(one.total.bytes, "B"),
            *((numbers.with_unit(seconds[one.name], "s") if one.name in seconds else "–",) if seconds else ()),
        )
        for one in found
    ]
    header = ["kernel", "kind", "operations", "part", "line", "runs", "FLOP", "bytes", *(["time"] if seconds else [])]
    return markdown_table(header, rows, left=5)


COMMANDS = (hlo, lock, diff)
