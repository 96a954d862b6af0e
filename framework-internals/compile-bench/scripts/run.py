"""The main job of compile-bench: measure, and write reports/<machine>/."""

from pathlib import Path

from benchkit.run import main
from compile_bench.lens import build_lens

if __name__ == "__main__":
    main(build_lens(Path(__file__).resolve().parents[1]))
