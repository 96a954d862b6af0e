"""Measures every road on this machine and writes ``reports/<machine>/``; see ``--help``."""

from pathlib import Path

from benchkit.run import main
from custom_ops.lens import build_lens

if __name__ == "__main__":
    main(build_lens(Path(__file__).resolve().parents[1]))
