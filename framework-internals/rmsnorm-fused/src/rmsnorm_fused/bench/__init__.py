"""The measurements: which implementations are compared, how accurate and how fast they are."""
