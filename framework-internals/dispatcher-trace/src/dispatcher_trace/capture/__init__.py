"""Capturing: the dispatcher's tables, the shims in them, and what a shim records at each hop."""
