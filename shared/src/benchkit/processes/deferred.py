"""References to functions whose modules this process does not import."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


def deferred_module(name: str) -> Any:
    """A module whose functions are jobs: only the child process that calls one imports it.

    Importing torch and its compiler takes four seconds, and a process that only starts jobs does not need them. Type
    checkers and import-linter see the real module:

    .. code-block:: python

        if TYPE_CHECKING:
            from package import jobs
        else:
            jobs = deferred_module("package.jobs")

        runner.run(Job(partial(jobs.measure, 3), "measure"))
    """
    return _DeferredModule(name)


@dataclass(frozen=True)
class _DeferredModule:
    _name: str

    def __getattr__(self, function: str) -> _DeferredFunction:
        if function.startswith("__"):  # pickle and inspect ask for these
            raise AttributeError(function)
        return _DeferredFunction(self._name, function)


@dataclass(frozen=True)
class _DeferredFunction:
    _module: str
    _function: str

    @property
    def __name__(self) -> str:
        return self._function

    def __call__(self, *arguments: object, **options: object) -> object:
        return getattr(importlib.import_module(self._module), self._function)(*arguments, **options)
