"""What all commands of ``compile-bench`` share: options, exit statuses, and one-line errors."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from benchkit import UserError
from benchkit.command import one_line_errors
from benchkit.command.errors import printable
from benchkit.command.finite import seconds_option
from benchkit.device import resolve_device
from benchkit.processes import ChildFailure
from benchkit.report import Block, show
from compile_bench.targets.case import MODES, SCOPES, Case

OVER_BUDGET, UNUSABLE, NOT_MEASURED, INTERRUPTED = 1, 2, 3, 130

_TARGET = typer.Argument(help="file.py:function or module:function that returns (model, args), or a name of the zoo.")
TargetName = Annotated[str, _TARGET]
TargetNames = Annotated[list[str], _TARGET]
Train = Annotated[bool, typer.Option("--train/--infer", help="A training step, or a forward pass without gradients.")]
Mode = Annotated[str, typer.Option(help=f"Mode of torch.compile: {', '.join(MODES)}.")]
Dynamic = Annotated[
    bool | None,
    typer.Option("--dynamic/--static", help="Symbolic sizes from the start, or never. Default: PyTorch decides."),
]
ScopeName = Annotated[
    str,
    typer.Option(
        "--scope",
        help="What is compiled. whole: the model; blocks: each repeated block; nested: nested_compile_region on these.",
    ),
]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Limit = Annotated[float, seconds_option(help="Seconds after which a measuring process is ended.")]
Seconds = Annotated[float, seconds_option(help="Seconds of sampling steady steps.")]


def case_of(target: str, train: bool, mode: str, dynamic: bool | None, device: str, scope: str = "whole") -> Case:
    """The case that a command line names."""
    known = next((known for known in MODES if known == mode), None)
    if known is None:
        raise UserError(f"--mode takes {', '.join(MODES)}, got {mode!r}")
    extent = next((extent for extent in SCOPES if extent == scope), None)
    if extent is None:
        raise UserError(f"--scope takes {', '.join(SCOPES)}, got {scope!r}")
    return Case(target, resolve_device(device), train, known, dynamic, extent)


def leaving(command: Callable[..., int]) -> Callable[..., None]:
    """The command, exiting with the status that it returns. Errors of the user and of processes are one line."""

    @functools.wraps(command)
    def left(**arguments: Any) -> None:
        try:
            with one_line_errors("compile-bench"):  # its status is UNUSABLE
                status = command(**arguments)
        except ChildFailure as error:
            print(f"compile-bench: {error}", file=sys.stderr)
            status = NOT_MEASURED
        raise typer.Exit(status)

    return left


def tell(line: str) -> None:
    """Print a line at once: what is printed stays, however the command ends."""
    print(printable(line), flush=True)


@contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Inside, a signal to terminate interrupts, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def print_blocks(blocks: Sequence[Block]) -> None:
    """Print what a command found: texts line by line as they are, tables as reports show them."""
    shown = [block for block in blocks if block]
    for index, block in enumerate(shown):
        if index:
            print()
        if isinstance(block, str):
            print(block)
        else:
            show(block)
