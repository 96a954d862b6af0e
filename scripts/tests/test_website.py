"""Which pages the site has and what their Markdown becomes; needs nothing that builds a site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import lenses
import pytest

from benchkit.run import committed_reports
from website import figures, pages
from website.github_markdown import for_python_markdown

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.committed  # the site has the committed reports


@pytest.fixture(scope="module")
def site() -> pages.Site:
    pages.write_catalogue(ROOT)
    return pages.collect(ROOT)


def reports_of(site: pages.Site, lens: str) -> list[str]:
    return [page for page in site.pages if page.startswith(f"framework-internals/{lens}/reports/")]


def test_every_readme_and_every_committed_report_is_a_page(site):
    house = ROOT / "framework-internals"
    expected = {
        ROOT / "README.md",
        ROOT / "shared" / "README.md",
        *house.glob("*/README.md"),
        *house.glob("*/NOTES.md"),
    }
    roots = [house, *(house / lens for lens in lenses.manifests())]
    expected |= {path / "report.md" for root in roots for path in committed_reports(root)}
    assert {path.relative_to(ROOT).as_posix() for path in expected} <= set(site.pages)


def test_a_ready_environment_without_mkdocs_is_refused_with_the_remedy(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S: no site-packages
    bare.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / "site.sh"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SETUP": "0", "PYTHON": str(bare), "PYTHONPATH": ""},
    )
    assert done.returncode == 1
    assert "pip install -c constraints.txt mkdocs-material mkdocs-gen-files" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_what_a_page_shows_comes_along(site):
    figures = {path for path in site.files if path.endswith(".svg")}
    linked = {path for page in site.pages for path in pages.linked_files(ROOT, page)}
    drawn = {path for page in site.pages for path in site.files if path.startswith(f"{pages.diagrams(page)}-")}
    assert {path for path in linked if path.endswith(".svg")} | drawn == figures
    viewers = {f"{page.removesuffix('report.md')}gpt_step.html" for page in reports_of(site, "dispatcher-trace")}
    assert viewers <= set(site.files)
    assert "framework-internals/compile-bench/catalogue/CATALOGUE.html" in site.files
    assert "LICENSE" in site.sources


def test_a_diagram_is_shown_by_the_picture_that_was_drawn_from_it(site):
    """After a change of a diagram: see CONTRIBUTING.md, "Diagrams"."""
    for page in site.pages:
        text = (ROOT / page).read_text()
        sources = re.findall(r"^```mermaid\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        shown = re.findall(r"!\[Diagram\]\((\S+)\)", pages.draw_diagrams(page, text))
        assert len(shown) == len(sources)
        for path, source in zip(shown, sources, strict=True):
            picture = (ROOT / page).parent / path
            drawn = "".join(re.findall(r">([^<>]+)<", picture.read_text()))
            for label in re.findall(r'"([^"]+)"', source):
                for word in re.split(r"<br>|\s", label):
                    assert word in drawn, f"{picture} is older than the diagram: it lacks {word!r}"
    assert pages.draw_diagrams("docs/a.md", "x\n```mermaid\nflowchart\n```\n") == "x\n![Diagram](figures/a-1.svg)\n"


def test_every_page_has_one_place_in_the_navigation(site):
    found = list(pages.navigation(site).values())
    html = {path for path in site.files if path.endswith(".html")}
    assert len(found) == len(set(found))
    assert set(found) == {*site.pages, *site.api, *(f"{path}.md" for path in site.sources), *html}


def test_every_package_has_an_api_page_of_modules_that_are_there(site):
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    assert {Path(page).stem for page in site.api} == set(packages)
    for page in site.api:
        source = (ROOT / page).parents[1] / "src" / Path(page).stem
        for module in pages.MODULES.get(source.name, ()):
            path = source / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), f"{source.name}.{module}"


def test_a_link_to_a_section_names_a_heading_as_the_site_does(site):
    slugs: dict[str, set[str]] = {}
    for page in site.pages:
        text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        titles = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in re.findall(r"^#+ (.+)$", text, re.M))
        slugs[page] = {re.sub(r"[-\s]+", "-", title) for title in titles}
    for page in site.pages:
        for path, section in re.findall(r"\]\(([^)\s:#]+\.md)#([^)\s]+)\)", (ROOT / page).read_text()):
            target = pages.resolve(page, path)
            assert target not in slugs or re.sub(r"-+", "-", section) in slugs[target], f"{page}: {path}#{section}"


def test_no_file_of_a_test_is_a_page_and_a_link_to_one_is_text(site):
    assert not [path for path in (*site.pages, *site.sources) if pages.is_test(path)]
    text = "[pairs](../framework-internals/jax-baseline/tests/pairs) `[a](tests/b.py)` [guide](../docs/a.md)"
    turned = pages.link_to_source_pages(site, "docs/jax-baseline.md", text)
    assert turned == text.replace("[pairs](../framework-internals/jax-baseline/tests/pairs)", "pairs")


def test_an_api_page_begins_with_what_a_user_imports(site):
    for page, first in (
        ("framework-internals/dispatcher-trace/api/dispatcher_trace.md", "trace"),
        ("framework-internals/rmsnorm-fused/api/rmsnorm_fused.md", "rms_norm"),
        ("framework-internals/custom-ops/api/custom_ops.md", "flash_attention"),
    ):
        text = site.api[page]
        blocks = re.findall(r"^::: (\S+)", text, re.MULTILINE)
        assert blocks[1].rpartition(".")[2] == first
        assert f"from {Path(page).stem} import {first}" in text


def test_nothing_from_outside_the_repository_comes_along(tmp_path):
    root = tmp_path / "repository"
    root.mkdir()
    (tmp_path / "secret").write_text("a")
    (root / "LICENSE").write_text("b")
    (root / "README.md").write_text("[a](../secret) [b](LICENSE) [c](/etc/hostname) [d](gone.svg)")
    assert list(pages.linked_files(root, "README.md")) == ["LICENSE"]


def test_a_link_to_a_source_file_leads_to_the_page_that_shows_it(site):
    text = "[Apache](LICENSE), [index](framework-internals/README.md), [torch](https://pytorch.org/LICENSE)"
    turned = text.replace("(LICENSE)", "(LICENSE.md)")
    assert pages.link_to_source_pages(site, "README.md", text) == turned
    assert pages.link_to_source_pages(site, "examples/README.md", "[it](../LICENSE)") == "[it](../LICENSE.md)"


@pytest.mark.parametrize(
    "code",
    [
        "```\n[a](LICENSE)\n```",
        "> ~~~~ text\n> [a](LICENSE)\n> ~~~\n> [b](LICENSE)\n> ~~~~",
        "1. A list:\n\n    ```python\n    x = `1`[a](LICENSE)\n    ```",
        "`[a](LICENSE)`",
        "``a ` [b](LICENSE)``",
        "`two\nlines [a](LICENSE)`",
        "```never closed\n[a](LICENSE)",
    ],
)
def test_a_link_inside_code_is_not_a_link(site, tmp_path, code):
    (tmp_path / "LICENSE").touch()
    (tmp_path / "README.md").write_text(code)
    assert list(pages.linked_files(tmp_path, "README.md")) == []
    assert pages.link_to_source_pages(site, "README.md", code) == code


@pytest.mark.parametrize(
    "text",
    [
        "```\ncode\n```\n[a](LICENSE)",
        "[`code`](LICENSE)",
        "`code` [a](LICENSE) `code`",
        "```code``` [a](LICENSE)\n\n```code```",
        "\\`[a](LICENSE)`",
        "a ` alone, [a](LICENSE)\n\nand another `",
    ],
)
def test_a_link_beside_code_is_a_link(site, tmp_path, text):
    (tmp_path / "LICENSE").touch()
    (tmp_path / "README.md").write_text(text)
    assert list(pages.linked_files(tmp_path, "README.md")) == ["LICENSE"]
    assert pages.link_to_source_pages(site, "README.md", text) == text.replace("LICENSE", "LICENSE.md")


def test_no_two_pages_share_a_heading(site):
    assert pages.distinct_heading("a/reports/cpu/report.md", "# A\n\n# B") == "# A · cpu\n\n# B"
    assert pages.distinct_heading("a/README.md", "# A") == "# A"
    headings = [
        pages.distinct_heading(page, (ROOT / page).read_text()).partition("\n")[0] for page in site.pages if "/" in page
    ]
    assert len(set(headings)) == len(headings)


def test_the_examples_have_the_order_of_their_table(site):
    examples = [page for page in pages.navigation(site).values() if "/csrc/" in page]
    assert [Path(example).parent.name for example in examples[:4]] == ["csrc", "vector_add", "scale", "bias_gelu"]


def test_a_report_leads_to_the_same_report_of_the_other_machine(site):
    reports = reports_of(site, "custom-ops")
    text = pages.with_machine_switch(site, reports[0], "# A\n\nB")
    assert text.startswith("# A\n\n<nav ")
    places = [f"../{Path(page).parent.name}/report.html" for page in reports]
    assert re.findall(r'href="([^"]+)"', text) == places
    assert re.findall(r'href="([^"]+)" aria-current', text) == places[:1]
    assert pages.with_machine_switch(site, "README.md", "# A") == "# A"
    assert pages.with_machine_switch(site, "framework-internals/versions/report.md", "# A") == "# A"


def test_a_report_is_found_at_its_old_place(site):
    redirects = pages.redirects(site)
    assert "framework-internals/reports/cpu/report.md" in redirects
    assert "framework-internals/dispatcher-trace/reports/nvidia-h200/gpt_step.md" in redirects
    assert set(redirects.values()) <= set(site.pages)
    assert not set(redirects) & set(site.pages)
    assert set(pages.RENAMED.values()) <= {Path(page).parent.name for page in site.pages}


def test_a_link_to_a_file_of_the_repository_leads_to_a_page_or_a_file_of_the_site(site):
    """A folder is no page: MkDocs would end with a warning."""
    there = {*site.pages, *site.sources, *site.files}
    for page in site.pages:
        for link in pages.links(ROOT, page):
            target = pages.resolve(page, link)
            known = target in there or pages.is_test(f"{target}/")
            assert known or not (ROOT / target).exists(), f"{page}: name a file instead of {link}"


def test_reports_of_this_machine_are_no_pages(tmp_path):
    for name in ("own-amd-avx512-2-cores-24gib", "own-amd-avx512-2-cores-24gib-quick", "amd-avx512-2-cores-24gib"):
        (tmp_path / "framework-internals" / "reports" / name).mkdir(parents=True)
        (tmp_path / "framework-internals" / "reports" / name / "report.md").write_text("# A")
    for name in ("THIS_MACHINE", "README"):
        (tmp_path / "framework-internals" / f"{name}.md").write_text("# A")
    assert pages.collect(tmp_path).pages == [
        "framework-internals/README.md",
        "framework-internals/reports/amd-avx512-2-cores-24gib/report.md",
    ]


def test_what_a_report_says_of_its_run_is_in_no_section_of_the_contents():
    def heading(title, *parts):
        return SimpleNamespace(title=title, children=list(parts))

    costs = heading("Costs", heading("Of a call"), heading("What was asked"), heading("The machine"))
    page = SimpleNamespace(toc=[heading("A report", costs)], file=SimpleNamespace(src_uri="a/report.md"))
    figures.on_page_content("", page)
    assert [part.title for part in page.toc[0].children] == ["Costs", "What was asked", "The machine"]
    assert [part.title for part in costs.children] == ["Of a call"]


def test_a_figure_inside_a_page_is_dark_where_the_page_is(tmp_path):
    (tmp_path / "figures").mkdir()
    style = (
        '<style>@media (prefers-color-scheme: dark) { svg { fill: #eee } [style*="fill: #fff"] { fill: #111 } }</style>'
    )
    (tmp_path / "figures" / "speed.svg").write_text(f"<svg>{style}<g><title>3 ms</title></g></svg>")
    shown = figures.with_hover_values(tmp_path / "report.md", '<img alt="Speed" src="figures/speed.svg" />')
    assert "prefers-color-scheme" not in shown
    assert '[data-md-color-scheme="slate"] .figure { fill: #eee }' in shown
    assert '[data-md-color-scheme="slate"] .figure [style*="fill: #fff"]' in shown


def test_a_figure_with_values_under_the_pointer_is_inside_its_page(tmp_path):
    (tmp_path / "figures").mkdir()
    drawing = '<?xml version="1.0"?>\n<svg width="1"><g id="a"><title>3 ms</title><use xlink:href="#a"/></g></svg>'
    (tmp_path / "figures" / "speed.svg").write_text(drawing)
    (tmp_path / "figures" / "plain.svg").write_text("<svg/>")
    html = '<img alt="Speed" src="figures/speed.svg" /> <img alt="Plain" src="figures/plain.svg" />'
    shown = figures.with_hover_values(tmp_path / "report.md", html)
    assert shown.startswith('<svg class="figure" role="img" aria-label="Speed" width="1"><g id="speed-a"><title>3 ms')
    assert 'xlink:href="#speed-a"' in shown
    assert shown.endswith('<img alt="Plain" src="figures/plain.svg" />')


def test_a_source_is_fenced_with_more_ticks_than_it_has(tmp_path):
    path = tmp_path / "ticks.py"
    path.write_text('TEXT = """\n````python\n"""\n')
    assert pages.source_page(path) == f"# ticks.py\n\n`````python\n{path.read_text()}`````\n"


def test_a_page_that_comes_as_html_leads_back(tmp_path):
    path = "framework-internals/lens/reports/cpu/walk.html"
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("<html><head></head>\n<body>\n<p>a</p></body></html>")
    text = pages.with_way_back(tmp_path, path)
    for target, where in re.findall(r'href="([^"]+)/([^/"]+)"', text):
        landed = (tmp_path / path).parent.joinpath(target).resolve().relative_to(tmp_path)
        assert f"{landed}/{where}" in {"framework-internals/lens/index.html", "stylesheets/standalone.css"}
    assert "<p>a</p>" in text


@pytest.mark.parametrize(
    ("page", "title", "full"),
    [
        ("README.md", "framework-internals", "Start"),
        ("framework-internals/README.md", "All reports", "All reports"),
        ("framework-internals/custom-ops/README.md", "custom-ops", "custom-ops"),
        ("framework-internals/custom-ops/reports/cpu/report.md", "Report: cpu", "Report: cpu · custom-ops"),
        ("framework-internals/custom-ops/api/custom_ops.md", "API: custom_ops", "API: custom_ops"),
        ("framework-internals/reports/cpu/report.md", "Report: cpu", "Report: cpu · end to end"),
    ],
)
def test_a_title_says_of_which_lens_a_page_is(page, title, full):
    assert pages.full_title(page, title) == full


@pytest.mark.parametrize(
    ("github", "python"),
    [
        pytest.param("a\n- b\n- c", "a\n\n- b\n- c", id="a list after a paragraph"),
        pytest.param("a\n1986. b", "a\n1986. b", id="a year at the start of a line is no list"),
        pytest.param("- a\n  b\n  - c\n\n  d", "- a\n    b\n    - c\n\n    d", id="under the first letter"),
        pytest.param("10. a\n\n    b\n\nc", "10. a\n\n    b\n\nc", id="a list ends where a line stands further left"),
        pytest.param("- a\nb\n\nc", "- a\n    b\n\nc", id="the rest of a paragraph stands anywhere"),
        pytest.param("- a\n\n  b\n- c", "- a\n\n    b\n\n- c", id="an item of two paragraphs"),
        pytest.param("- a\n## b\n- c", "- a\n## b\n\n- c", id="a heading ends a list"),
        pytest.param("- a\n\n  ```\n  b\n  ```\nc", "- a\n\n    ```\n    b\n    ```\nc", id="code is no paragraph"),
        pytest.param(
            "- a\n\n  ```py x\n  - b\n  ```\n- c", "- a\n\n    ```py\n    - b\n    ```\n\n- c", id="code in a list"
        ),
        pytest.param("```\na\n- b\n| `c\\|d` |\n```", "```\na\n- b\n| `c\\|d` |\n```", id="code stays as it is"),
        pytest.param("| `a\\|b` | c\\|d |", "| `a|b` | c\\|d |", id="a bar in a table's code"),
        pytest.param("<details><summary>a</summary>", '<details markdown="1"><summary>a</summary>', id="details"),
        pytest.param("![a](b.svg)", "[![a](b.svg)](b.svg)", id="a figure can be enlarged"),
    ],
)
def test_the_narrower_dialect(github, python):
    assert for_python_markdown(github) == python
