"""Reports: Markdown and figures as a pure function of the results."""

from benchkit.markdown import markdown_table
from benchkit.report.paired_ratios import paired_ratio_note
from benchkit.report.rendering import Figure, ReportSpec, render, write

__all__ = ["Figure", "ReportSpec", "markdown_table", "paired_ratio_note", "render", "write"]
