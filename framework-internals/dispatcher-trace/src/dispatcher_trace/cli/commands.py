"""The command ``dispatcher-trace``."""

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from benchkit import UserError
from benchkit.command import one_line_errors
from benchkit.device import resolve_device
from benchkit.results import write_text_atomically
from dispatcher_trace.capture.recorder import MAX_HOPS
from dispatcher_trace.capture.types import Call, Hop
from dispatcher_trace.cli.callables import expression, importable_beside, load_function
from dispatcher_trace.cli.conditions import Conditions
from dispatcher_trace.cli.tensors import parse_dtype, parse_tensors
from dispatcher_trace.cli.tracing import Format, as_text, record_call
from dispatcher_trace.render import compare, text
from dispatcher_trace.render.outline import Shown

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="What happens between an operator call and its kernel, hop by hop.",
)


_TEN_SCREENS = 400  # lines


class _Scope(StrEnum):
    all = "all"
    core = "core"


_Tensor = Annotated[
    list[str] | None,
    typer.Option(metavar="SPEC", help="An argument by name, such as a=bf16[256,256]@cuda. Repeat it for more."),
]
_RequiresGrad = Annotated[bool, typer.Option("--requires-grad", help="The tensors require gradients.")]
_Device = Annotated[
    str, typer.Option(help="auto, cpu or cuda: device of factory functions and of each --tensor without @.")
]
_Autocast = Annotated[str | None, typer.Option(metavar="DTYPE", help="Run under torch.autocast with this dtype.")]
_Backward = Annotated[
    bool,
    typer.Option(
        "--backward", help="Also run sum().backward() on the result; a complex result sums real and imaginary parts."
    ),
]
_InferenceMode = Annotated[bool, typer.Option("--inference-mode", help="Run under torch.inference_mode.")]
_Vmap = Annotated[bool, typer.Option("--vmap", help="Map over the first dimension of each --tensor.")]
_Compile = Annotated[
    bool, typer.Option("--compile", help="Compile the callable, which runs it once, then trace the compiled call.")
]
_Native = Annotated[
    bool, typer.Option("--native", help="Single-step CPU kernels to name the routines below them (x86-64 Linux).")
]
_Cost = Annotated[
    bool, typer.Option("--cost", help="List the operators over 5 % of the time, from a second run without the tracer.")
]
_ScopeOption = Annotated[
    _Scope, typer.Option(help="Keys to watch. core installs faster and does not see functorch and modes.")
]
_FormatOption = Annotated[
    Format, typer.Option("--format", help="markdown is a summary, and with --full the tree and each hop's reason.")
]
_Full = Annotated[bool, typer.Option("--full", help="Print the whole tree, the reason for each hop, the findings.")]
_MaxHops = Annotated[
    int, typer.Option(min=0, help="Hops that are kept in any case; later calls like earlier ones are counted. 0: all.")
]
_Depth = Annotated[int | None, typer.Option(min=1, help="Levels of calls inside calls that a tree prints.")]
_Only = Annotated[
    str,
    typer.Option(metavar="OPERATOR", help="Print only these calls: aten::mm, or a pattern: aten::_foreach_*."),
]
_MaxLines = Annotated[int, typer.Option(min=0, help="Lines that are printed at most; 0 for all.")]
_Out = Annotated[Path | None, typer.Option(help="Write to this file instead of standard output.")]


def _add_trace_command(
    name: str,
    argument: Any,
    load: Callable[[str, list[str]], Callable[..., Any]],
    about: str,
    context: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> None:
    """Add a command that traces a callable; ``expr`` and ``run`` differ only in what their argument names.

    Args:
        name: Name of the command.
        argument: Its argument, for typer.
        load: Makes the callable from the argument and the names of the tensors.
        about: Help text of the command.
        context: Makes from the argument the context in which the callable is loaded and runs.
    """

    def command(
        target: Annotated[str, argument],
        tensor: _Tensor = None,
        requires_grad: _RequiresGrad = False,
        device: _Device = "auto" if name == "run" else "cpu",
        autocast: _Autocast = None,
        backward: _Backward = False,
        inference_mode: _InferenceMode = False,
        vmap: _Vmap = False,
        compiled: _Compile = False,
        native: _Native = False,
        costs: _Cost = False,
        scope: _ScopeOption = _Scope.all,
        max_hops: _MaxHops = MAX_HOPS,
        form: _FormatOption = Format.markdown,
        full: _Full = False,
        depth: _Depth = None,
        only: _Only = "",
        max_lines: _MaxLines = _TEN_SCREENS,
        out: _Out = None,
    ) -> None:
        failures: list[UserError | KeyboardInterrupt] = []

        def job() -> str:
            if costs and form in (Format.json, Format.html, Format.perfetto):
                raise UserError(f"--cost prints a table: use --format markdown, tree or findings, not {form.value}")
            resolved = resolve_device(device)
            specs = parse_tensors(tensor or [], resolved)
            tensors = {spec.name: spec.make(requires_grad=requires_grad or backward) for spec in specs}
            main = next((spec.device.partition(":")[0] for spec in specs if spec.device != "cpu"), resolved)
            dtype = None if autocast is None else parse_dtype(autocast, "--autocast")
            conditions = Conditions(main, dtype, inference_mode, backward, vmap, compiled)
            # Standard output is for the trace, which may be JSON; what the user's code prints goes to standard error.
            with context(target), redirect_stdout(sys.stderr):
                function = load(target, list(tensors))
                recorded, cost_table, failure = record_call(
                    function, tensors, conditions, scope.value, native=native, costs=costs, max_hops=max_hops or None
                )
            shown = Shown(fold=True, depth=depth, only=only, max_lines=max_lines)
            whole = full or bool(depth or only)  # these choose parts of the tree
            if failure is not None:
                hop = None if whole or out or form is not Format.markdown else recorded.raised_at
                failures.append(_stands_above(hop) if hop and isinstance(failure, UserError) else failure)
            return as_text(recorded, form, target, shown, full=whole) + cost_table

        _run(job, out)
        with one_line_errors("dispatcher-trace"):  # after the trace up to there
            for failure in failures:
                raise failure

    app.command(name, help=about)(command)


_add_trace_command(
    "expr",
    typer.Argument(metavar="EXPRESSION", help='Such as "a @ b"; torch and F are in scope.'),
    expression,
    "Trace an expression over tensors that are made for it.",
)
_add_trace_command(
    "run",
    typer.Argument(metavar="FILE.py:FUNCTION", help="Called with the tensors of --tensor, or without arguments."),
    load_function,
    "Trace a function of your own.",
    importable_beside,
)


def _stands_above(hop: Hop) -> UserError:
    """The error of a call whose exception the answer has printed, with the line."""
    return UserError(f"the traced code raised {hop.error.partition(':')[0]} at hop {hop.number}")


@app.command()
def op(
    operator: Annotated[str, typer.Argument(help="With namespace and overload: aten::add.Tensor.")],
    every: Annotated[bool, typer.Option("--all", help="Show every key, not only those of this machine.")] = False,
) -> None:
    """Show an operator's dispatch table: each key, the kind of its kernel and the place of its registration."""

    def job() -> str:
        try:
            return text.dispatch_table(operator, every=every)
        except ValueError as error:
            raise UserError(str(error)) from error

    _run(job, None)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A trace that --format json wrote.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Another trace.")],
) -> None:
    """Compare two traces: calls of only one, other keys, tensors, kernels or counts. Exit status 1 if they differ."""
    differences: list[compare.Difference] = []

    def job() -> str:
        (ours, our_scope), (theirs, their_scope) = _load(a), _load(b)
        if our_scope != their_scope:
            raise UserError(
                f"{a} was recorded with --scope {our_scope}, {b} with --scope {their_scope}: what only one of them "
                "watches would be a difference; record both with the same"
            )
        differences.extend(compare.differences(ours, theirs))
        return "".join(f"{difference}\n" for difference in differences) or "no difference\n"

    _run(job, None)
    if differences:
        raise typer.Exit(1)


def _load(path: Path) -> tuple[list[Call], str]:
    """The calls of a trace, and the scope that it was recorded with."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return compare.load_calls(document), document.get("scope", "")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not JSON ({error}): expected what --format json writes") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _run(job: Callable[[], str], out: Path | None) -> None:
    target = None if out is None else out.absolute()  # the traced code may go to another folder
    with one_line_errors("dispatcher-trace"):
        output = job()
        if target is not None:
            write_text_atomically(target, output)
            output = f"{out}\n"
        sys.stdout.write(output)
        sys.stdout.flush()
