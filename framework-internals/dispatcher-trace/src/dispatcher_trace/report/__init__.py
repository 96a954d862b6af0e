"""The report of this package: the code that it traces, the measurements, and the sections of the page."""
