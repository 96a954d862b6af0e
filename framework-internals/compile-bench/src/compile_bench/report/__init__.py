"""The report, computed from the records alone."""
