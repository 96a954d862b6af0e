"""Loads a target by its name, from the zoo or from the user's code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchkit import UserError
from benchkit.command import user_file
from benchkit.device import Device
from compile_bench.capture.collector import user_code_filter
from compile_bench.targets.overlay import forget_user_modules
from compile_bench.targets.regional import OwnRegions, noting_regions, own_regions
from compile_bench.targets.target import FunctionModel, Target, describe_error


def load_target(name: str, device: Device) -> Target:
    """Load a target and move it to a device.

    Args:
        name: A name of the zoo, ``file.py:function`` or ``module:attribute``.
        device: Device to move it to.

    Raises:
        UserError: If there is no such target, if it raises, or if it returns something else. The message is one line.
    """
    # Imported here, because triage reloads the sources of targets with changes, and the zoo is such a source.
    from compile_bench.targets.zoo import ZOO

    if name in ZOO:
        try:
            return ZOO[name].make(device).moved(device)
        except ImportError as error:  # transformers without one of its own requirements
            raise UserError(f"target {name} cannot be made: {describe_error(error)}") from error
    with noting_regions():
        function = _find(name, ZOO)
        try:
            made = function()
        except (Exception, SystemExit) as error:  # whatever the user's function raises
            raise UserError(f"{name} raised {describe_error(error)}") from error
    target = _as_target(name, function, made)
    if regions := own_regions(target.model, is_step=target.is_step):
        target = replace(target, model=OwnRegions(target.model, regions, partial(_loaded_again, name, device)))
    try:
        return target.moved(device)
    except Exception as error:  # no memory on the device, or whatever the user's data loader raises
        raise UserError(f"{name} cannot be moved to {device}: {describe_error(error)}") from error


def _loaded_again(name: str, device: Device) -> nn.Module:
    forget_user_modules(user_code_filter())  # or a module would keep the regions that it made when it was imported
    torch.manual_seed(0)
    return load_target(name, device).model


def _find(name: str, others: Iterable[str]) -> Callable[[], Any]:
    place, separator, attribute = name.rpartition(":")
    if not separator or not place or not attribute:
        raise UserError(
            f"no target {name!r}: expected file.py:function, module:attribute or one of {', '.join(sorted(others))}"
        )
    module = _load_file(Path(place), name) if place.endswith(".py") else _import(place, name)
    function = user_file.find(module, attribute)
    if function is None:
        raise UserError(f"{place} has no {attribute!r} (target {name})")
    if isinstance(function, nn.Module) or not callable(function):
        kind = type(function).__name__
        raise UserError(f"{name} is of type {kind}; expected a function without arguments that returns (model, args)")
    return function


def _load_file(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        raise UserError(f"there is no file {path} (target {name})")
    if (package := user_file.package_of(path)) is not None:
        root, module_name = package
        _search_first(root)
        if (parent := str(path.resolve().parent)) not in sys.path:
            sys.path.append(parent)  # last: a package may have a logging.py of its own
        return _import(module_name, name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    _search_first(path.resolve().parent)  # as `python file.py` would
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file raises, or its argument parser
        raise UserError(f"{path} cannot be loaded: {describe_error(error)}") from error
    return module


def _search_first(folder: Path) -> None:
    # Triage loads a file dozens of times in a process; each entry of the path would slow every import down.
    if sys.path[0] != str(folder):
        sys.path.insert(0, str(folder))


def _import(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's module raises, or its argument parser
        raise UserError(f"module {module} cannot be imported (target {name}): {describe_error(error)}") from error


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
