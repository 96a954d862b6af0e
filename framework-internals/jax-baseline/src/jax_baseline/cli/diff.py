"""The command ``diff``: compare XLA's program of a function with Inductor's."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, cast

import typer

from benchkit import UserError, numbers
from benchkit.device import resolve_device
from benchkit.report import markdown_table
from jax_baseline.cli.options import AttentionOption, BatchSize, DeviceOption, Dtype, Preset, user_errors
from jax_baseline.diff.programs import Program
from jax_baseline.diff.region_diff import CompiledRegion
from torch_baseline.config import GPTConfig, Precision

# Largest relative difference that rounding explains, between two results or between sums over them, by dtype. Results
# of whole numbers must be equal.
_SAME = {"float64": 1e-9, "float32": 2e-4, "float16": 1e-2, "bfloat16": 1e-2}
_SIXTEEN_BITS = re.compile(r"bf16|float16|\bf16\b|\bhalf\b", re.IGNORECASE)


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
    layers: Annotated[int, typer.Option(min=1, help="number of blocks")] = 2,
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
        specs: Sequence[ModelSpec | FunctionSpec]  # of JAX and of torch
        if torch_function and jax_function:
            made = inputs or f"{torch_function.rpartition(':')[0]}:inputs"
            specs = [FunctionSpec(name, made, gradients, where, repeats) for name in (jax_function, torch_function)]
        else:
            model = replace(GPTConfig.preset(preset), n_layer=layers)
            specs = [ModelSpec(model, batch_size, cast(Precision, dtype), attention, where, repeats)] * 2
        try:
            programs = compile_both(*specs)
        except ChildFailure as error:  # exit status 2, because nothing was compared
            raise UserError(f"compiling or running one of the programs failed: {error}") from error
    if not _print_diff(programs, show, coarse=where != "cpu"):  # a GPU multiplies float32 matrices in TF32
        raise typer.Exit(1)


def _print_diff(programs: tuple[Program, Program], show: int, *, coarse: bool) -> bool:
    """Print the comparison, explain the regions that differ most, and return whether the results agree."""
    from jax_baseline.diff.region_diff import compare_programs, most_different
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
    from jax_baseline.diff.region_diff import difference_between

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
