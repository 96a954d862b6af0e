"""``python -m custom_ops``, the same as the command ``custom-ops``."""

from custom_ops.cli import app

app(prog_name="custom-ops")
