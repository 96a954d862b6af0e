"""``hlo``, ``lock`` and ``diff``: what XLA made, kept from drifting, and put beside what Inductor made."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from benchkit import UserError, numbers
from benchkit.device import Device, resolve_device
from benchkit.report import markdown_table
from benchkit.results import write_text_atomically
from jax_baseline.cli.options import DTYPES, DeviceOption, Preset, user_errors
from jax_baseline.diff.programs import Program
from torch_baseline.config import GPTConfig, Precision, TrainConfig

Dump = Annotated[Path | None, typer.Argument(help="text of an optimised module, yours [default: our step's]")]
BatchSize = Annotated[int, typer.Option(min=1, help="sequences a step")]
Layers = Annotated[int | None, typer.Option(min=1, help="blocks [default: the preset's]")]
Dtype = Annotated[str, typer.Option(help=DTYPES)]
AttentionOption = Annotated[str, typer.Option(help="of JAX: xla or cudnn")]
Measure = Annotated[bool, typer.Option("--measure", help="run it, and time every kernel with the profiler")]
Target = Annotated[
    str, typer.Option(help="h200: compile for that GPU on a machine without one (optional extra) [default: --device]")
]

# Results of two functions that are the same, and sums over them, agree better than this; whole numbers are equal.
_SAME = {"float64": 1e-9, "float32": 2e-4, "float16": 1e-2, "bfloat16": 1e-2}
_SIXTEEN_BITS = re.compile(r"bf16|float16|\bf16\b|\bhalf\b", re.IGNORECASE)


@dataclass(frozen=True)
class _Program:
    """An optimised module and what is known of it."""

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
    kernels: Annotated[int, typer.Option(min=0, help="list so many, the longest or largest first")] = 0,
    save: Annotated[Path | None, typer.Option(help="write the module's text here")] = None,
    save_stablehlo: Annotated[Path | None, typer.Option(help="write here what JAX handed to XLA")] = None,
    check: Annotated[Path | None, typer.Option(help="a fusion lock; exit status 1 if the program drifted")] = None,
) -> None:
    """Read what XLA made: kernels by kind and part of the model, FLOPs, bytes, buffers, and, measured, their time."""
    from jax_baseline.hlo import parse, summarise

    with user_errors():
        program = _program(dump, preset, layers, batch_size, dtype, attention, device, target, measure)
        summary = summarise(program.text, program.seconds)
        if check is not None:
            _check(program, check)
    for path, text in ((save, program.text), (save_stablehlo, program.stablehlo)):
        if path is not None:
            write_text_atomically(path, text)
    print(program.subject)
    print(
        f"{summary.kernels} kernels, {summary.dots} products; {numbers.with_unit(summary.flops, 'FLOP')}, "
        f"{numbers.with_unit(summary.bytes, 'B')} read and written; "
        f"{summary.donated} of {summary.arguments} arguments donated "
        f"({numbers.with_unit(summary.donated_bytes, 'B')} of {numbers.with_unit(summary.argument_bytes, 'B')})"
    )
    for note in (*program.notes, parse(program.text).undecided):
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
    header = ["part", "phase", "kernels", "products", "operations", "bytes", *(["time"] if timed else [])]
    print(markdown_table(header, rows, left=2))
    if kernels:
        print(_kernel_table(program, kernels))


def lock(
    file: Annotated[Path, typer.Argument(help="to write")],
    dump: Dump = None,
    preset: Preset = "tiny",
    layers: Layers = None,
    batch_size: BatchSize = 16,
    dtype: Dtype = "float32",
    attention: AttentionOption = "xla",
    device: DeviceOption = "auto",
    target: Target = "",
) -> None:
    """Keep what a program is fused into, so that `hlo --check FILE` fails when that changes."""
    from jax_baseline.hlo.lock import make_lock

    with user_errors():
        program = _program(dump, preset, layers, batch_size, dtype, attention, device, target, measure=False)
        made = make_lock(program.text, subject=program.subject, versions=program.versions)
    write_text_atomically(file, made.dump())
    print(f"{file}: {sum(made.kernels.values())} kernels of {len(made.kernels)} sorts; {made.subject}")


def diff(
    torch_function: Annotated[
        str | None, typer.Argument(help="file.py:function of torch tensors [default: the baseline's loss]")
    ] = None,
    jax_function: Annotated[str | None, typer.Argument(help="file.py:function of JAX arrays")] = None,
    inputs: Annotated[
        str | None, typer.Option(help="file.py:function that returns the arguments [default: inputs in the first file]")
    ] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="the functions return one scalar; compare its gradients too")
    ] = False,
    preset: Preset = "tiny",
    layers: Layers = 2,
    batch_size: BatchSize = 16,
    dtype: Dtype = "float32",
    attention: AttentionOption = "xla",
    device: DeviceOption = "auto",
    repeats: Annotated[int, typer.Option(min=0, help="runs to time; 0 for none")] = 5,
    show: Annotated[int, typer.Option(min=0, help="regions to explain, with both sources")] = 3,
) -> None:
    """Put what XLA and Inductor made of one function side by side; exit status 1 if the two do not compute the same."""
    from benchkit.processes import ChildFailure
    from jax_baseline.diff.compiled_sides import FunctionSide, ModelSide, compile_both

    with user_errors():
        if (torch_function is None) != (jax_function is None):
            raise UserError("diff takes two functions, torch's and then JAX's, or none for the baseline's loss")
        where = resolve_device(device)
        jax_side: ModelSide | FunctionSide
        torch_side: ModelSide | FunctionSide
        if torch_function and jax_function:
            made = inputs or f"{torch_function.rpartition(':')[0]}:inputs"
            torch_side = FunctionSide(torch_function, made, gradients, where, repeats)
            jax_side = replace(torch_side, function=jax_function)
        else:
            model = _shape(preset, layers)
            torch_side = ModelSide(asdict(model), batch_size, cast(Precision, dtype), attention, where, repeats)
            jax_side = torch_side
        try:
            programs = compile_both(jax_side, torch_side)
        except ChildFailure as error:  # nothing was compared: not the status of two functions that differ
            raise UserError(f"one of the two sides failed: {error}") from error
    if not _print_diff(programs, show, coarse=where != "cpu"):  # a GPU multiplies float32 in TF32
        raise typer.Exit(1)


def _print_diff(programs: tuple[Program, Program], show: int, *, coarse: bool) -> bool:
    """Print two programs side by side, and explain the regions that tell most; whether they computed the same."""
    from jax_baseline.diff.explanation import explain
    from jax_baseline.diff.region_diff import compare_programs, instructive

    found = compare_programs(*programs)
    rows = [
        (
            region.name or "(not placed)",
            region.phase,
            *(cell for side in region.sides.values() for cell in _side_cells(side)),
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
        placed = found.placed[program.compiler]
        print(
            f"{program.compiler}: compiled in {numbers.with_unit(program.compile_seconds, 's')}"
            + (f", runs {numbers.with_unit(program.seconds, 's')}" if program.seconds else "")
            + f"; kernels placed by label {placed.get('label', 0)}, by value {placed.get('value', 0)}, "
            f"not at all {placed.get('nothing', 0)}; leaves {numbers.with_unit(found.only[program.compiler], 'B')} in "
            "memory that the other does not" + "".join(f"; {note}" for note in program.notes)
        )
    same, verdict = _agreement(programs, found.largest_difference, coarse)
    print(verdict)
    for region in instructive(found.regions, show):
        print()
        print(explain(region.as_plain(), quotes=True))
    return same


def _agreement(programs: tuple[Program, Program], difference: float | None, coarse: bool) -> tuple[bool, str]:
    """Whether the two functions computed the same, and that in a line.

    Args:
        programs: XLA's and Inductor's.
        difference: the largest over their results.
        coarse: whether float32 may be rounded as coarsely as 16 bits are, because products of it are.
    """
    from jax_baseline.diff.region_diff import difference_between

    xla, inductor = (program.values for program in programs)
    if difference is None:
        return False, f"NOT COMPARABLE: {len(xla)} results of XLA's program, {len(inductor)} of Inductor's"
    if math.isinf(difference):
        pairs = enumerate(zip(xla, inductor, strict=True))
        index, (one, other) = next(pair for pair in pairs if pair[1][0].shape != pair[1][1].shape)
        return False, f"NOT THE SAME FUNCTION: result {index} is {one} of XLA's and {other} of Inductor's"
    if math.isnan(difference):
        return False, "NOT COMPARABLE: results hold numbers that are not finite; give inputs for which they are"
    sketched = all(value.sketch for value in (*xla, *inductor))
    size = numbers.error_size(difference)
    text = (
        f"results differ by about {size} (norm of the difference over the larger norm, estimated)"
        if sketched
        else f"sums over the results differ by at most {size}, relative"
    )
    coarse = coarse or any(map(_rounds_to_sixteen_bits, programs))
    for index, (one, other) in enumerate(zip(xla, inductor, strict=True)):
        bound = max(_bound(value.dtype, coarse) for value in (one, other))
        if difference_between(one, other) > bound:
            allowed = f"rounding explains {numbers.error_size(bound)}" if bound else "whole numbers have to be equal"
            return False, f"NOT THE SAME FUNCTION: {text}; of result {index}, {one}, {allowed}"
    return True, text


def _bound(dtype: str, coarse: bool) -> float:
    """How far apart results of a dtype may be, relative."""
    if dtype.startswith(("int", "uint", "bool")):
        return 0.0
    return _SAME.get("float16" if coarse and dtype == "float32" else dtype, _SAME["float16"])


def _rounds_to_sixteen_bits(program: Program) -> bool:
    """Whether a kernel leaves 16-bit numbers in memory or computes with them."""
    return any(_SIXTEEN_BITS.search(text) for step in program.steps for text in (step.source, *map(str, step.writes)))


def _side_cells(side: Any) -> tuple[str, str, str]:
    return (
        str(side.kernels),
        numbers.with_unit(side.bytes, "B"),
        "–" if side.seconds is None else numbers.with_unit(side.seconds, "s"),
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
    """The module that a command is about: a file's, or the step's, compiled here or for a GPU that is not here."""
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
    from jax_baseline.hlo.stablehlo import count_operations
    from jax_baseline.hlo.step_reading import read_step

    read = read_step(model, training, attention=attention, device=device, repeats=5 if measure else 0)
    operations = count_operations(read.stablehlo).total()
    notes = [
        f"{operations} StableHLO operations before; compiled in {numbers.with_unit(read.compile_seconds, 's')}; "
        f"{numbers.with_unit(read.xla_memory['temporaries'], 'B')} of temporaries"
    ]
    if read.xla_costs:
        notes.append(
            f"XLA's own count, loop bodies once: {numbers.with_unit(read.xla_costs['flops'], 'FLOP')}, "
            f"{numbers.with_unit(read.xla_costs['bytes accessed'], 'B')}"
        )
    if read.step_seconds is not None:
        notes.append(
            f"a step takes {numbers.with_unit(read.step_seconds, 's')}; its kernels, seen by the profiler, "
            f"{numbers.with_unit(sum(read.seconds.values()), 's')}"
        )
    seconds = read.seconds if measure else None
    return _Program(read.text, f"{subject}, on {device}", read.versions, tuple(notes), read.stablehlo, seconds)


def _ahead_of_time(
    model: GPTConfig, training: TrainConfig, attention: str, subject: str, target: str, measure: bool
) -> _Program:
    from jax_baseline.hlo.gpu_target import compile_step_for_h200

    if target != "h200":
        raise UserError(f"--target takes h200, got {target!r}")
    if measure:
        raise UserError("--measure runs the program, and --target h200 is for a machine without the GPU; take one")
    made = compile_step_for_h200(model, training, attention=attention)
    notes = (
        f"compiled ahead of time in {numbers.with_unit(made.compile_seconds, 's')}, without a GPU: nothing was tuned "
        f"by trial, nothing is timed; {numbers.with_unit(made.temporaries, 'B')} of temporaries",
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
    """Hold the program against a lock file; exit status 1 with the differences if it drifted."""
    from jax_baseline.hlo.lock import compare_locks, make_lock, read_lock

    try:
        then = read_lock(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; make it with jax-baseline lock") from error
    drift = compare_locks(then, make_lock(program.text, subject=program.subject, versions=program.versions))
    if not drift:
        print(f"LOCKED {path}: {drift.kernels[1]} kernels, as in the lock")
        return
    print(f"DRIFT {path}: {drift.kernels[0]} kernels in the lock, {drift.kernels[1]} now; {then.subject}")
    print("\n".join(drift.lines()))
    raise typer.Exit(1)


def _kernel_table(program: _Program, count: int) -> str:
    """The kernels that take longest, or, unmeasured, that move most."""
    from jax_baseline.diff.programs import short_place
    from jax_baseline.hlo import kernels, parse

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
            short_place(one.place.file, one.place.line) if one.place else "–",
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
