"""Reports: declared once from the results, and shown as Markdown with figures, and on a terminal."""

from benchkit.markdown import markdown_table
from benchkit.report import form
from benchkit.report.blocks import Block, Figure, Report, Section, bullets
from benchkit.report.charts import WHOSE, Axis, Chart, Limit, Panel, Point, Series, series_by
from benchkit.report.paired_ratios import paired_ratio_note
from benchkit.report.rendering import DeclareReport, figures, headline, render, write
from benchkit.report.tables import ABSENT, Cell, Code, Column, Share, Table, pivot
from benchkit.report.targets import Reached, Target, Targets
from benchkit.report.terminal import show, to_terminal

__all__ = [
    "ABSENT",
    "WHOSE",
    "Axis",
    "Block",
    "Cell",
    "Chart",
    "Code",
    "Column",
    "DeclareReport",
    "Figure",
    "Limit",
    "Panel",
    "Point",
    "Reached",
    "Report",
    "Section",
    "Series",
    "Share",
    "Table",
    "Target",
    "Targets",
    "bullets",
    "figures",
    "form",
    "headline",
    "markdown_table",
    "paired_ratio_note",
    "pivot",
    "render",
    "series_by",
    "show",
    "to_terminal",
    "write",
]
