"""The commands ``hlo`` and ``lock``: read XLA's program, and lock its fusions."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, cast

import typer

from benchkit import UserError
from benchkit.device import resolve_device
from benchkit.report import show
from benchkit.results import write_text_atomically
from engines.spec import bench_config
from jax_baseline.cli.options import AttentionOption, BatchSize, DeviceOption, Dtype, Preset, refuse, user_errors
from jax_baseline.diff.measurements import step_figures
from jax_baseline.hlo import parse
from jax_baseline.hlo.compiled_step import CompiledStep, compile_train_step
from jax_baseline.hlo.gpu_target import compile_step_for_h200
from jax_baseline.hlo.lock import Drift, make_lock, read_lock
from jax_baseline.report.hlo_sections import kernel_table, kind_table, part_table, step_table
from torch_baseline.config import Precision

Dump = Annotated[Path | None, typer.Argument(help="text of your optimised module [default: the train step]")]
Layers = Annotated[int | None, typer.Option(min=1, help="number of blocks [default: the preset's]")]
Measure = Annotated[bool, typer.Option("--measure", help="run the program and time every kernel with the profiler")]
Target = Annotated[
    str, typer.Option(help="h200: compile for this GPU on a machine without it (optional extra) [default: --device]")
]


_OF_THE_STEP = ("preset", "layers", "batch_size", "dtype", "attention", "device", "target")
_OF_A_FILE = "a file has the text of a program, compiled already"


def hlo(
    context: typer.Context,
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
    if dump is not None:
        refuse(context, (*_OF_THE_STEP, "measure", "save_stablehlo"), _OF_A_FILE)
    with user_errors():
        subject, step = _program(dump, preset, layers, batch_size, dtype, attention, device, target, measure)
        figures = step_figures(step, longest)
        if check is not None:
            _check(subject, step, check)
    for path, text in ((save, step.text), (save_stablehlo, step.stablehlo)):
        if path is not None:
            write_text_atomically(path, text)
    show(
        subject,
        parse(step.text).assumptions,
        step_table(figures),
        kind_table(figures.summary),
        part_table(figures.summary),
        kernel_table(figures.longest),
    )


def lock(
    context: typer.Context,
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
    if dump is not None:
        refuse(context, _OF_THE_STEP, _OF_A_FILE)
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
    return f"{subject}, for an H200, without autotuning", compile_step_for_h200(model, training, attention=attention)


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


COMMANDS = (hlo, lock)
