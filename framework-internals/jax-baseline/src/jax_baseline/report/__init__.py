"""The report: sentences, tables and figures, computed from the records only."""
