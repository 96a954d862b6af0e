"""What all tests of this package need."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .triage_models import HELPER, MODEL

# One fork server for all commands: triage asks for this. No test measures the check that it saves.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


@pytest.fixture(autouse=True)
def modules_stay() -> Iterator[None]:
    """Triage forgets the user's modules, which here are those of every other package that this process has imported."""
    before = dict(sys.modules)
    yield
    sys.modules.update(before)


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
