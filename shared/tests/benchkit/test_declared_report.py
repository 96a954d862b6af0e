"""A report is declared once: what vanishes, what is escaped, what is folded, and that every face says the same."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from matplotlib.text import Text
from rich.console import Console

from benchkit.environment import capture
from benchkit.report import (
    Axis,
    Chart,
    Code,
    Column,
    Limit,
    Panel,
    Point,
    Reached,
    Report,
    Section,
    Series,
    Share,
    Table,
    Target,
    Targets,
    bullets,
    form,
    headline,
    pivot,
    render,
    show,
    to_terminal,
    write,
)
from benchkit.report.drawing import draw_chart
from benchkit.report.plotting import save
from benchkit.report.rendering import block_text
from benchkit.results import Quantity, Record, Recorder, Results
from benchkit.run import Run

TIMES = [
    Record("time", {"form": form, "count": count}, {"time": Quantity(seconds, "s", seconds / 2, seconds * 2)})
    for form, count, seconds in (("ours", 8, 2e-6), ("ours", 4096, 3e-6), ("a|b", 8, 5e-6))
]
COLUMNS = [
    Column("form", lambda record: Code(record.labels["form"])),
    Column("elements", "count", left=True),
    Column("time", "time"),
    Column("error", "error"),
    Column("note", "note", optional=True),
]


def declare(results):
    return Report(
        title="Times",
        headline="It is fast.",
        use="it matters.",
        avoid="it must be right.",
        worst="`a|b` at 0.40× of ours.",
        answer=[Table(TIMES, COLUMNS)],
        findings=[
            Section("Measured", ["Above.", Table(TIMES, COLUMNS), Section("Within", [Table(TIMES[:1], COLUMNS)])]),
            Section("Not measured", ["A text alone says nothing.", Table([], COLUMNS), chart(()), Targets([])]),
        ],
        details=[Section("Folded", [Table(TIMES, COLUMNS)], fold="A `click` away")],
        asked=["Why?"],
        method=["So.", bullets(["", ""])],
        limits=["Not the rest.", ""],
    )


def chart(records, kind="bars", **more):
    points = [
        Point(str(record.labels["form"]) if kind != "lines" else float(record.labels["count"]), record["time"])
        for record in records
    ]
    panel = Panel(
        [Series("the time", points, own=True), Series("guide", points, guide=kind == "lines")], limits=[Limit(1e-6)]
    )
    return Chart("times", kind, [panel], Axis("µs", scale=1e6), "Times.", "Bars", **more)


def test_a_report_has_one_order_and_what_was_not_measured_vanishes():
    results = Results("a-lens", capture("cpu", root=Path(__file__).parent), {}, complete=True)
    text = render(results, declare)
    parts = ["# Times", "**It is fast.**", "**Use this when** it matters. **Not when** it must", "**At worst:** `a"]
    parts += ["## Measured", "### Within", "### What was asked", "### The machine"]
    parts += ["### How it was measured", "<summary>A click away", "## Folded", "## What this does not show"]
    assert sorted(map(text.index, parts)) == list(map(text.index, parts))
    assert "Not measured" not in text
    assert "says nothing" not in text
    assert text.count("\n- ") == 1
    assert headline(results, declare) == "It is fast."


def test_cells_are_written_and_escaped_in_one_place():
    first, *_, last, _, note = block_text(Table(TIMES, COLUMNS)).splitlines()
    assert first == "| form | elements | time |"  # nobody has a note
    assert last == r"| `a\|b` | 8 | 5.00 µs (2.50–10.0) |"
    assert note == "In every row: error: –."
    assert "| 4096 |" in block_text(Table(TIMES, COLUMNS))  # a label names: no separator of thousands
    shown = Table([0.98765], [Column("share", lambda share: Share(share)), Column("holds", lambda share: share < 1)])
    assert block_text(shown).endswith("| 98.8 % | yes |")


def test_equal_cells_become_a_sentence_from_three_rows_on():
    columns = [Column("n", lambda n: n), Column("holds", lambda n: True), Column("kept", lambda n: "yes", keep=True)]
    assert block_text(Table([1, 2], columns)).splitlines()[0] == "| n | holds | kept |"
    text = block_text(Table([1, 2, 3], columns))
    assert text.splitlines()[0] == "| n | kept |"
    assert text.endswith("| 3 | yes |\n\nIn every row: holds: yes.")


def test_every_line_of_a_table_has_a_cell_for_each_column():
    for rows in (TIMES, TIMES[:1], [*TIMES, Record("time", {"form": "c"}, {}, {"note": "late"})]):
        header, rule, *lines = block_text(Table(rows, COLUMNS)).split("\n\n")[0].splitlines()
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in (header, rule, *lines)}
        assert len(widths) == 1, widths


def test_a_share_above_the_whole_stands_with_its_reason():
    table = Table([0.5, 1.02], [Column("share", Share)], beyond="The cache is faster.")
    assert block_text(table).endswith("| 102.0 % |\n\nThe cache is faster.")
    assert "cache" not in block_text(replace(table, rows=[0.5, 1.0]))
    assert list(form.table_faults(table, folded=False)) == []
    (fault,) = form.table_faults(replace(table, beyond=""), folded=False)
    assert "102.0 %, a share above 100 %" in fault


@pytest.mark.parametrize(
    ("headline", "fault"),
    [
        ("word " * 31, "31 words"),
        ("", "0 words"),
        ("A 1, 2, 3.5 and 4,000 % faster.", "4 figures"),
        ("One. Two.", "more than one sentence"),
        ("`gpt2-124m` on 4096 × 1024 bfloat16 on an H200: 520,653 tokens/s, 1.18× (1.1–1.2) fast.", "4 figures"),
        ("`gpt2-124m` on 4096 × 1024 bfloat16 on an H200: 520,653 tokens/s, 1.18× fast.", ""),
    ],
)
def test_a_headline_is_one_short_sentence_with_three_figures(headline, fault):
    assert [fault in text for text in form.headline_faults(headline)] == [True] * bool(fault)


def test_a_report_says_what_its_form_lacks():
    results = Results("a-lens", capture("cpu", root=Path(__file__).parent), {}, complete=True)
    report = declare(results)
    assert list(form.faults(report)) == []
    wide = Table([1], [Column(str(index), lambda row: row) for index in range(10)])
    long = Table([1], [Column("keys", lambda row: "key " * 80)])
    told = list(
        form.faults(replace(report, use="", answer=[Section("", [wide])], details=[Section("a", [wide, long])]))
    )
    assert len(told) == 3
    assert "when to use" in told[0]
    assert "10 columns" in told[1]
    assert "320 letters" in told[2]


def test_a_pivot_has_a_dash_where_nothing_was_measured():
    table = pivot(
        TIMES,
        corner="elements",
        row=lambda record: record.labels["count"],
        column=lambda record: record.labels["form"],
        cell=lambda record: record["time"],
        rows=(4096, 16, 8),
    )
    assert block_text(table).splitlines()[2:] == [
        "| 4096 | 3.00 µs (1.50–6.00) | – |",
        "| 8 | 2.00 µs (1.00–4.00) | 5.00 µs (2.50–10.0) |",
    ]


@pytest.mark.parametrize(
    ("kind", "value", "met"),
    [("share", 0.896, True), ("share", 0.894, False), ("times", 0.9, True), ("seconds", 0.90009, False)],
)
def test_a_target_is_met_in_the_digits_shown_and_missed_with_its_reason(kind, value, met):
    reached = Reached(Target("the kernel", 0.9, kind=kind), value, "at 8", "it waits.")
    text = block_text(Targets([reached, replace(reached, value=None)]))
    assert ("| yes |" in text) is met
    assert ("- the kernel: it waits." in text) is not met
    assert "not measured" in text
    assert "aim" not in text
    assert "larger" in block_text(Targets([replace(reached, value=0.9 if kind == "seconds" else 1, accurate=False)]))


@pytest.mark.parametrize("kind", ["bars", "stacked", "points", "lines"])
def test_a_chart_shows_the_figures_of_its_table(tmp_path, kind):
    save(draw_chart(chart(TIMES[::2], kind, places=Axis(log=2 * (kind == "lines")))), tmp_path / "times.svg")
    drawn = {unquote(text) for text in re.findall(r"<title>([^<]*)</title>", (tmp_path / "times.svg").read_text())}
    for record in TIMES[::2]:
        quantity = block_text(Table([record], [Column("time", "time")])).splitlines()[-1].strip("| ")
        assert any(text.endswith(f": {quantity}") for text in drawn)


def test_bars_of_several_colours_stand_in_their_order_without_gaps():
    series = [Series("ours", [Point("b", 2.0)], own=True), Series("theirs", [Point("a", 3.0), Point("c", 1.0)])]
    drawn = Chart("speed", "bars", [Panel(series)], Axis("x"), "Speed.", "Bars", order=["a", "b", "c"])
    assert drawn.categories() == ["a", "b", "c"]
    bars = sorted((bar.get_y() + bar.get_height() / 2, bar.get_width()) for bar in draw_chart(drawn).axes[0].patches)
    assert [(round(place, 6), length) for place, length in bars] == [(0, 3.0), (1, 2.0), (2, 1.0)]


@pytest.mark.parametrize("columns", [1, 2])
def test_a_legend_of_long_names_is_as_wide_as_its_figure_at_most(columns):
    series = [Series(f"this repository's kernels, sharded over {count} GPUs", [Point(1, 1.0)]) for count in range(6)]
    panels = [Panel(series)] * columns
    figure = draw_chart(Chart("speed", "lines", panels, Axis("x"), "Speed.", "Lines", columns=columns))
    (legend,) = figure.legends
    assert len(legend.get_texts()) == len(series)
    assert legend.get_window_extent().width <= figure.bbox.width


@pytest.mark.parametrize("kind", ["bars", "stacked", "points", "lines"])
def test_a_dollar_in_a_name_is_a_dollar(kind, tmp_path):
    name = r"$\foo$"  # no formula, nor one that matplotlib could draw
    points = [Point(place if kind == "lines" else name, 1e-6, text=name) for place in (1.0, 2.0)]
    panel = Panel([Series(name, points), Series("$n$", points)], title=name, limits=[Limit(1e-6, name)])
    drawn = draw_chart(Chart("names", kind, [panel], Axis(name), "Names.", "Names", places=Axis(name)))
    save(drawn, tmp_path / "names.svg")
    assert not [text for text in drawn.findobj(Text) if text.get_parse_math() and "$" in text.get_text()]


@pytest.mark.filterwarnings("ignore:Glyph")  # the font has none for a control character
@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_a_name_of_any_characters_gives_a_figure_that_can_be_read_and_a_legend(kind, tmp_path):
    names = ["_private", "a\x1b[1m\x00b", '<&--">']
    series = [Series(name, [Point(1.0 if kind == "lines" else f"place {name}", 2.0)]) for name in names]
    panel = Panel(series, limits=[Limit(1.0, names[1])])
    drawn = draw_chart(Chart("names", kind, [panel], Axis("s"), "Names.", "Names", places=Axis("at")))
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == names
    save(drawn, tmp_path / "names.svg")
    assert "_private" in "".join(ElementTree.parse(tmp_path / "names.svg").getroot().itertext())  # noqa: S314 # our own


def test_a_figure_has_greys_for_a_dark_page(tmp_path):
    save(draw_chart(chart(TIMES[::2])), tmp_path / "times.svg")
    text = (tmp_path / "times.svg").read_text()
    (style,) = re.findall(r"<style>(@media \(prefers-color-scheme: dark\).*?)</style>", text)
    assert '[style*="fill: #ffffff"]' in style
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text.replace(style, "")))
    greys = {colour for colour in used if len({colour[1:3], colour[3:5], colour[5:]}) == 1} - {"#999999"}
    assert all(f": {grey}" in style for grey in greys), greys


def test_a_terminal_shows_the_same_cells_and_a_pipe_gets_markdown(capsys):
    section = Section("Measured", ["Above.", Table(TIMES, COLUMNS), chart(TIMES)])
    console = Console(width=100)
    with console.capture() as capture:
        console.print(to_terminal(section))
    for cell in ("a|b", "5.00 µs (2.50–10.0)", "–", "Above."):
        assert cell in capture.get()
    show(section, Section("Empty", [Table([], COLUMNS)]))
    assert capsys.readouterr().out == block_text(section) + "\n"


def test_the_measurement_of_the_page_for_contributors_gets_its_table_and_figure(tmp_path):
    """CONTRIBUTING.md says which two files a measurement touches; this puts its two blocks into a lens."""
    page = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == ["lens.py", "report/sections.py"]
    names = {}
    for _, source in blocks:
        exec("from __future__ import annotations\n" + source, names)
    environment = capture("cpu", root=Path(__file__).parent)
    recorder = Recorder(tmp_path, lens="a-lens", environment=environment, configuration={})
    names["measure_sums"](Run("cpu", {}, recorder))
    recorder.finish()

    def declare_with_sums(results):
        return replace(declare(results), findings=[names["sums"](results)])

    text = write(tmp_path, declare_with_sums).read_text()
    assert "## Sums" in text
    assert text.count("| torch | ") == 2
    assert (tmp_path / "figures" / "sums.svg").is_file()
    assert "Sums" not in render(replace(recorder.results, records=()), declare_with_sums)


def test_panels_that_share_an_axis_end_beyond_the_longest_whisker():
    panels = [
        Panel([Series("a", [Point("x", Quantity(value, "s", value, high), text="a label")])])
        for value, high in ((1.0, 1.1), (2.0, 9.0))
    ]
    for axes in draw_chart(Chart("calls", "bars", panels, Axis("s"), "Calls.", "Bars")).axes:
        assert axes.get_xlim()[1] > 9.0
