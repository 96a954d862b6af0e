"""Runs a quick selection of the tests for combinations of Python, torch and jax."""
