"""What MkDocs calls while it builds the site: see ``mkdocs.yml``."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from website import pages
from website.github_markdown import for_python_markdown

_ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the repository's pages beside the styles, and build the navigation from them."""
    pages.write_catalogue(_ROOT)
    site = pages.collect(_ROOT)
    for path in site.pages:
        page = File.generated(config, path, abs_src_path=str(_ROOT / path))
        if pages.twin_as_html(site, path):
            page.dest_uri = PurePosixPath(path).with_suffix(".on-one-page.html").as_posix()
        files.append(page)
    for path in site.files:
        if path.endswith(".html"):
            files.append(File.generated(config, path, content=pages.with_way_back(_ROOT, path)))
        else:
            files.append(File.generated(config, path, abs_src_path=str(_ROOT / path)))
    for path in site.sources:
        files.append(File.generated(config, f"{path}.md", content=pages.source_page(_ROOT / path)))
    for path, content in site.api.items():
        files.append(File.generated(config, path, content=content))
    for path, content in pages.redirects(site).items():
        files.append(File.generated(config, path, content=content))
    config.nav = pages.navigation(site)
    config.extra["site"] = site
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Read a page of the repository as GitHub does."""
    site: pages.Site = config.extra["site"]
    path = page.file.src_uri
    page.meta.setdefault("title", pages.full_title(path, page.title))
    if path not in site.pages:
        return markdown
    markdown = pages.draw_diagrams(path, pages.link_to_source_pages(site, path, markdown))
    markdown = pages.distinct_heading(path, markdown)
    return for_python_markdown(pages.with_machine_switch(site, path, markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let a report's figures show values under the pointer."""
    return pages.with_hover_values(_ROOT / page.file.src_uri, html)
