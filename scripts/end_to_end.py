"""Measure one training step with every lens's parts put in, and write framework-internals/reports/<machine>/."""

from pathlib import Path

from benchkit.run import main
from whole_step.measure import build_lens

if __name__ == "__main__":
    main(build_lens(Path(__file__).resolve().parents[1] / "framework-internals"))
