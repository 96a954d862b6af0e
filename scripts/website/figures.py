"""Puts figures that show values under the pointer inside their pages; a hook of MkDocs, see ``mkdocs.yml``.

It also keeps what every report says of its run out of the section that happens to stand above it, and leaves out the
page of the navigation, which is nothing to read.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.nav import Navigation
    from mkdocs.structure.pages import Page
    from mkdocs.structure.toc import AnchorLink

_ROOT = Path(__file__).resolve().parents[2]
# Headings in a fold that benchkit.report.rendering puts between the findings and the details of a report.
_OF_THE_RUN = frozenset({"What was asked", "The machine", "How it was measured"})
_SHOWN_FIGURE = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?P<path>figures/[^"]+\.svg)" ?/?>')


def on_nav(nav: Navigation, *, files: Files, **_: Any) -> Navigation:
    """What MkDocs calls when the navigation is made of the page that lists it."""
    listed = files.get_file_from_path("SUMMARY.md")
    if listed is not None:
        files.remove(listed)
    return nav


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """What MkDocs calls with each page."""
    for heading in page.toc:
        heading.children = [part for section in heading.children for part in _without_the_run(section)]
    return with_hover_values(_ROOT / page.file.src_uri, html)


def _without_the_run(section: AnchorLink) -> list[AnchorLink]:
    """A section of the table of contents, and after it those of its parts that are the run's and not its own."""
    of_the_run = [part for part in section.children if part.title in _OF_THE_RUN]
    section.children = [part for part in section.children if part not in of_the_run]
    return [section, *of_the_run]


def _by_the_pages_choice(style: re.Match[str]) -> str:
    """The rules of a dark figure under the page's dark scheme instead of the system's."""
    rules = re.sub(r"(?=\[\w)", '[data-md-color-scheme="slate"] .figure ', style[1])
    rules = rules.replace("svg {", '[data-md-color-scheme="slate"] .figure {')
    return f"<style>{rules}</style>"


def with_hover_values(page: Path, html: str) -> str:
    """Return the HTML of a page with those figures inside it that show values under the pointer.

    A picture that a page only refers to shows no titles. The figures lie beside the page's Markdown.
    """

    def inside(image: re.Match[str]) -> str:
        text = (page.parent / image["path"]).read_text(encoding="utf-8")
        if "<title>" not in text:
            return image[0]
        drawing = text[text.index("<svg") :]
        drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
        # The page has a switch for light and dark, which the system does not know of.
        drawing = re.sub(
            r"<style>@media \(prefers-color-scheme: dark\) \{ (.*?)\}</style>", _by_the_pages_choice, drawing
        )
        # Names are unique within a figure, and now have to be unique within the page.
        drawing = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{PurePosixPath(image['path']).stem}-", drawing)
        return drawing.replace("<svg", f'<svg class="figure" role="img" aria-label="{image["alt"]}"', 1)

    return _SHOWN_FIGURE.sub(inside, html)
