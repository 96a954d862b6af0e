"""Settings that have to stand before JAX starts."""

import os

# By default JAX takes three quarters of a GPU's memory when it first sees it; other test processes share it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# What is compiled here runs a few times: LLVM's optimisations are most of the tests' time. XLA's own are all there.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
