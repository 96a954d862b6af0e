"""What all tests of this package need."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compile_bench.capture.collector import user_code_filter
from compile_bench.targets import overlay

from .triage_models import HELPER, MODEL

# One fork server for all commands: triage asks for this. No test measures the check that it saves.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

_ROOT = Path(__file__).parents[3]
_SOURCES = tuple(f"{_ROOT / folder}/" for folder in ("scripts", "shared/src", *_ROOT.glob("framework-internals/*/src")))
_TESTS = ("framework-internals", "shared", "scripts", "conftest")  # how pytest names what it imports
_OTHERS: set[str] = set()  # modules that are no target's


@pytest.fixture(autouse=True)
def users_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's modules are those of targets, not those of tests and of every other package of this process.

    Triage would forget them, and look at all that they hold, before and after every step.
    """
    user_code = user_code_filter()
    for name in sys.modules.keys() - _OTHERS:
        file = getattr(sys.modules[name], "__file__", None)
        tests = name.partition(".")[0] in _TESTS
        if not file or tests or file.startswith(_SOURCES) or not user_code.is_user(file):
            _OTHERS.add(name)
    monkeypatch.setattr(overlay, "_LOADED_BEFORE", _OTHERS)


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
