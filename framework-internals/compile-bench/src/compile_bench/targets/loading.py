"""Loads a target by its name, from the zoo or from the user's code."""

from __future__ import annotations

import importlib
import importlib.util
import io
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchkit import UserError
from benchkit.command import user_file
from benchkit.device import Device
from benchkit.errors import namesakes_of_standard_modules
from compile_bench.capture.collector import user_code_filter
from compile_bench.targets.case import missing_file
from compile_bench.targets.overlay import forget_user_modules
from compile_bench.targets.regional import OwnRegions, noting_regions, own_regions
from compile_bench.targets.target import FunctionModel, Target, describe_error

# Limit for a data loader. The shapes of an epoch repeat, and a loader may never end.
_MOST_CALLS = 1_000


def load_target(name: str, device: Device) -> Target:
    """Load a target and move it to a device.

    ``name`` is one of the zoo, ``file.py:function`` or ``module:attribute``.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        return _of_zoo(name, device)
    # Code that reads its arguments finds its file, and none of this process.
    with noting_regions(), patch.object(sys, "argv", [place]):
        function = _find(place, attribute, name)
        with _user_errors(f"{name} raised", Path()):
            made = function()
    target = _as_target(name, function, made)
    if regions := own_regions(target.model, is_step=target.is_step):
        target = replace(target, model=OwnRegions(target.model, regions, partial(_loaded_again, name, device)))
    with _user_errors(f"{name}: its schedule raised", Path()):
        target = replace(target, schedule=tuple(itertools.islice(target.schedule, _MOST_CALLS)))
    try:
        return target.moved(device)
    except Exception as error:  # such as no memory on the device
        raise UserError(f"{name} cannot be moved to {device}: {describe_error(error)}") from error


def require_known(name: str) -> None:
    """Raise a UserError if a target's name is none of the zoo, or names a file that does not exist."""
    from compile_bench.targets.zoo import ZOO

    if reason := missing_file(name):
        raise UserError(reason)
    place, _, attribute = name.rpartition(":")
    if not (place and attribute) and name not in ZOO:
        raise UserError(
            f"no target {name!r}: expected file.py:function, module:attribute or one of {', '.join(sorted(ZOO))}"
        )


def _of_zoo(name: str, device: Device) -> Target:
    # Imported here: triage reloads the sources of targets with changes, and the zoo is such a source.
    from compile_bench.targets.zoo import ZOO

    require_known(name)
    try:
        return ZOO[name].make(device).moved(device)
    except ImportError as error:  # transformers without one of its own requirements
        raise UserError(f"target {name} cannot be made: {describe_error(error)}") from error


def _loaded_again(name: str, device: Device) -> nn.Module:
    forget_user_modules(user_code_filter())  # or a module would keep the regions that it made when it was imported
    torch.manual_seed(0)
    return load_target(name, device).model


def _find(place: str, attribute: str, name: str) -> Callable[[], Any]:
    module = _load_file(Path(place), name) if place.endswith(".py") else _import(place, name)
    function = user_file.find(module, attribute)
    if function is None:
        raise UserError(f"{place} has no {attribute!r} (target {name})")
    if isinstance(function, nn.Module) or not callable(function):
        kind = type(function).__name__
        raise UserError(f"{name} is of type {kind}; expected a function without arguments that returns (model, args)")
    return function


def _load_file(path: Path, name: str) -> ModuleType:
    if reason := missing_file(name):
        raise UserError(reason)
    if (package := user_file.package_of(path)) is not None:
        root, module_name = package
        _search_first(root)
        if (parent := str(path.resolve().parent)) not in sys.path:
            sys.path.append(parent)  # last: a package may have a logging.py of its own
        return _import(module_name, name)
    # A token.py is no module `token`: torch.compile looks up the globals of a function by its module's name.
    module_name = f"user_{path.stem}" if path.stem in sys.stdlib_module_names else path.stem
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(module_name, module)
    _search_first(path.resolve().parent)  # as `python file.py` would
    with _user_errors(f"{path} cannot be loaded:", path.resolve().parent):
        spec.loader.exec_module(module)
    return module


def _search_first(folder: Path) -> None:
    # Triage loads a file dozens of times in a process; each entry of the path would slow every import down.
    if sys.path[0] != str(folder):
        sys.path.insert(0, str(folder))


def _import(module: str, name: str) -> ModuleType:
    with _user_errors(f"module {module} cannot be imported (target {name}):", Path()):
        return importlib.import_module(module)


@contextmanager
def _user_errors(what: str, folder: Path) -> Iterator[None]:
    """Turn what the user's code raises into one line.

    Files in ``folder`` may hide modules of Python's library.
    """
    printed = _Copied(sys.stderr)
    try:
        with redirect_stderr(printed):
            yield
    except SystemExit as error:  # of an argument parser, which prints its reason
        last = next(reversed(printed.getvalue().strip().splitlines()), "") if isinstance(error.code, int) else ""
        said = f', which printed "{last}"' if last else ""
        remedy = 'put the code that exits, or reads arguments, under if __name__ == "__main__":'
        raise UserError(f"{what} {describe_error(error)}{said}; {remedy}") from error
    except Exception as error:  # whatever it is
        of_an_import = isinstance(error, (ImportError, AttributeError))
        namesakes = namesakes_of_standard_modules([folder], str(error)) if of_an_import else ""
        raise UserError(f"{what} {describe_error(error)}{namesakes}") from error


class _Copied(io.StringIO):
    """Writes to another stream, and keeps a copy."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(text)
        return super().write(text)


def _as_target(name: str, function: Callable[[], Any], made: object) -> Target:
    target: Any  # the fields may have any type until they are checked below
    if isinstance(made, Target):
        target = made
    elif isinstance(made, Tensor):
        return Target(FunctionModel(function), is_step=True)
    elif isinstance(made, tuple) and len(made) in (2, 3):
        target = Target(*made)
    else:
        kind = type(made).__name__
        raise UserError(
            f"{name} returned an object of type {kind}; expected (model, args), (model, args, kwargs), "
            "a compile_bench.targets.target.Target, or a tensor if the function is itself a step"
        )
    if not callable(target.model):
        raise UserError(
            f"{name} returned a model of type {type(target.model).__name__}; expected a torch.nn.Module or a function"
        )
    if not isinstance(target.args, tuple):
        raise UserError(f"{name} returned args of type {type(target.args).__name__}; expected a tuple")
    if not isinstance(target.kwargs, Mapping):
        raise UserError(f"{name} returned kwargs of type {type(target.kwargs).__name__}; expected a mapping")
    if not isinstance(target.schedule, Iterable):
        kind = type(target.schedule).__name__
        raise UserError(f"{name} returned a schedule of type {kind}; expected calls to iterate over")
    if not isinstance(target.model, nn.Module):
        return replace(target, model=FunctionModel(target.model))
    return target
