"""The built site: links, names, the same reading as on GitHub; and, where there is a browser, its pages in it."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import lenses
import pytest

from benchkit.run import committed_reports
from website import pages

ROOT = Path(__file__).resolve().parents[2]
MISSING = [
    name
    for name in ("mkdocs_gen_files", "mkdocs_literate_nav", "mkdocs_redirects", "material", "mkdocstrings", "griffe")
    if importlib.util.find_spec(name) is None
]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOUSE = ROOT / "framework-internals"
HERE, OTHER = (path.name for path in committed_reports(HOUSE)[:2])
REPORT = f"framework-internals/dispatcher-trace/reports/{HERE}/report.html"
WHOLE_STEP = f"framework-internals/reports/{HERE}/report.html"
CATALOGUE = "framework-internals/compile-bench/catalogue/CATALOGUE.html"
VIEWER = f"framework-internals/dispatcher-trace/reports/{HERE}/gpt_step.html"
pytestmark = [
    pytest.mark.committed,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"{', '.join(MISSING)} not installed: `make site` installs what is missing"
    ),
]


@dataclass
class Outline(HTMLParser):
    """What a page has: places to link to, links, what it loads, its elements and its code."""

    text: str
    ids: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    loads: set[str] = field(default_factory=set)
    elements: Counter[str] = field(default_factory=Counter)
    code: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._in_code = self._in_block = False
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.elements[tag] += 1
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        elif tag == "svg" and values.get("role") == "img":  # a figure that is in the page instead of beside it
            self.elements["img"] += 1
        elif tag in ("img", "script", "iframe") and "src" in values:
            self.loads.add(values["src"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon"):
            self.loads.add(values["href"])
        elif tag == "pre":
            self._in_block = True
        elif tag == "code":
            self._in_code = True
            self.code.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self._in_block = False
        elif tag == "code":
            self._in_code = False
            if not self._in_block:  # a browser shows a line's end inside a sentence as a space
                self.code[-1] = " ".join(self.code[-1].split())

    def handle_data(self, data: str) -> None:
        if self._in_code:
            self.code[-1] += data


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"},
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return out


@pytest.fixture(scope="module")
def outlines(built) -> dict[str, Outline]:
    found = {path.relative_to(built).as_posix(): path for path in sorted(built.rglob("*.html"))}
    left_out = {"404.html", *(str(Path(old).with_suffix(".html")) for old in pages.redirects(pages.collect(ROOT)))}
    return {page: Outline(path.read_text(encoding="utf-8")) for page, path in found.items() if page not in left_out}


def test_a_report_is_found_at_its_old_place(built):
    for old, new in pages.redirects(pages.collect(ROOT)).items():
        page = (built / old).with_suffix(".html")
        (place,) = Outline(page.read_text(encoding="utf-8")).links
        assert page.parent.joinpath(place).resolve() == (built / new).with_suffix(".html")


def test_the_navigation_is_no_page(outlines):
    assert "index.html" in outlines
    assert "SUMMARY.html" not in outlines


def test_no_link_is_dead(built, outlines):
    dead = []
    for page, outline in outlines.items():
        for link in outline.links | outline.loads:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "data"):
                continue
            target = (built / page).parent.joinpath(unquote(parts.path)).resolve() if parts.path else built / page
            found = outlines.get(target.relative_to(built).as_posix())
            if not target.is_file() or (parts.fragment and found and unquote(parts.fragment) not in found.ids):
                dead.append(f"{page}: {link}")
    assert not dead


def test_nothing_is_loaded_from_elsewhere(built, outlines):
    assert not [f"{page}: {load}" for page, outline in outlines.items() for load in outline.loads if "//" in load]
    styles = [path for path in built.rglob("*.css") if re.search(r"url\([\"']?(https?:)?//|@import", path.read_text())]
    assert not styles


def test_every_public_name_has_its_entry(outlines):
    for page, text in pages.collect(ROOT).api.items():
        ids = outlines[page.replace(".md", ".html")].ids
        blocks = set(re.findall(r"^::: (\S+)", text, re.MULTILINE))
        assert blocks <= ids
        package = Path(page).stem
        exported = (ROOT / page).parents[1] / "src" / package / "__init__.py"
        for node in ast.parse(exported.read_text()).body:
            if ast.unparse(node).startswith("__all__ = "):
                # A name that is a module's too has a block of its own.
                own = {block.rpartition(".")[2] for block in blocks}
                names = set(ast.literal_eval(node.value)) - own
                assert {f"{package}.{name}" for name in names} <= ids, page


def test_roles_in_docstrings_became_links(built, outlines):
    for page in outlines:
        if "/api/" in page:
            assert not re.search(r":(func|class|meth|mod|data):", (built / page).read_text()), page
    page = "framework-internals/custom-ops/api/custom_ops.html"
    assert any(link.endswith("#custom_ops.load") for link in outlines[page].links)


def test_pages_read_as_they_do_on_github(built):
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    site = pages.collect(ROOT)
    for page in site.pages:
        name = "index" if page.endswith("README.md") else Path(page).stem
        name += ".on-one-page" if pages.twin_as_html(site, page) else ""
        text = (built / page).with_name(f"{name}.html").read_text(encoding="utf-8")
        here = Outline(text[text.index("<article") : text.index("</article>")])
        there = Outline(markdown.render(pages.draw_diagrams(page, (ROOT / page).read_text(encoding="utf-8"))))
        kinds = ["h1", "h2", "h3", "table", "tr", "td", "th", "li", "ul", "ol", "pre", "details", "img", "em", "strong"]
        assert {kind: here.elements[kind] for kind in kinds} == {kind: there.elements[kind] for kind in kinds}, page
        assert _without_trailing_spaces(here.code) == _without_trailing_spaces(there.code), page


def _without_trailing_spaces(blocks: list[str]) -> list[str]:
    """Blocks of code without what the site leaves out: a line of a patch may be a single space."""
    return ["\n".join(line.rstrip() for line in block.rstrip().splitlines()) for block in blocks]


HIDDEN_FIGURES = "() => [...document.images].filter((image) => !(image.naturalWidth > 0)).map((image) => image.src)"
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[_Browser]:
    driver = pytest.importorskip(
        "playwright.sync_api", reason="no driver for a browser: pip install -c constraints.txt playwright"
    )
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    # As root, which containers often are, Chromium's own sandbox refuses to start.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with driver.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=options)
        yield _Browser(opened)
        opened.close()


@dataclass(frozen=True)
class _Browser:
    """A browser whose pages load however long that takes: what hangs meets the time limit of the test."""

    opened: Any

    def new_page(self, **options: Any) -> Any:
        return self.new_context(**options).new_page()

    def new_context(self, **options: Any) -> Any:
        context = self.opened.new_context(**options)
        context.set_default_timeout(0)
        return context


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_page_can_be_read(built, outlines, browser, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    wrong: list[str] = []
    name = ""
    page.on("console", lambda line: wrong.append(f"{name}: {line.text}") if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(f"{name}: {error}"))
    page.on(
        "requestfailed",
        lambda request: (
            wrong.append(f"{name}: cannot load {request.url}")
            if request.failure != "net::ERR_ABORTED"  # by the next page: a busy machine loads an icon late
            else None
        ),
    )
    page.route(re.compile("^https?:"), lambda route: route.abort())  # which the line above then tells
    for name in outlines:
        page.goto((built / name).as_uri())
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        wrong += [f"{name}: figure not shown: {source}" for source in page.evaluate(HIDDEN_FIGURES)]
        wrong += [f"{name}: wider than the screen by {excess} px" for excess in [page.evaluate(OVERFLOW)] if excess > 0]
    context.close()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_axe_finds_nothing_on_a_page_of_each_kind(built, browser, width, scheme):
    package = pytest.importorskip(
        "axe_playwright_python", reason="pip install -c constraints.txt axe-playwright-python"
    )
    axe = (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    kinds = ["index.html", WHOLE_STEP, VIEWER, CATALOGUE]
    kinds += ["framework-internals/dispatcher-trace/api/dispatcher_trace.html"]
    kinds += [f"framework-internals/{lens}/reports/{HERE}/report.html" for lens in lenses.manifests()]
    page = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme).new_page()
    for name in kinds:  # its rules have the contrast of texts, and boxes that scroll and that no key reaches
        page.goto((built / name).as_uri())
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.evaluate(f"{axe}; 0")
        checked = page.evaluate("axe.run(document, { runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa'] })")
        assert checked["passes"], name
        found = [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in checked["violations"]]
        assert not found, f"{name}: {found}"


def test_a_wide_table_says_that_it_scrolls_and_keeps_its_first_column(built, browser):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto((built / WHOLE_STEP).as_uri())
    page.locator(".table-scrolls").first.wait_for()
    box = page.locator(".md-typeset__scrollwrap[role=region]").first
    box.evaluate("(box) => { box.scrollLeft = 200; }")
    assert box.locator("td").first.bounding_box()["x"] >= 0
    assert box.locator("td").nth(1).bounding_box()["x"] < 0


def test_no_block_of_code_on_the_front_page_is_cut(built, browser):
    for width in (390, 1280):
        page = browser.new_page(viewport={"width": width, "height": 844})
        page.goto((built / "index.html").as_uri())
        assert page.evaluate("[...document.querySelectorAll('pre code')].every((c) => c.scrollWidth <= c.clientWidth)")


def test_the_viewer_says_why_after_a_tap_and_a_key(built, browser):
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    page = context.new_page()
    page.goto((built / VIEWER).as_uri())
    page.locator("body[data-ready=yes]").wait_for()
    assert "The walk of" in page.locator("#intro").inner_text()
    page.locator(".row.call").first.tap()
    page.locator(".row.hop").first.tap()
    assert page.locator("#side").inner_text().startswith("Hop ")
    assert "is the highest key left" in page.locator("#side").inner_text()
    assert page.locator("#side").bounding_box()["y"] < 844
    first = page.locator("#side h2").first.inner_text()
    page.locator(".row.hop").first.focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("#side h2").first.inner_text() != first


def test_the_keyboard_goes_everywhere_and_shows_where_it_is(built, browser):
    page = browser.new_page()
    page.goto((built / REPORT).as_uri())
    page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches('.md-skip')")
    page.keyboard.press("Enter")
    page.wait_for_function("location.hash")
    reached: set[str] = set()
    while not page.evaluate("document.activeElement.closest('footer')"):
        page.keyboard.press("Tab")
        reached |= set(page.evaluate("[document.activeElement.tagName, ...document.activeElement.classList]"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", page.evaluate("document.activeElement.outerHTML")
    assert {"md-typeset__scrollwrap", "headerlink", "SUMMARY", "CODE"} <= reached


def test_search_works_from_disk(built, browser):
    page = browser.new_page()
    page.goto((built / "index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("guide to custom-ops")
    first = page.locator(".md-search-result__link").first
    first.wait_for()
    assert "custom" in first.get_attribute("href")
    first.click()
    assert page.title() != "framework-internals"


def test_the_other_machine_is_at_the_same_place_of_its_report(built, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 500})
    page.goto((built / WHOLE_STEP).as_uri())
    assert page.locator(".machine-switch [aria-current=page]").inner_text() == HERE
    page.locator("#what-explains-the-difference").scroll_into_view_if_needed()
    page.evaluate("document.getElementById('what-explains-the-difference').scrollIntoView()")
    page.locator(".machine-switch").get_by_role("link", name=OTHER).click()
    page.wait_for_url(f"**/{OTHER}/report.html#what-explains-the-difference")
    page.goto((built / WHOLE_STEP).as_uri())
    page.evaluate(
        """sessionStorage.setItem("sections above", '["gone", "what-this-does-not-show"]'); location.hash = "gone";"""
    )
    page.reload()
    page.wait_for_url("**#what-this-does-not-show")


def test_a_table_is_sorted_by_a_click_and_by_a_key(built, browser):
    page = browser.new_page()
    page.goto((built / WHOLE_STEP).as_uri())
    column = "[...document.querySelector('article table').tBodies[0].rows].map((row) => row.cells[1].innerText)"

    def rates() -> list[float]:
        return [float(text.split(" ")[0].replace(",", "")) for text in page.evaluate(column)]

    before = rates()
    button = page.get_by_role("button", name="tokens/s").first
    button.click()
    assert rates() == sorted(before) != before
    button.press("Enter")
    assert rates() == sorted(before, reverse=True)


def test_a_figure_shows_its_values_under_the_pointer(built, browser):
    page = browser.new_page()
    page.goto((built / WHOLE_STEP).as_uri())
    titles = page.locator("article svg.figure").first.locator("title")
    assert "tokens/s" in titles.first.text_content()
    ids = page.evaluate("[...document.querySelectorAll('article [id]')].map(({ id }) => id)")
    assert len(ids) == len(set(ids))


def test_the_viewer_and_the_catalogue_search(built, browser):
    page = browser.new_page()
    page.goto((built / VIEWER).as_uri())
    before = page.locator("#count").inner_text()
    page.locator("#q").fill("embedding")
    page.wait_for_function("(before) => document.getElementById('count').innerText !== before", arg=before)
    assert page.locator("#tree mark").first.inner_text() == "embedding"
    page.goto((built / CATALOGUE).as_uri())
    page.locator("#search").fill("item")
    assert 0 < int(page.locator("#found").inner_text()) < 134
    page.locator(".way-back a").click()
    assert page.title().startswith("compile-bench")
