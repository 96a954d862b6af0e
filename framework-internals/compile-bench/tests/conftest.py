"""What all tests of this package need."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compile_bench.targets import overlay

from .triage_models import HELPER, MODEL

# One fork server for all commands: triage asks for this. No test measures the check that it saves.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


@pytest.fixture(autouse=True)
def users_modules(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The user's modules are those that the test loads, not what this process has imported before.

    Triage would forget those of every other package, and look at all that they hold, before and after every step.
    """
    written = str(tmp_path_factory.getbasetemp())  # an earlier test may have loaded another file of the same name
    modules = dict(sys.modules)
    before = (name for name, module in modules.items() if not str(getattr(module, "__file__", "")).startswith(written))
    monkeypatch.setattr(overlay, "_LOADED_BEFORE", frozenset(before))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with the small model of triage; ``sys.path`` and the compiler are reset at the end."""
    (tmp_path / "triage_model.py").write_text(MODEL)
    (tmp_path / "triage_helper.py").write_text(HELPER)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    for name in ("triage_model", "triage_helper"):
        sys.modules.pop(name, None)
    torch.compiler.reset()
