"""The versions that are tried together, and the tests that are run for each combination."""

from __future__ import annotations

from collections.abc import Mapping

# The versions that the packages' metadata allow, newest last.
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
JAXES = ("0.10", "0.11")

# Test files by package: those of the modules that touch private names of a framework or read its programs and Python's
# bytecode, and the broadest quick ones.
# Tests that are marked slow are left out.
SELECTION: Mapping[str, tuple[str, ...]] = {
    "shared": (
        "shared/tests/benchkit/test_results.py",
        "shared/tests/torch_baseline/test_baseline_model.py",
        "shared/tests/native_build/test_native_build.py",
    ),
    "dispatcher-trace": (
        "framework-internals/dispatcher-trace/tests/test_dispatcher_apis.py",
        "framework-internals/dispatcher-trace/tests/test_findings.py",
        "framework-internals/dispatcher-trace/tests/test_traces.py",
    ),
    "compile-bench": (
        "framework-internals/compile-bench/tests/test_compile_collector.py",
        "framework-internals/compile-bench/tests/test_compile_trace.py",
        "framework-internals/compile-bench/tests/test_compile_triage_survey.py",
    ),
    "jax-baseline": (
        "framework-internals/jax-baseline/tests/test_jax_agreement.py",
        "framework-internals/jax-baseline/tests/test_jax_inductor.py",
        "framework-internals/jax-baseline/tests/test_jax_profile.py",
        "framework-internals/jax-baseline/tests/test_jax_train.py",
    ),
    "rmsnorm-fused": ("framework-internals/rmsnorm-fused/tests/test_rmsnorm_api.py",),
    "custom-ops": ("framework-internals/custom-ops/tests/test_operators.py",),
}
PACKAGES = (
    "shared[dev]",
    "framework-internals/dispatcher-trace",
    "framework-internals/compile-bench",
    "framework-internals/jax-baseline",
    "framework-internals/rmsnorm-fused[tools,triton]",
    "framework-internals/custom-ops[tools]",
)

# Packages in constraints.txt whose version depends on the combination.
FOLLOWS = frozenset(
    (
        *("torch", "triton", "jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda13-plugin", "flax", "optax"),
        *("orbax-checkpoint", "numpy", "transformers"),
        "setuptools",  # torch 2.11 requires a version below 82
    )
)


def constraints(text: str) -> str:
    """Return the text of ``constraints.txt`` without the packages of ``FOLLOWS``."""
    return "".join(f"{line}\n" for line in text.splitlines() if line.partition("==")[0] not in FOLLOWS)
