"""The command ``dispatcher-trace``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer

from benchkit import UserError
from benchkit.device import resolve_device
from benchkit.results import write_text_atomically
from dispatcher_trace import keys, render
from dispatcher_trace.targets import Conditions, TensorSpec, expression, load_function, one_line, parse_dtype
from dispatcher_trace.trace import Trace, table_of, trace

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="What happens between an operator call and its kernel, hop by hop.",
)


class _Format(StrEnum):
    markdown = "markdown"
    tree = "tree"
    json = "json"


class _Scope(StrEnum):
    all = "all"
    core = "core"


_AutocastOption = Annotated[str | None, typer.Option(metavar="DTYPE", help="Run under torch.autocast with this dtype.")]
_BackwardOption = Annotated[bool, typer.Option("--backward", help="Go on with sum().backward() of the result.")]
_InferenceOption = Annotated[bool, typer.Option("--inference-mode", help="Run under torch.inference_mode.")]
_FormatOption = Annotated[_Format, typer.Option("--format", help="markdown is the tree and a sentence for each hop.")]
_OutOption = Annotated[Path | None, typer.Option(help="Write to this file instead of standard output.")]
_ScopeOption = Annotated[
    _Scope, typer.Option(help="Keys to watch; core installs faster, blind to functorch and modes.")
]


@app.command()
def expr(
    source: Annotated[str, typer.Argument(metavar="EXPRESSION", help='Such as "a @ b"; torch and F are in scope.')],
    tensor: Annotated[list[str] | None, typer.Option(metavar="SPEC", help="a=bf16[256,256]@cuda; repeat it.")] = None,
    requires_grad: Annotated[bool, typer.Option("--requires-grad", help="Tensors require gradients.")] = False,
    autocast: _AutocastOption = None,
    backward: _BackwardOption = False,
    inference_mode: _InferenceOption = False,
    scope: _ScopeOption = _Scope.all,
    form: _FormatOption = _Format.markdown,
    out: _OutOption = None,
) -> None:
    """Walk an expression over tensors that are made for it."""

    def job() -> str:
        specs = [TensorSpec.parse(text) for text in tensor or []]
        function = expression(source, specs, requires_grad=requires_grad or backward)
        device = next((spec.device.partition(":")[0] for spec in specs if spec.device != "cpu"), "cpu")
        conditions = Conditions(device, _dtype(autocast), inference_mode, backward)
        return _text(_walk(function, conditions, scope.value), form)

    _run(job, out)


@app.command()
def run(
    target: Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="A function without arguments.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda: where factory functions put tensors.")] = "auto",
    autocast: _AutocastOption = None,
    backward: _BackwardOption = False,
    inference_mode: _InferenceOption = False,
    scope: _ScopeOption = _Scope.all,
    form: _FormatOption = _Format.markdown,
    out: _OutOption = None,
) -> None:
    """Walk a function of your own."""

    def job() -> str:
        conditions = Conditions(resolve_device(device), _dtype(autocast), inference_mode, backward)
        return _text(_walk(load_function(target), conditions, scope.value), form)

    _run(job, out)


@app.command()
def op(
    operator: Annotated[str, typer.Argument(help="With namespace and overload: aten::add.Tensor.")],
    every: Annotated[bool, typer.Option("--all", help="Every key, not only those of this machine.")] = False,
) -> None:
    """Show an operator's dispatch table: every key, the kind of its kernel and where it was registered."""

    def job() -> str:
        try:
            table = table_of(operator)
        except ValueError as error:
            raise UserError(str(error)) from error
        return render.dispatch_table(operator, table, None if every else keys.watched("all"))

    _run(job, None)


def _walk(function: Callable[[], Any], conditions: Conditions, scope: keys.Scope) -> Trace:
    with trace(scope=scope, kernels=conditions.device == "cuda") as walk:
        try:
            conditions.run(function)
            if conditions.device == "cuda":
                torch.cuda.synchronize()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the traced code raised {one_line(error)}") from error
    return walk


def _text(walk: Trace, form: _Format) -> str:
    if form is _Format.json:
        return json.dumps(walk.to_json(), indent=1, ensure_ascii=False) + "\n"
    if form is _Format.tree:
        return render.tree(walk.calls) + "\n"
    return walk.to_markdown()


def _dtype(text: str | None) -> torch.dtype | None:
    return None if text is None else parse_dtype(text, "--autocast")


def _run(job: Callable[[], str], out: Path | None) -> None:
    try:
        text = job()
        if out is not None:
            write_text_atomically(out, text)
    except UserError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"cannot write {out}: {error.strerror}")
    if out is None:
        sys.stdout.write(text)
    else:
        print(out)


def _fail(message: str) -> NoReturn:
    print(f"dispatcher-trace: {message}", file=sys.stderr)
    raise typer.Exit(2)
