"""Hostile names and values: every page, patch and command line shows them and none is acted upon."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import check_reports
import lenses
import pytest
import run_all
import torch
from markdown_it import MarkdownIt
from typer.testing import CliRunner

import custom_ops.cli
import dispatcher_trace
import dispatcher_trace.cli
import jax_baseline.cli
import torch_baseline.cli
from benchkit.command import progress
from benchkit.report import render
from benchkit.results import Absence, load
from compile_bench.catalogue import page as catalogue
from compile_bench.catalogue.cause import CAUSES
from compile_bench.catalogue.examine import Outcome
from compile_bench.catalogue.source import unified_diff
from dispatcher_trace.capture.types import SCHEMA_VERSION
from dispatcher_trace.render import viewer
from jax_baseline.diff.region_diff import Quote
from jax_baseline.hlo import lock
from jax_baseline.report import explanation

HOUSE = Path(__file__).resolve().parents[2] / "framework-internals"
NAMES = [
    "</script><script>owned()</script>",
    "<img src=x onerror=owned()>",
    "`<b>` | `<i>`",
    "``` \n```\n<b>\n\n<script>owned()</script>",
    "' onmouseover='owned()' x=\"",
    '" onmouseover="owned()',
    "$(touch owned) `touch owned` ; touch owned #",
    "{{ 7 * 7 }} {{payload}} {% raw %} %s %(x)s {0}",
    "[red]not red[/blue] [link=javascript:owned()]x",
    "[x](javascript:owned())",
    "\x1b]0;owned\x07\x1b[31m",
]
HOSTILE = " ".join(NAMES)
# As the name of a file it may have anything but a slash.
FILE = HOSTILE.replace("/", "∕")[:100]


class Elements(HTMLParser):
    """The elements of a page and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


READER = MarkdownIt("commonmark", {"html": True}).enable("table")
# Code binds more tightly than brackets (CommonMark 0.31.2, section 6). markdown-it-py before 4.3 reads HTML there.
reads_code = pytest.mark.skipif("<b>" in READER.render("[`<b>` `"), reason="this markdown-it-py reads code as HTML")


def active(text: str) -> list[str]:
    """What a reader of Markdown would hand to a browser as more than text."""
    found = Elements(READER.render(text))
    return [tag for tag in found.tags if tag in ("script", "b", "i") or tag.startswith("img ")] + [
        name for name in found.attributes if name.startswith("on")
    ]


REPORTS = [
    (name, directory)
    for name, manifest in lenses.manifests().items()
    for directory in check_reports.golden_reports(manifest.build())
]


@pytest.mark.parametrize(("name", "directory"), REPORTS, ids=[f"{name}-{d.name}" for name, d in REPORTS])
def test_no_report_acts_on_what_it_shows(name, directory):
    results = load(directory / "results.json")
    environment = dataclasses.replace(
        results.environment, command=HOSTILE, cpu=HOSTILE, system=HOSTILE, packages={HOSTILE: HOSTILE}, commit=HOSTILE
    )
    results = dataclasses.replace(results, environment=environment, absences=(Absence(HOSTILE, HOSTILE),))
    text = render(results, lenses.manifests()[name].build().report)
    assert active(text) == []
    assert "touch owned" in text


@pytest.fixture(scope="module")
def trace() -> dispatcher_trace.Trace:
    with dispatcher_trace.trace(scope="core", kernels=False) as found:
        torch.ones(2) + 1
    for call in found.calls:
        call.operator, call.stack, call.missed = HOSTILE, (HOSTILE,), (HOSTILE,)
        for hop in call.hops:
            for field in ("operator", "key", "where", "why", "node", "thread"):
                setattr(hop, field, HOSTILE)
    return found


@reads_code
def test_the_trace_as_a_page_and_as_markdown(trace):
    assert active(trace.to_markdown()) == []
    text = trace.to_html(HOSTILE)
    elements = Elements(text)
    assert elements.tags.count("script") == 3
    assert not {"img", "b"} & set(elements.tags)
    assert not [name for name in elements.attributes if name.startswith("on")]


# What the page's own script asks of a browser; what it would have shown is printed.
DOCUMENT = """
const elements = {}, shown = [];
const element = (id) => elements[id] ??= { addEventListener() {}, setAttribute() {}, dataset: {}, value: "",
  set innerHTML(html) { shown.push(html); } };
globalThis.document = { getElementById: element, body: element("body") };
globalThis.location = { hash: "#open=all", pathname: "", search: "" };
globalThis.addEventListener = () => {};
element("trace").textContent = PAYLOAD;
"""


def test_what_the_viewers_script_makes_of_them_is_text(trace):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on PATH")
    text = viewer.page(trace.calls, title=HOSTILE, notes=[HOSTILE])
    payload = re.search(r'<script id="trace"[^>]*>(.*?)</script>', text, re.DOTALL)[1]
    logic = "\n".join(
        part.replace('"use strict";', "") for part in re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    )
    source = (
        DOCUMENT.replace("PAYLOAD", json.dumps(payload))
        + logic
        + """
setTimeout(() => { rows.forEach(details); state.q = "owned"; show(); console.log(JSON.stringify(shown)); }, 300);
"""
    )
    done = subprocess.run([node, "-e", source], capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)
    assert any("touch" in html for html in shown)
    for html in shown:
        elements = Elements(html)
        assert set(elements.tags) <= {"div", "span", "mark", "h2", "ul", "li", "p", "pre"}
        assert elements.attributes <= {"class", "role", "tabindex", "data-row", "title", "aria-expanded"}


@reads_code
def test_the_catalogue_as_a_page_and_as_markdown(monkeypatch):
    cause = next(iter(CAUSES.values()))
    advice = dataclasses.replace(
        cause.advices[0], text=HOSTILE, when=dataclasses.replace(cause.advices[0].when, text=HOSTILE)
    )
    hostile = dataclasses.replace(cause, name=HOSTILE, title=HOSTILE, why=HOSTILE, advices=(advice,), theme=HOSTILE)
    make = cause.make
    monkeypatch.setattr("compile_bench.catalogue.cause.makers", lambda: {HOSTILE: make})
    monkeypatch.setattr(catalogue, "CAUSES", {HOSTILE: hostile})
    outcome = Outcome(True, (HOSTILE,), (HOSTILE,), True, True)
    monkeypatch.setattr(catalogue, "recorded", lambda: {HOSTILE: {HOSTILE: outcome}})
    monkeypatch.setattr(catalogue, "status", lambda *asked: HOSTILE)
    elements = Elements(catalogue.html())
    assert elements.tags.count("script") == 1
    assert not {"img", "b", "i"} & set(elements.tags)
    assert not [name for name in elements.attributes if name.startswith("on")]
    assert active(catalogue.markdown()) == []
    assert active(catalogue.index()) == []


def test_a_source_that_is_quoted_ends_no_fence():
    quote = Quote(HOSTILE, "loop", "text", "```\n<script>owned()</script>")
    assert active(explanation._quote("XLA", quote)) == []


@pytest.mark.parametrize("tool", [["git", "apply"], ["patch", "-p1", "--input"]], ids=["git", "patch"])
@pytest.mark.parametrize(
    "name", ["my file.py", 'a"b.py', "new\nline.py", "tab\t.py", "back\\slash.py", "-rf.py", "été.py", f"{FILE}.py"]
)
def test_a_patch_changes_the_file_that_it_names_and_nothing_else(name, tool, tmp_path):
    if shutil.which(tool[0]) is None:
        pytest.skip(f"no {tool[0]} on PATH")
    (tmp_path / name).write_text("one\n")
    patch = tmp_path / "the.patch"
    patch.write_bytes(unified_diff(name, b"one\n", b"two\n").encode())
    done = subprocess.run([*tool, patch], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name).read_text() == "two\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "the.patch"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a hostile name, to be left as it is but for what a command writes into it."""
    found = tmp_path / FILE
    found.mkdir()
    monkeypatch.chdir(found)
    return found


def invoke(app, *arguments: str) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    assert not list(Path.cwd().glob("owned"))
    return done.output


def test_dispatcher_trace_reads_and_writes_files_of_such_names(folder):
    source, out = folder / f"{FILE}.py", folder / f"{FILE}.json"
    source.write_text("import torch\ndef step():\n    return torch.ones(2) + 1\n")
    options = ("--device", "cpu", "--scope", "core", "--format", "json", "--out", out)
    invoke(dispatcher_trace.cli.app, "run", f"{source}:step", *options)
    assert "no difference" in invoke(dispatcher_trace.cli.app, "diff", out, out)


def test_custom_ops_writes_a_package_there_and_the_command_that_it_names_goes_there(folder):
    (folder / FILE).mkdir()
    printed = invoke(custom_ops.cli.app, "new", "my_norm", "--folder", folder / FILE)
    assert (folder / FILE / "my_norm" / "setup.py").exists()
    command = printed[printed.index("next: ") + 6 :].partition(" && ")[0]
    where = subprocess.run(["bash", "-c", f"{command} && pwd"], capture_output=True, text=True, check=True).stdout
    assert Path(where.removesuffix("\n")) == folder / FILE / "my_norm"
    assert not list(folder.glob("owned"))


@pytest.mark.parametrize("name", [HOSTILE, "../up", "a/b", "class", "", "x; touch owned"])
def test_custom_ops_refuses_them_as_names(name, folder):
    done = CliRunner().invoke(custom_ops.cli.app, ["new", name])
    assert done.exit_code == 2
    assert not list(folder.iterdir())
    assert "\x1b" not in done.stderr


def test_torch_baseline_trains_on_and_into_such_paths(folder):
    data = folder / f"{FILE}.txt"
    data.write_text("the quick brown fox " * 500)
    options = ["--preset", "tiny", "--steps", "1", "--device", "cpu", "--batch-size", "1"]
    invoke(torch_baseline.cli.app, "train", *options, "--data", data, "--out", folder / "run")
    assert "The" in invoke(torch_baseline.cli.app, "sample", folder / "run", "--bytes", "2")


def test_jax_baseline_reads_and_writes_files_of_such_names(folder):
    module = HOUSE / "jax-baseline" / "tests" / "golden"
    dump = next(path for path in sorted(module.iterdir()) if path.read_text().startswith("HloModule"))
    copy = folder / f"{FILE}.txt"
    copy.write_text(dump.read_text())
    assert "kernels" in invoke(jax_baseline.cli.app, "hlo", copy, "--save", folder / f"{FILE}.out")
    assert (folder / f"{FILE}.out").read_text() == dump.read_text()
    invoke(jax_baseline.cli.app, "lock", folder / f"{FILE}.json", copy)
    assert "LOCKED" in invoke(jax_baseline.cli.app, "hlo", copy, "--check", folder / f"{FILE}.json")


DAMAGED = ["", "{", "[]", "null", "{}", '{"a": ' * 400, "\xff\xfe\x00"]
TRACES = ['"calls": [{}]', '"calls": 3', '"calls": [[1]]', '"calls": null', '"calls": [{"kernels": [], "hops": [{}]}]']


@pytest.mark.parametrize(
    "text",
    [*DAMAGED, *(f'{{"schema_version": {SCHEMA_VERSION}, {calls}}}' for calls in TRACES)],
)
def test_a_damaged_trace_is_one_line(text, folder):
    (folder / "trace.json").write_text(text, encoding="latin-1")
    done = CliRunner().invoke(dispatcher_trace.cli.app, ["diff", "trace.json", "trace.json"])
    assert done.exit_code == 2, done.exception
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [*DAMAGED, *(f'{{"format": {lock.FORMAT}, "kernels": {kernels}}}' for kernels in ("[[1]]", "3", "[]", "null"))],
)
def test_a_damaged_fusion_lock_says_so(text):
    with pytest.raises(ValueError, match="lock"):
        lock.read_lock(text)


def test_a_path_in_the_table_of_the_main_job_is_no_markup():
    outcome = run_all.Outcome("a-lens", 1.0, 0, Path("/somewhere/[red]x[∕blue]/[/]/report.md"))
    shown = run_all.summary([outcome], run_all.Size())
    console = run_all.Console(width=400, file=io.StringIO())
    console.print(shown)
    assert "/somewhere/[red]x[∕blue]/[/]/report.md" in console.file.getvalue()


def test_what_is_under_way_is_no_markup_either(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # on a dumb one nothing is shown
    terminal = run_all.Console(file=io.StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr(progress, "_terminal", lambda: terminal)
    with progress.working("triage of [red]x[/blue].py:make"):
        pass
    assert "[red]x[/blue].py" in terminal.file.getvalue()
