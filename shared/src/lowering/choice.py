"""Which lowering a call takes under torch.compile, decided while Dynamo traces it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch

from benchkit import UserError
from lowering import rows, tuned
from lowering.table import Choice, Direction, Row, read_table
from lowering.torch_private import annotate, constant_under_compile, exporting

Lowering = Literal["formula", "kernel", "measured"]
"""What a caller asks for; ``measured`` is the row of the table for the call, and the formula without a row."""

LOWERINGS: tuple[Lowering, ...] = get_args(Lowering)
"""Every :data:`Lowering`."""

VARIABLE, MODE_VARIABLE = "LOWERING_TABLE", "LOWERING"

MODES = ("off", "replay")
"""Values of ``LOWERING``: formulas alone; measured rows, the default."""

R = TypeVar("R")

# Dynamo reads these while it traces and guards what it has read, so a compiled function is compiled again when they
# change. They are plain values for that reason: it guards no ContextVar (torch 2.13).
_chosen: dict[str, Lowering] = {}  # by operator; "" is every operator
_choices: list[dict[str, Lowering]] = []  # those of the contexts of choose() that make it up
_added = os.environ.get(VARIABLE, "")  # path of the table beside the committed one
_mode = os.environ.get(MODE_VARIABLE, "replay")
_revision = 0  # of the rows beside the committed ones
_recording = False

_calls: list[Call] = []


@dataclass(frozen=True)
class Call:
    """A call of an operator with two lowerings that torch.compile traced.

    Attributes:
        operator: Name of the operator.
        device_type: Device type of its first operand.
        dtype: Dtype of its first operand, such as ``float32``.
        direction: ``training`` if a gradient is recorded, else ``inference``.
        sizes: Its sizes by name.
        source: Import package with its kernel; empty if unknown.
    """

    operator: str
    device_type: str
    dtype: str
    direction: Direction
    sizes: tuple[tuple[str, int], ...]
    source: str = ""


def lower(
    operator: str,
    asked: Lowering | None,
    formula: Callable[..., R],
    kernel: Callable[..., R],
    *arguments: Any,
    sizes: Sequence[tuple[str, int]] = (),
    available: Callable[[], bool] | None = None,
    source: str = "",
    default: Choice = "formula",
) -> R:
    """Call an operator's formula or its kernel, where torch.compile traces; annotate what is traced.

    The choice is, in this order: ``asked``, what :func:`choose` says, what the tables say about this call, ``default``.
    An exported program keeps the operator unless ``asked`` says otherwise.

    Each traced node has ``node.meta["custom"]["lowering"] == {operator: choice}``; :func:`in_graph` reads it.

    Args:
        operator: Name of the operator in the tables.
        asked: The caller's own choice; None leaves it to the context and the tables.
        formula: The operator in torch's operators, which a compiler fuses with its neighbours.
        kernel: The operator as the compiler may not open it.
        arguments: Arguments of both; the first is a tensor.
        sizes: Names and sizes by which the tables distinguish calls; see :class:`lowering.table.Row`.
        available: Whether the kernel can be used here. It is asked before a row of the tables takes the kernel.
        source: Import package with the kernel. What a machine measured for itself counts for the same source only.
        default: The choice where nothing was measured; a kernel that cannot be used is not taken.

    Raises:
        ValueError: If ``asked`` is no lowering, or the variable ``LOWERING`` has an unknown value.
    """
    taken = _choice(operator, asked, arguments, sizes, available, source, default)
    with annotate({"lowering": {operator: taken}}):
        return formula(*arguments) if taken == "formula" else kernel(*arguments)


def _choice(
    operator: str,
    asked: Lowering | None,
    arguments: tuple[Any, ...],
    sizes: Sequence[tuple[str, int]],
    available: Callable[[], bool] | None,
    source: str,
    default: Choice,
) -> Choice:
    if asked is not None:
        check_lowering(asked)
    elif exporting():
        return "kernel"
    else:
        asked = _chosen.get(operator, _chosen.get("", "measured"))
    x = arguments[0]
    needs_gradient = [tensor for tensor in arguments if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    direction: Direction = "training" if torch.is_grad_enabled() and needs_gradient else "inference"
    if _recording:
        _record(operator, x.device.type, x.dtype, direction, tuple(sizes), source)
    if asked != "measured":
        return asked
    if mode() == "off":
        return "formula"
    own = tuple(size for _, size in sizes)
    measured = rows.rules(operator, source, x.device.type, x.dtype, direction, _added, _revision)
    for low, high, others, choice in measured:
        if others is None or (own and low <= own[0] <= high and own[1:] == others):
            return "kernel" if choice == "kernel" and (available is None or available()) else "formula"
    return "kernel" if default == "kernel" and (available is None or available()) else "formula"


def check_lowering(lowering: str) -> None:
    """Check that a lowering is known.

    Raises:
        ValueError: If it is not one of :data:`LOWERINGS`.
    """
    if lowering not in LOWERINGS:
        raise ValueError(f"lowering: expected one of {', '.join(LOWERINGS)}, got {lowering!r}")


@contextmanager
def choose(lowering: Lowering, *operators: str) -> Iterator[None]:
    """Inside, operators under torch.compile take this lowering, unless a call has a lowering of its own.

    The choice is the whole process's. It applies to what is compiled or called inside: a compiled function is compiled
    again when the choice changes, and torch.compile keeps both programs.

    Args:
        lowering: ``"formula"``, ``"kernel"``, or ``"measured"`` for the tables' choice.
        operators: Names of operators; without any, every operator.

    Raises:
        ValueError: If ``lowering`` is unknown.

    Examples:
        >>> with choose("kernel", "rms_norm"):  # doctest: +SKIP
        ...     compiled(x)
    """
    check_lowering(lowering)
    own = dict.fromkeys(operators or ("",), lowering)
    _choose([*_choices, own])
    try:
        yield
    finally:
        _choose([other for other in _choices if other is not own])  # those of other threads stay


def _choose(choices: list[dict[str, Lowering]]) -> None:
    global _choices, _chosen
    chosen: dict[str, Lowering] = {}
    for choice in choices:  # one for every operator ends those for single ones around it
        chosen = choice if "" in choice else {**chosen, **choice}
    _choices, _chosen = choices, chosen


def load_table(path: str | Path) -> None:
    """Add a table for the rest of the process; its rows have priority over the committed ones.

    The environment variable ``LOWERING_TABLE`` does the same.

    Args:
        path: A file that ``compile-bench tune`` wrote.

    Raises:
        benchkit.UserError: If the file is no such table.
    """
    global _added, _revision
    read_table(Path(path))
    _added = str(Path(path).absolute())
    _revision += 1  # a file of the same name may have other rows now


def mode() -> str:
    """What the variable ``LOWERING`` asks for, one of :data:`MODES`.

    Raises:
        ValueError: If it is none of them.
    """
    return _known(_mode)


@constant_under_compile  # Dynamo would take an error that it traces for a reason not to compile the caller
def _known(mode: str) -> str:
    if mode not in MODES:
        # A compilation sees one graph, and which lowering is faster is decided by the whole step around it.
        remedy = "; compile-bench tune FILE:FUNCTION measures, and its rows are replayed" if mode == "tune" else ""
        raise ValueError(f"{MODE_VARIABLE}: expected one of {', '.join(MODES)}, got {mode!r}{remedy}")
    return mode


def keep_rows(measured: Sequence[Row], source: str, device_type: str) -> Path:
    """Keep rows that were measured on this machine; compiled functions that they concern are compiled again.

    Returns:
        The folder of the user's cache that they are in.

    Raises:
        benchkit.UserError: If they cannot be written.
    """
    global _revision
    place = tuned.write(measured, source, device_type)
    _revision += 1
    return place


def share_rows(sources: Sequence[str], device_type: str) -> None:
    """Let all ranks of a process group take the rows of rank 0's machine; see :func:`lowering.rows.share`.

    Raises:
        ValueError: If there is no process group.
    """
    global _revision
    rows.share(sources, device_type)
    _revision += 1


def added_table() -> str:
    """Path of the table that was added to the committed one, or an empty string."""
    return _added


def describe(sources: Mapping[str, str], device_type: str, added: str | None = None) -> str:
    """What torch.compile takes here, as a page for a terminal.

    Args:
        sources: The import package with the kernel of each operator, by the operator's name.
        device_type: Device type of the tensors.
        added: Path of another table; None for the one that was added.

    Raises:
        benchkit.UserError: If the variable ``LOWERING`` asks for what there is not.
    """
    try:
        asked = mode()
    except ValueError as error:
        raise UserError(str(error)) from error
    if asked == "off":
        return f"lowering under torch.compile: the formula ({MODE_VARIABLE}=off)"
    return rows.describe(sources, device_type, _added if added is None else added)


@contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """Inside, list the calls that torch.compile traces. It must trace with ``dynamic=False``: sizes are numbers."""
    global _recording
    _calls.clear()
    _recording = True
    try:
        yield _calls
    finally:
        _recording = False


@constant_under_compile
def _record(
    operator: str,
    device_type: str,
    dtype: torch.dtype,
    direction: Direction,
    sizes: tuple[tuple[str, int], ...],
    source: str,
) -> None:
    _calls.append(Call(operator, device_type, str(dtype).removeprefix("torch."), direction, sizes, source))


def in_graph(graph: torch.fx.GraphModule) -> dict[str, set[Choice]]:
    """The lowerings that a traced graph contains, by operator.

    Args:
        graph: What Dynamo gives to a back end, or AOTAutograd to a compiler.
    """
    choices: dict[str, set[Choice]] = {}
    for node in graph.graph.nodes:
        for operator, choice in node.meta.get("custom", {}).get("lowering", {}).items():
            choices.setdefault(operator, set()).add(choice)
    return choices
