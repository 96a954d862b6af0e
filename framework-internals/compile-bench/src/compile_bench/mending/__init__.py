"""Changing a user's source so that a break is gone: positions, rewrites, overlays and the proof that a change holds."""
