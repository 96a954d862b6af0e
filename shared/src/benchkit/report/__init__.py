"""Reports: Markdown and figures as a pure function of the results."""

from benchkit.report.rendering import Figure, ReportSpec, markdown_table, render, write

__all__ = ["Figure", "ReportSpec", "markdown_table", "render", "write"]
