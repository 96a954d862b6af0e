"""The combinations, and the tests that are run for each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

# The versions that the packages' metadata allow, newest last.
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
JAXES = ("0.10", "0.11")

_LENSES = Path("framework-internals")

# Test files by package: those of the modules that touch private names of a framework, and the broadest quick ones.
# Tests that are marked slow are left out.
SELECTION: Mapping[str, tuple[Path, ...]] = {
    "shared": (
        Path("shared/tests/benchkit/test_results.py"),
        Path("shared/tests/torch_baseline/test_baseline_model.py"),
        Path("shared/tests/native_build/test_native_build.py"),
    ),
    "dispatcher-trace": (
        _LENSES / "dispatcher-trace/tests/test_dispatcher_apis.py",
        _LENSES / "dispatcher-trace/tests/test_walks.py",
    ),
    "compile-bench": (
        _LENSES / "compile-bench/tests/test_compile_collector.py",
        _LENSES / "compile-bench/tests/test_compile_trace.py",
    ),
    "jax-baseline": (
        _LENSES / "jax-baseline/tests/test_jax_inductor.py",
        _LENSES / "jax-baseline/tests/test_jax_train.py",
    ),
    "rmsnorm-fused": (_LENSES / "rmsnorm-fused/tests/test_rmsnorm_api.py",),
    "custom-ops": (_LENSES / "custom-ops/tests/test_operators.py",),
}

# Packages in constraints.txt whose version depends on the combination.
FOLLOWS = frozenset(
    (
        *("torch", "triton", "jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda13-plugin", "flax", "optax"),
        *("orbax-checkpoint", "numpy", "transformers"),
        "setuptools",  # torch 2.11 requires a version below 82
    )
)


@dataclass(frozen=True)
class Combination:
    """One row of the table. Versions have two parts.

    Attributes:
        python: ``"3.11"``.
        torch: ``"2.13"``.
        jax: ``"0.10"``.
    """

    python: str
    torch: str
    jax: str

    @property
    def labels(self) -> dict[str, str]:
        """The combination as labels of a record."""
        return asdict(self)

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}, jax {self.jax}"


def combinations(pythons: Iterable[str], torches: Iterable[str], jaxes: Iterable[str]) -> list[Combination]:
    """Return every combination, in the order of the table."""
    return [Combination(*each) for each in itertools.product(pythons, torches, jaxes)]


def constraints(text: str) -> str:
    """Return the text of ``constraints.txt`` without the packages of ``FOLLOWS``."""
    return "".join(f"{line}\n" for line in text.splitlines() if line.partition("==")[0] not in FOLLOWS)
