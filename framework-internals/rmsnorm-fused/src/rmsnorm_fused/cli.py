"""Show the available back ends, check their results, time them, and build the prebuilt library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchkit import UserError, compare, numbers
from benchkit.command import one_line_errors
from benchkit.command.finite import seconds_option
from benchkit.device import Device, resolve_device
from benchkit.processes import memory
from benchkit.report import Cell, Column, Table, show
from benchkit.timing import rotating_inputs
from benchkit.timing.statistics import worst
from lowering import describe
from native_build import ARCHITECTURES, read_record
from rmsnorm_fused import rms_norm
from rmsnorm_fused.backends import IMPLEMENTATIONS, unavailable
from rmsnorm_fused.bench.accuracy import expected
from rmsnorm_fused.bench.candidates import EAGER, EPS, RmsNorm, usable
from rmsnorm_fused.impl import prebuild
from rmsnorm_fused.validation import DTYPES

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False, help=__doc__)

# What an element takes at least: of bench x, dy and the formula's tensors in float32, of check the same in float64.
_ELEMENT_BYTES = 40

_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}

DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda; auto is cuda if there is a GPU.")]
ShapeOption = Annotated[str, typer.Option(help="Shape of x, as ROWSxCOLUMNS.")]
DtypeOption = Annotated[str, typer.Option(help=f"Dtype of x and the weight: {', '.join(_NAMES)}.")]


@app.command()
def info() -> None:
    """Show which back ends can be used here, what the others lack, and the measured lowerings."""
    rows = []
    for name in IMPLEMENTATIONS:
        for device in ("cpu", "cuda"):
            if name in ("cpp", "cuda") and (name == "cuda") != (device == "cuda"):
                continue
            reason = unavailable(name, device)
            if reason is None and device == "cuda" and not torch.cuda.is_available():
                reason = "torch sees no CUDA GPU"
            rows.append((name, device, "yes" if reason is None else f"no: {reason}"))
    _print(rows, "back end", "device", "usable", texts=3)
    with one_line_errors("rmsnorm-fused"):
        print(
            f"instruction set of the C++ kernels: {prebuild.cpu_level()} ({prebuild.LEVEL_VARIABLE} names a lower one)"
        )
        names = ("rms_norm", "rms_norm_add", "rms_norm_float8", "layer_norm", "layer_norm_add")
        operators = dict.fromkeys(names, "rmsnorm_fused")
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            print(f"\n{describe(operators, device)}")


@app.command()
def check(shape: ShapeOption = "512x1024", dtype: DtypeOption = "float32", device: DeviceOption = "auto") -> None:
    """Compare every usable back end with float64, forward and backward; the exit status is 1 if one is wrong."""
    with one_line_errors("rmsnorm-fused"):
        where = resolve_device(device)
        rows, columns, kind = _parse(shape, dtype, where)
        torch.manual_seed(0)
        x, dy = (torch.randn(rows, columns, device=where).to(kind) for _ in range(2))
        weight = torch.randn(columns, device=where).to(kind).requires_grad_()
        references = expected(x, weight, dy, EPS)
        lines: list[tuple[str, ...]] = []
        shares: list[float] = []
        for name in IMPLEMENTATIONS:
            if unavailable(name, where) is not None:
                continue
            leaf = x.clone().requires_grad_()
            y = rms_norm(leaf, weight, eps=EPS, backend=name)
            results = dict(zip(references, (y, *torch.autograd.grad(y, (leaf, weight), dy)), strict=True))
            for part, result in results.items():
                share = references[part].share_of_bound(result.detach())
                shares.append(share)
                error = numbers.error_size(references[part].relative_error(result.detach()))
                lines.append((name, part, error, numbers.significant(share, 2)))
        _print(lines, "back end", "result", "largest error", "of the bound", texts=2)
    raise typer.Exit(0 if worst(shares) <= 1 else 1)


@app.command()
def bench(
    shape: ShapeOption = "4096x4096",
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    seconds: Annotated[float, seconds_option(help="Sampling time of each of the two measurements.")] = 1.0,
) -> None:
    """Time every implementation at one shape: the forward pass, and forward and backward together."""
    with one_line_errors("rmsnorm-fused"):
        where = resolve_device(device)
        rows, columns, kind = _parse(shape, dtype, where)
        functions = {name: c.plain for name, c in usable(where)[0].items() if c.widest is None or columns <= c.widest}
        weight = torch.ones(columns, device=where, dtype=kind, requires_grad=True)
        sets = rotating_inputs(
            lambda: tuple(torch.randn(rows, columns, device=where).to(kind) for _ in range(2)), device=where
        )
        leaves = [(x.requires_grad_(), dy) for x, dy in sets]

        def both(function: RmsNorm) -> Callable[[torch.Tensor, torch.Tensor], object]:
            return lambda x, dy: torch.autograd.grad(function(x, weight), (x, weight), dy)

        with torch.no_grad():
            forward = compare(
                {name: lambda x, _, f=function: f(x, weight) for name, function in functions.items()},
                device=where,
                inputs=leaves,
                seconds=seconds,
            )
        together = compare(
            {name: both(function) for name, function in functions.items()}, device=where, inputs=leaves, seconds=seconds
        )
    lines = []
    for name in functions:
        cells: list[Cell] = [name]
        for comparison in (forward, together):
            ratio = "1" if name == EAGER else numbers.with_unit(comparison.speedup(name, over=EAGER).value, "×")
            cells += [comparison[name].quantity(), ratio]
        lines.append(cells)
    _print(lines, "implementation", "forward", "against eager", "forward + backward", "against eager")


@app.command()
def build(
    out: Annotated[Path, typer.Option(help="Output folder; the package looks in the default one.")] = prebuild.HERE,
    cuda: Annotated[bool, typer.Option(help="Include the CUDA kernels; needs nvcc, but no GPU.")] = True,
    architectures: Annotated[
        str, typer.Option(help="CUDA architectures, comma-separated: sm_XY for machine code, compute_XY for PTX.")
    ] = ",".join(ARCHITECTURES),
) -> None:
    """Compile the kernels into one library for machines without a compiler (LibTorch's stable ABI)."""
    with one_line_errors("rmsnorm-fused"):
        library = prebuild.build(out, cuda=cuda, architectures=tuple(architectures.split(",")))
        record = read_record(library)
    kernels = f"CUDA {record.cuda} for {', '.join(record.architectures)}" if record.cuda else "without CUDA"
    size = library.stat().st_size / 2**20
    print(f"{library}: {size:.1f} MiB, {kernels}, torch {record.torch_at_least} to {record.torch_at_most}")
    if out != prebuild.HERE:
        print(f"to use it: export {prebuild.VARIABLE}={library}")


def _print(lines: Sequence[Sequence[Cell]], *header: str, texts: int = 1) -> None:
    """Print a table whose first columns hold texts."""
    show(Table(lines, [Column(title, itemgetter(place), place < texts) for place, title in enumerate(header)]))


def _parse(shape: str, dtype: str, device: Device) -> tuple[int, int, torch.dtype]:
    rows, cross, columns = shape.partition("x")
    if not (cross and rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise UserError(f"--shape: expected ROWSxCOLUMNS, for example 4096x1024, got {shape!r}")
    if dtype not in _NAMES:
        raise UserError(f"--dtype: expected one of {', '.join(_NAMES)}, got {dtype!r}")
    try:
        memory.require(_ELEMENT_BYTES * int(rows) * int(columns), device)
    except memory.DoesNotFit as error:
        raise UserError(f"--shape {shape}: {error}; take fewer rows or columns") from None
    return int(rows), int(columns), _NAMES[dtype]
