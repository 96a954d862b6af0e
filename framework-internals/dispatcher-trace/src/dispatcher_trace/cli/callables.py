"""Callables as the command line names them: expressions, and functions in files."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchkit import UserError
from benchkit.command import user_file
from dispatcher_trace.capture.dispatcher import near_names
from dispatcher_trace.capture.user_stack import calls_user_code

calls_user_code(__file__)


def expression(source: str, names: Sequence[str] = ()) -> Callable[..., Any]:
    """A function that evaluates an expression, with ``torch`` and ``F`` in scope.

    Args:
        source: The expression.
        names: Names of the function's parameters: the tensors.

    Raises:
        UserError: If the expression is not Python or uses an unknown name.
    """
    try:
        tree = ast.parse(source, "<expression>", "eval")
    except SyntaxError as error:
        raise UserError(f"cannot read the expression {source!r}: {error.msg}") from None
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    _refuse_unknown_names(tree, {*scope, *names, *vars(builtins)})
    try:  # a lambda, because torch.compile can trace it, and cannot trace a call of eval()
        code = compile(f"lambda {', '.join(names)}: ({source}\n)", "<expression>", "eval")
    except SyntaxError as error:
        raise UserError(f"cannot use the expression {source!r}: {error.msg}") from None
    function: Callable[..., Any] = eval(code, scope)  # noqa: S307 # the user's own expression, from the command line
    return function


def _refuse_unknown_names(tree: ast.AST, known: set[str]) -> None:
    nodes = list(ast.walk(tree))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    used = dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name))
    unknown = [name for name in used if name not in known | bound]
    if unknown:
        raise UserError(
            f"the expression uses {', '.join(unknown)}, which no --tensor names; add --tensor {unknown[0]}=f32[4,4], "
            "with its own dtype and sizes"
        )


def load_function(target: str, names: Sequence[str] = ()) -> Callable[..., Any]:
    """Import a file and return one of its functions.

    Args:
        target: ``FILE.py:FUNCTION`` or ``FILE.py:OBJECT.METHOD``.
        names: Names of the arguments that the function will get.

    Raises:
        UserError: If the target has no colon, if the file does not exist or raises, or if it does not have the function
            or the function does not take the arguments.
    """
    path, name = _file_and_function(target)
    module = user_file.load_file(path, "traced_")
    function = user_file.find(module, name)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = near_names(name, functions) if functions else ""
        raise UserError(f"{path} has no function {name!r}{near}")
    return _taking(function, target, names)


def _taking(function: Callable[..., Any], target: str, names: Sequence[str]) -> Callable[..., Any]:
    """The function as one that takes the tensors by name.

    A parameter that is positional only gets its tensor by position, as does a builtin, which has no signature.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return lambda **tensors: function(*tensors.values())
    parameters = signature.parameters.values()
    by_position = any(parameter.kind is inspect.Parameter.POSITIONAL_ONLY for parameter in parameters)
    try:
        if by_position:
            signature.bind(*names)
            return lambda **tensors: function(*tensors.values())
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        given = f"--tensor {', '.join(names)}" if names else "no --tensor"
        raise UserError(f"{target} cannot be called with {given}: {error}") from None
    return function


@contextmanager
def importable_beside(target: str) -> Iterator[None]:
    """A block in which the modules beside a file, and the package that the file belongs to, can be imported.

    Args:
        target: ``FILE.py:FUNCTION``.

    Raises:
        UserError: If the target has no colon or the file does not exist.
    """
    with user_file.importable(_file_and_function(target)[0]):
        yield


def _file_and_function(target: str) -> tuple[Path, str]:
    path_text, colon, name = target.rpartition(":")
    if not colon or not name:
        raise UserError(f"expected FILE.py:FUNCTION, got {target!r}")
    path = Path(path_text)
    if not path.is_file():
        raise UserError(f"no file {path_text!r}; expected FILE.py:FUNCTION, the file from here ({Path.cwd()})")
    return path, name
