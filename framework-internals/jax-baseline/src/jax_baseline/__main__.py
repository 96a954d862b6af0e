"""``python -m jax_baseline``."""

from jax_baseline.cli import main

main()
