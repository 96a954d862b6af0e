"""The command line: which build serves, build by a road, time the operator at a size of one's own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchkit import UserError, numbers
from benchkit.device import resolve_device
from benchkit.progress import working
from custom_ops import measure
from custom_ops.builds import build_info, extension
from custom_ops.checks import DTYPES
from custom_ops.roads import ahead_of_time, just_in_time

app = typer.Typer(
    help="Every road from a C++/CUDA kernel to torch.ops.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        print(f"custom-ops: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


@app.command()
def info() -> None:
    """Say which build serves the operators in this environment, and why not another; builds nothing."""
    with _one_line_errors():
        found = build_info()
        print(f"served by      {found.road or 'no build'}")
        print(f"CUDA kernels   {'yes' if found.cuda else 'no'}")
        print(f"torch          {torch.__version__}")
        for what, why in found.not_served.items():
            print(f"without {what}: {why}")


def _build_just_in_time(out: Path) -> str:
    if (reason := just_in_time.missing()) is not None:
        raise UserError(reason)
    return just_in_time.load().__file__


def _build_ahead_of_time(out: Path) -> str:
    wheel = ahead_of_time.build_wheel(out)
    with working("loading the wheel in a fresh process"):
        measure.load_wheel_apart(wheel)
    return f"{wheel}\ninstall it with: python -m pip install --no-deps --force-reinstall {wheel}"


_ROADS: dict[str, Callable[[Path], str]] = {
    "ahead-of-time": _build_ahead_of_time,
    "just-in-time": _build_just_in_time,
}


@app.command()
def build(
    road: Annotated[str, typer.Argument(help=" or ".join(_ROADS))] = "ahead-of-time",
    out: Annotated[Path, typer.Option(help="Folder for the wheel of the ahead-of-time road.")] = Path("dist"),
) -> None:
    """Build the kernels by one road: a wheel that has been loaded once, or a filled compilation cache."""
    with _one_line_errors():
        if road not in _ROADS:
            raise UserError(f"expected one of {', '.join(_ROADS)}, got {road!r}")
        start = time.perf_counter()
        with working(f"building {road}"):
            built = _ROADS[road](out)
        print(f"{built}\n{numbers.with_unit(time.perf_counter() - start, 's')}")


@app.command()
def bench(
    count: Annotated[int, typer.Option(min=1, help="Elements of each operand.")] = 2**20,
    dtype: Annotated[str, typer.Option(help=", ".join(measure.name_of(one) for one in DTYPES))] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seconds: Annotated[float, typer.Option(min=0.01, help="How long to sample.")] = 1.0,
) -> None:
    """Time vector_add against torch.add and against the bare pybind11 function, at one size and dtype."""
    with _one_line_errors():
        dtypes = {measure.name_of(one): one for one in DTYPES}
        if dtype not in dtypes:
            raise UserError(f"--dtype: expected one of {', '.join(dtypes)}, got {dtype!r}")
        resolved = resolve_device(device)
        extension()
        records = list(measure.bandwidths(resolved, [count], [dtypes[dtype]], seconds=seconds))
        table = Table(title=f"{numbers.count(count)} × {dtype} on {resolved}, {records[0].labels['clock']}")
        for heading in ("", "time", "bandwidth", "over torch.add"):
            table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for record in records:
            figures = (numbers.quantity(record[name]) for name in ("time", "rate", "speedup"))
            table.add_row(str(record.labels["form"]), *figures)
        Console(width=max(Console().width, 110)).print(table)
