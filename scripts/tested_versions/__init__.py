"""The version matrix: a quick selection of the tests, run for combinations of Python, torch and jax."""
