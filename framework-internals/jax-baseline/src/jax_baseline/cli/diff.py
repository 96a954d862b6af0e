"""The command ``diff``: compare XLA's program of a function with Inductor's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, cast

import typer

from benchkit import UserError
from benchkit.device import resolve_device
from benchkit.report import show
from jax_baseline.cli.options import AttentionOption, BatchSize, DeviceOption, Dtype, Preset, refuse, user_errors
from jax_baseline.diff.region_diff import compare_programs, most_different
from jax_baseline.report.explanation import explain
from jax_baseline.report.hlo_sections import compilers_table, notes_of, region_table
from torch_baseline.config import GPTConfig, Precision


def diff(
    context: typer.Context,
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
    layers: Annotated[int, typer.Option(min=1, help="number of blocks")] = 2,
    batch_size: BatchSize = 16,
    dtype: Dtype = "float32",
    attention: AttentionOption = "xla",
    device: DeviceOption = "auto",
    repeats: Annotated[int, typer.Option(min=0, help="number of runs to time")] = 5,
    explained: Annotated[
        int, typer.Option("--show", min=0, help="number of regions to explain, with both sources")
    ] = 3,
) -> None:
    """Compare XLA's and Inductor's programs of one function. Exit status 1 if they differ, 3 without a verdict."""
    from benchkit.processes import ChildFailure
    from jax_baseline.diff.compiled_programs import FunctionSpec, ModelSpec, compile_both
    from jax_baseline.diff.location import located
    from jax_baseline.diff.verdict import judge, require_repeatable

    with user_errors():
        if (torch_function is None) != (jax_function is None):
            raise UserError("diff takes two functions (torch's, then JAX's) or none (the baseline's loss), got one")
        if torch_function:
            refuse(context, ("preset", "layers", "batch_size", "dtype", "attention"), "they are of the baseline's loss")
        else:
            refuse(context, ("inputs", "gradients"), "they are for two functions of yours; name them")
        where = resolve_device(device)
        specs: Sequence[ModelSpec | FunctionSpec]  # of JAX and of torch
        if torch_function and jax_function:
            made = inputs or f"{torch_function.rpartition(':')[0]}:inputs"
            specs = [FunctionSpec(name, made, gradients, where, repeats) for name in (jax_function, torch_function)]
        else:
            model = replace(GPTConfig.preset(preset), n_layer=layers)
            specs = [ModelSpec(model, batch_size, cast(Precision, dtype), attention, where, repeats)] * 2
        try:
            programs = compile_both(*specs, rounding=True)
        except ChildFailure as error:  # exit status 2, because nothing was compared
            raise UserError(f"compiling or running one of the programs failed: {error}") from error
    xla, inductor = programs
    for program, what in ((xla, "JAX's function"), (inductor, "torch's function")):
        require_repeatable(program.rounding, what)
    compared = compare_programs(*programs)
    show(region_table(compared.regions), compilers_table(compared), notes_of(compared))
    verdict = judge(
        xla.values,
        inductor.values,
        (xla.rounding, inductor.rounding),
        ("XLA's program", "Inductor's program"),
        (xla.precision, inductor.precision),
    )
    print(verdict.text)
    of_jax, of_torch = specs
    if verdict.where and isinstance(of_jax, FunctionSpec) and isinstance(of_torch, FunctionSpec):
        try:
            print(located(of_jax, of_torch, verdict.where))
        except ChildFailure as error:  # the verdict stands without it
            print(f"where they part is not known: {error}")
    for region in most_different(compared.regions, explained):
        print()
        print(explain(region))
    if not verdict.same:
        raise typer.Exit(1 if verdict.judged else 3)
