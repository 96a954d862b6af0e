"""``python -m rmsnorm_fused``, the same as the command ``rmsnorm-fused``."""

from rmsnorm_fused.cli import app

app(prog_name="rmsnorm-fused")
