"""Engines (variants of the step that are timed), their throughput, and scaling over several GPUs."""
