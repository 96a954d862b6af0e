"""Settings that have to stand before JAX starts."""

import os

# By default JAX takes three quarters of a GPU's memory when it first sees it; other test processes share it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
