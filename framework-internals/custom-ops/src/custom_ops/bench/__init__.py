"""The measurements: what is timed, the bytes and launches it needs, and how correct the results are."""
