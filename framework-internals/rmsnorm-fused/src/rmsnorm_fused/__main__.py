"""``python -m rmsnorm_fused``."""

from rmsnorm_fused.cli import app

app(prog_name="rmsnorm-fused")
