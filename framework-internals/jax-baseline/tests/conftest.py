"""Settings that have to stand before JAX starts, and what all tests of pairs share."""

import itertools
import os
import sys
from pathlib import Path

import pytest

# What is compiled here runs a few times: LLVM's optimisations are most of the tests' time. XLA's own are all there.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# What was compiled before, by this worker in this run or an earlier one, is read. JAX's files are not for two writers.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
_COMPILED = Path(__file__).parents[3] / ".pytest_cache" / "jax" / _WORKER
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@pytest.fixture(autouse=True)
def caches_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of a pair in a test leaves what JAX has traced: the functions of the test are not in there.

    The next one empties JAX's caches, as each does where users' functions may have been traced in another mode.
    """
    if (jax := sys.modules.get("jax")) is not None:
        clear, runs = jax.clear_caches, itertools.count()
        monkeypatch.setattr(jax, "clear_caches", lambda: clear() if next(runs) else None)
