"""The command line: show the build in use, build the library, time operators, write a new operator package."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchkit import Record, UserError, numbers
from benchkit.command import one_line_errors
from benchkit.command.finite import seconds_option
from benchkit.command.progress import working
from benchkit.device import resolve_device
from benchkit.results import Absence
from benchkit.timing.limits import memory_limits
from custom_ops.bench import build_costs, speed
from custom_ops.bench.cases import benchmark_cases
from custom_ops.builds import autograd_nodes, operator_library, skeleton
from custom_ops.builds.loading import build_info, load, operators
from custom_ops.operators.checks import DTYPES
from custom_ops.roads import ahead_of_time, just_in_time
from lowering import describe

DETERMINISM = "dq of 16-bit types varies in its last bits on Hopper, unless torch.use_deterministic_algorithms is on"

app = typer.Typer(
    help="Every road from a C++/CUDA kernel to torch.ops.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.command()
def info() -> None:
    """Show the build in use here, why the others are not, and the measured lowerings; builds nothing."""
    with one_line_errors("custom-ops"):
        build = build_info()
        print(f"library        {build.road or 'none'}{f', {build.file}' if build.file else ''}")
        print(f"CUDA kernels   {build.cuda or 'none'}")
        print(f"CPU kernels    {build.instructions or 'not compiled yet'}")
        print(f"derivatives    {build.autograd}")
        print(f"attention      {DETERMINISM}")
        taken = "the kernel" if build.road or build.cuda else "the formula, with the matrix of scores in memory"
        print(f"               its windows, masks, … under torch.compile: {taken}")
        print(f"sha256         {build.sha256 or 'not compiled yet'}")
        print(f"torch          {torch.__version__}")
        for what, why in build.missing.items():
            print(f"without {what}: {why}")
        sources = dict.fromkeys((rules.name for rules in operators()), "custom_ops")
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            print(f"\n{describe(sources, device)}")


def _build_library(out: Path) -> str:
    library = operator_library.build(out / operator_library.FILE_NAME)
    return f"{library}\nuse it with: CUSTOM_OPS_LIBRARY={shlex.quote(str(library))}"


def _build_autograd(out: Path) -> str:
    return f"{autograd_nodes.build()}\nevery process with torch {torch.__version__} finds it there"


def _build_just_in_time(out: Path) -> str:
    if (reason := just_in_time.missing()) is not None:
        raise UserError(reason)
    return just_in_time.load().__file__


def _build_ahead_of_time(out: Path) -> str:
    wheel = ahead_of_time.build_wheel(out)
    with working("loading the wheel in a fresh process"), tempfile.TemporaryDirectory() as folder:
        build_costs.load_wheel(Path(shutil.copy2(wheel, folder)))
    return f"{wheel}\ninstall it with: python -m pip install --no-deps --force-reinstall {shlex.quote(str(wheel))}"


_BUILDS: dict[str, Callable[[Path], str]] = {
    "library": _build_library,
    "autograd": _build_autograd,
    "ahead-of-time": _build_ahead_of_time,
    "just-in-time": _build_just_in_time,
}


@app.command()
def build(
    what: Annotated[str, typer.Argument(help=" or ".join(_BUILDS))] = "library",
    out: Annotated[Path, typer.Option(help="Folder for the library or the wheel.")] = Path("dist"),
) -> None:
    """Build the library of all operators, their C++ derivatives for this torch, or the vector_add example."""
    with one_line_errors("custom-ops"):
        if what not in _BUILDS:
            raise UserError(f"expected one of {', '.join(_BUILDS)}, got {what!r}")
        start = time.perf_counter()
        with working(f"building: {what}"):
            built = _BUILDS[what](out)
        print(f"{built}\n{numbers.with_unit(time.perf_counter() - start, 's')}")


@app.command()
def bench(
    op: Annotated[list[str] | None, typer.Option(help="Operator to time; repeat for several. Default: all.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of elements of each operand.")] = 2**20,
    columns: Annotated[int, typer.Option(min=1, help="Elements per row, for operators on rows.")] = 4096,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(map(speed.name_of, DTYPES))}; repeat for several. Default: float32."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compiled: Annotated[bool, typer.Option(help="Also time torch.compile of torch's operators.")] = False,
    choices: Annotated[bool, typer.Option(help="Also time the variants of bias_gelu's kernels.")] = False,
    seconds: Annotated[float, seconds_option(help="Sampling time for each operator and dtype.")] = 1.0,
) -> None:
    """Time operators against torch's operators and this machine's memory limit, at a given size."""
    with one_line_errors("custom-ops"):
        dtypes = _dtypes(dtype or ["float32"])
        ops = op or list(benchmark_cases())
        if unknown := set(ops) - set(benchmark_cases()):
            raise UserError(f"--op: expected one of {', '.join(benchmark_cases())}, got {', '.join(sorted(unknown))}")
        resolved = resolve_device(device)
        load()
        limits = {
            str(limit.labels["traffic"]): limit["bandwidth"].value for limit in memory_limits(resolved, seconds=0.5)
        }
        records = speed.operators(resolved, ops, [count], dtypes, columns=columns, compiled=compiled, seconds=seconds)
        _print_table("operator", records, ("op", "form", "dtype"), limits)
        if choices:
            _print_table(
                "access", speed.accesses(resolved, count, dtypes, columns=columns, seconds=seconds), ("access", "dtype")
            )
            if resolved == "cuda":
                records = speed.plans(resolved, count, dtypes, columns=columns, seconds=seconds)
                _print_table("plan", records, ("across", "blocks", "dtype"))


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the package, the operator and its namespace, e.g. my_norm.")],
    folder: Annotated[Path, typer.Option(help="Parent folder of the new package.")] = Path(),
) -> None:
    """Write a package with one operator, ready to build and to test."""
    with one_line_errors("custom-ops"):
        for path in skeleton.write(name, folder):
            print(path)
        root = shlex.quote(str(folder / name))
        print(f"next: cd {root} && python setup.py build_ext --inplace && PYTHONPATH=src python -m pytest")


def _dtypes(names: list[str]) -> list[torch.dtype]:
    known = {speed.name_of(dtype): dtype for dtype in DTYPES}
    if unknown := set(names) - set(known):
        raise UserError(f"--dtype: expected one of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    return [known[name] for name in names]


def _print_table(
    title: str,
    records: Iterable[Record | Absence],
    labels: tuple[str, ...],
    limits: Mapping[str, float] | None = None,
) -> None:
    table = Table(title=title)
    for heading in (*labels, "time", "bandwidth", "of the limit", "over torch"):
        table.add_column(heading, justify="left" if heading in labels else "right", no_wrap=True)
    absent: list[Absence] = []
    for record in records:
        if isinstance(record, Absence):
            absent.append(record)
            continue
        share = limits and record["rate"].value / limits[str(record.labels["limit"])]
        table.add_row(
            *(str(record.labels[label]) for label in labels),
            numbers.quantity(record["time"]),
            numbers.quantity(record["rate"]),
            numbers.percent(share) if share else "",
            numbers.quantity(record["speedup"]) if "speedup" in record.values else "",
        )
    Console(width=max(Console().width, 130)).print(table)
    for missing in absent:
        print(f"{missing.what} is missing: {missing.why}", file=sys.stderr)
