"""The commands ``hlo`` and ``lock``: read XLA's program, and lock its fusions."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, cast

import typer

from benchkit import UserError, numbers
from benchkit.device import resolve_device
from benchkit.report import markdown_table, show
from benchkit.results import write_text_atomically
from engines.spec import bench_config
from jax_baseline.cli.options import AttentionOption, BatchSize, DeviceOption, Dtype, Preset, user_errors
from jax_baseline.diff.programs import short_location
from jax_baseline.hlo import Summary, kernels, parse, summarise
from jax_baseline.hlo.compiled_step import CompiledStep, compile_train_step
from jax_baseline.hlo.gpu_target import compile_step_for_h200
from jax_baseline.hlo.kernels import join_ops
from jax_baseline.hlo.lock import Drift, make_lock, read_lock
from jax_baseline.report.hlo_sections import kind_table, part_table
from torch_baseline.config import Precision

Dump = Annotated[Path | None, typer.Argument(help="text of your optimised module [default: the train step]")]
Layers = Annotated[int | None, typer.Option(min=1, help="number of blocks [default: the preset's]")]
Measure = Annotated[bool, typer.Option("--measure", help="run the program and time every kernel with the profiler")]
Target = Annotated[
    str, typer.Option(help="h200: compile for this GPU on a machine without it (optional extra) [default: --device]")
]


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
    longest: Annotated[
        int, typer.Option("--kernels", min=0, help="number of kernels to list, the longest or largest first")
    ] = 0,
    save: Annotated[Path | None, typer.Option(help="file for the text of the module")] = None,
    save_stablehlo: Annotated[Path | None, typer.Option(help="file for the StableHLO that JAX passes to XLA")] = None,
    check: Annotated[Path | None, typer.Option(help="a fusion lock; exit status 1 if the fusions differ")] = None,
) -> None:
    """Summarise XLA's program: kernels by kind and part of the model, FLOPs, bytes, buffers and measured times."""
    with user_errors():
        subject, step = _program(dump, preset, layers, batch_size, dtype, attention, device, target, measure)
        summary = summarise(step.text, step.seconds if measure else None)
        if check is not None:
            _check(subject, step, check)
    for path, text in ((save, step.text), (save_stablehlo, step.stablehlo)):
        if path is not None:
            write_text_atomically(path, text)
    print(subject)
    _print_program(step, summary, timed=measure)
    if longest:
        print(_kernel_table(step, longest))


def _print_program(step: CompiledStep, summary: Summary, *, timed: bool) -> None:
    print(
        f"{summary.kernels} kernels, {summary.dots} matmuls; {numbers.with_unit(summary.flops, 'FLOP')}, "
        f"{numbers.with_unit(summary.bytes, 'B')} read and written; {summary.donated} of {summary.arguments} arguments "
        f"donated ({numbers.with_unit(summary.donated_bytes, 'B')} of {numbers.with_unit(summary.argument_bytes, 'B')})"
    )
    for note in filter(None, (*_notes(step), parse(step.text).assumptions)):
        print(note)
    show(kind_table(summary), part_table(summary, timed=timed))


def _notes(step: CompiledStep) -> list[str]:
    """What is known of the compilation, and of the time of a step."""
    if not step.compile_seconds:  # a file
        return []
    took, scratch = numbers.with_unit(step.compile_seconds, "s"), numbers.with_unit(step.temporaries, "B")
    if not step.stablehlo:
        return [f"compiled ahead of time in {took}, without autotuning or times; {scratch} of temporaries"]
    notes = [f"compiled from {step.stablehlo_operations} StableHLO operations in {took}; {scratch} of temporaries"]
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
    return notes


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
        subject, step = _program(dump, preset, layers, batch_size, dtype, attention, device, target, measure=False)
        made = make_lock(step.text, subject=subject, versions=step.versions)
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
) -> tuple[str, CompiledStep]:
    """Read the module of a file, or compile the train step for this machine or for the target; and say what it is."""
    if dump is not None:
        try:
            # The text of a program has no versions. The installed ones made it if it was made here.
            versions = {f"{name} installed": version(name) for name in ("jax", "jaxlib")}
            return str(dump), CompiledStep(dump.read_text(), versions)
        except OSError as error:
            raise UserError(f"cannot read {dump}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"{dump} is no text; write that of compiled.as_text(), or the .txt file of XLA_FLAGS=--xla_dump_to"
            ) from error
    model, training = bench_config(preset, batch_size=batch_size, dtype=cast(Precision, dtype), layers=layers)
    subject = f"train step of {preset}, {model.n_layer} blocks, {batch_size} sequences, {dtype}, {attention} attention"
    if not target:
        where = resolve_device(device)
        repeats = 5 if measure else 0
        step = compile_train_step(model, training, attention=attention, device=where, repeats=repeats)
        return f"{subject}, on {where}", step
    if target != "h200":
        raise UserError(f"--target takes h200, got {target!r}")
    if measure:
        raise UserError("--measure runs the program and --target h200 only compiles it; use one of them")
    return f"{subject}, for an H200", compile_step_for_h200(model, training, attention=attention)


def _check(subject: str, step: CompiledStep, path: Path) -> None:
    """Compare the program with a lock file; print the differences and exit with status 1 if there are any."""
    try:
        then = read_lock(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; write it with jax-baseline lock") from error
    drift = Drift(then, make_lock(step.text, subject=subject, versions=step.versions))
    now_has = sum(drift.now.kernels.values())
    if not drift:
        print(f"LOCKED {path}: {now_has} kernels, as in the lock")
        if reshaped := drift.reshaped():
            print(f"other shapes in {len(reshaped)} of {len(then.kernels)} signatures, such as {reshaped[0]}")
        return
    made_of = "" if then.subject == subject else f" (of {then.subject})"
    had = sum(then.kernels.values())
    print(f"DRIFT {subject} from {path}: {had} kernels in the lock{made_of}, {now_has} now")
    print("\n".join(drift.lines()))
    raise typer.Exit(1)


def _kernel_table(step: CompiledStep, count: int) -> str:
    """Return the kernels that take longest, or that move most bytes if they are not measured."""
    seconds = step.seconds
    listed = sorted(kernels(parse(step.text)), key=lambda kernel: (-seconds.get(kernel.name, 0.0), -kernel.total.bytes))
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
