"""What all tests of pairs share."""

import itertools
import sys

import pytest


@pytest.fixture(autouse=True)
def caches_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of a pair in a test leaves what JAX has traced: the functions of the test are not in there.

    The next one empties JAX's caches, as each does where users' functions may have been traced in another mode.
    """
    if (jax := sys.modules.get("jax")) is not None:
        clear, runs = jax.clear_caches, itertools.count()
        monkeypatch.setattr(jax, "clear_caches", lambda: clear() if next(runs) else None)
