"""The commands ``hlo`` and ``lock``: read XLA's program, and lock its fusions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, cast

import typer

from benchkit import UserError, numbers
from benchkit.device import Device, resolve_device
from benchkit.report import markdown_table
from benchkit.results import write_text_atomically
from jax_baseline.cli.options import AttentionOption, BatchSize, DeviceOption, Dtype, Preset, user_errors
from jax_baseline.hlo import Summary, parse, summarise
from jax_baseline.hlo.kernels import join_ops
from jax_baseline.hlo.lock import compare_locks, make_lock, read_lock
from torch_baseline.config import GPTConfig, Precision, TrainConfig

Dump = Annotated[Path | None, typer.Argument(help="text of your optimised module [default: the train step]")]
Layers = Annotated[int | None, typer.Option(min=1, help="number of blocks [default: the preset's]")]
Measure = Annotated[bool, typer.Option("--measure", help="run the program and time every kernel with the profiler")]
Target = Annotated[
    str, typer.Option(help="h200: compile for this GPU on a machine without it (optional extra) [default: --device]")
]


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
            return _Program(dump.read_text(), str(dump), _installed_versions())
        except OSError as error:
            raise UserError(f"cannot read {dump}: {error.strerror}") from error
    from engines.spec import bench_config

    model, training = bench_config(preset, batch_size=batch_size, dtype=cast(Precision, dtype), layers=layers)
    subject = f"train step of {preset}, {model.n_layer} blocks, {batch_size} sequences, {dtype}, {attention} attention"
    if target:
        return _ahead_of_time(model, training, attention, subject, target, measure)
    return _compiled_here(model, training, attention, subject, resolve_device(device), measure)


def _installed_versions() -> dict[str, str]:
    """Versions beside a user's dump, whose text has none: they made it if it was made here."""
    return {f"{name} installed": version(name) for name in ("jax", "jaxlib")}


def _compiled_here(
    model: GPTConfig, training: TrainConfig, attention: str, subject: str, device: Device, measure: bool
) -> _Program:
    from jax_baseline.hlo.compiled_step import compile_train_step
    from jax_baseline.hlo.stablehlo import count_operations

    step = compile_train_step(model, training, attention=attention, device=device, repeats=5 if measure else 0)
    operations = count_operations(step.stablehlo).total()
    notes = [
        f"compiled from {operations} StableHLO operations in {numbers.with_unit(step.compile_seconds, 's')}; "
        f"{numbers.with_unit(step.temporaries, 'B')} of temporaries"
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


def _check(program: _Program, path: Path) -> None:
    """Compare the program with a lock file; print the differences and exit with status 1 if there are any."""
    try:
        then = read_lock(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; write it with jax-baseline lock") from error
    drift = compare_locks(then, make_lock(program.text, subject=program.subject, versions=program.versions))
    if not drift:
        print(f"LOCKED {path}: {drift.kernels[1]} kernels, as in the lock")
        if reshaped := drift.reshaped():
            print(f"other shapes in {len(reshaped)} of {len(then.kernels)} signatures, such as {reshaped[0]}")
        return
    made_of = "" if then.subject == program.subject else f" (of {then.subject})"
    print(
        f"DRIFT {program.subject} from {path}: {drift.kernels[0]} kernels in the lock{made_of}, {drift.kernels[1]} now"
    )
    print("\n".join(drift.lines()))
    raise typer.Exit(1)


def _kernel_table(program: _Program, count: int) -> str:
    """Return the kernels that take longest, or that move most bytes if they are not measured."""
    from jax_baseline.diff.programs import short_location
    from jax_baseline.hlo import kernels

    seconds = program.seconds or {}
    listed = sorted(
        kernels(parse(program.text)), key=lambda kernel: (-seconds.get(kernel.name, 0.0), -kernel.total.bytes)
    )
    rows = [
        (
            kernel.name,
            kernel.description,
            join_ops(kernel.ops),
            f"{kernel.region or '–'} ({kernel.phase})",
            short_location(kernel.location.file, kernel.location.line) if kernel.location else "–",
            kernel.calls,
            numbers.with_unit(kernel.total.flops, "FLOP"),
            numbers.with_unit(kernel.total.bytes, "B"),
            *((numbers.with_unit(seconds[kernel.name], "s") if kernel.name in seconds else "–",) if seconds else ()),
        )
        for kernel in listed[:count]
    ]
    header = ["kernel", "kind", "operations", "part", "line", "runs", "FLOP", "bytes", *(["time"] if seconds else [])]
    return markdown_table(header, rows, left=5)


COMMANDS = (hlo, lock)
