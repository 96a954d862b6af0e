"""Trace the report's expressions and write reports/<machine>/."""

from pathlib import Path

from benchkit.run import main
from dispatcher_trace.lens import build_lens

if __name__ == "__main__":
    main(build_lens(Path(__file__).resolve().parents[1]))
