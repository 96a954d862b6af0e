"""The report: text, tables and figures computed from the results alone."""
