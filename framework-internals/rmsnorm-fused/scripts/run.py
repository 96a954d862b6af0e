"""Measures every implementation on this machine and writes ``reports/<machine>/``; see ``--help``."""

from pathlib import Path

from benchkit.run import main
from rmsnorm_fused.lens import build_lens

main(build_lens(Path(__file__).resolve().parents[1]))
