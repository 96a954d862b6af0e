"""What all tests of this package need."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def modules_stay() -> Iterator[None]:
    """Triage forgets the user's modules, which here are those of every other package that this process has imported."""
    before = dict(sys.modules)
    yield
    sys.modules.update(before)
