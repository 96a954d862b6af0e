"""Measure, and write reports/<machine>/report.md."""

from pathlib import Path

from benchkit.run import main
from jax_baseline.lens import build_lens

if __name__ == "__main__":
    main(build_lens(Path(__file__).resolve().parents[1]))
