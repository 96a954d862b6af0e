"""Makes the pages of the site; what mkdocs-gen-files runs, see ``mkdocs.yml``."""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath

import mkdocs_gen_files

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from website import pages  # noqa: E402
from website.github_markdown import for_python_markdown  # noqa: E402


def generate() -> None:
    """Write every page, the files that pages show, the navigation and the redirects."""
    pages.write_catalogue(ROOT)
    site = pages.collect(ROOT)
    places = pages.navigation(site)
    titles = {page: pages.full_title(page, place[-1]) for place, page in places.items()}
    sources = {f"{path}.md": pages.source_page(ROOT / path) for path in site.sources}
    shown = {path: _as_mkdocs_reads(site, path) for path in site.pages}
    for path, text in (shown | sources | site.api).items():
        wide = "hide: [toc]\n" if path == "README.md" else ""  # its blocks of code need the room
        _write(path, f'---\ntitle: "{titles[path]}"\n{wide}---\n\n{text}'.encode())
    for path in site.files:
        whole_page = path.endswith(".html")
        _write(path, pages.with_way_back(ROOT, path).encode() if whole_page else (ROOT / path).read_bytes())
    navigation = mkdocs_gen_files.Nav()
    for place, page in places.items():
        navigation[place] = page
    _write("SUMMARY.md", "".join(navigation.build_literate_nav()).encode())
    editor = mkdocs_gen_files.FilesEditor.current()
    for path in filter(lambda path: pages.twin_as_html(site, path), site.pages):
        file = editor.files.get_file_from_path(path)
        assert file is not None
        file.dest_uri = PurePosixPath(path).with_suffix(".on-one-page.html").as_posix()
    editor.config.plugins["redirects"].config["redirect_maps"] = pages.redirects(site)


def _as_mkdocs_reads(site: pages.Site, path: str) -> str:
    text = pages.link_to_source_pages(site, path, (ROOT / path).read_text(encoding="utf-8"))
    text = pages.distinct_heading(path, pages.draw_diagrams(path, text))
    text = for_python_markdown(pages.with_machine_switch(site, path, text))
    return f'{text}\n<span class="front-page"></span>\n' if path == "README.md" else text


def _write(path: str, content: bytes) -> None:
    with mkdocs_gen_files.open(path, "wb") as file:
        file.write(content)


generate()
