"""``python -m torch_baseline``."""

from torch_baseline.cli import main

main()
