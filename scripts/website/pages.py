"""Chooses the files that become pages of the site, generates the others, and gives each its place."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from posixpath import normpath

import lenses

HOUSE = "framework-internals"

# The API page of a package documents the names that it exports and these modules.
MODULES = {
    "benchkit": (
        *("timing", "timing.statistics", "timing.limits", "timing.profiling", "environment", "results", "report"),
        *("report.plotting", "run", "numbers", "command", "command.progress", "device", "errors", "processes"),
    ),
    "torch_baseline": (
        *("config", "model", "data", "optim", "train", "loop", "checkpoint", "parallel", "records", "sample"),
        "throughput",
    ),
    "compile_bench": ("targets.target", "pytest_plugin"),
    "jax_baseline": ("parity", "gpt.model", "gpt.train", "gpt.transfer", "gpt.interchange", "gpt.sharding"),
    "rmsnorm_fused": ("backends",),
    "custom_ops": ("jax_operators",),
}

_LANGUAGES = {".py": "python", ".sh": "bash", ".cu": "cuda", ".cpp": "cpp", ".h": "cpp", ".cuh": "cpp", ".toml": "toml"}
# Code comes first, so that what looks like a link inside it is not found: there `path` is None.
_CODE = (
    r"^[\t >]*(?P<fence>`{3,}(?=[^`\n]*$)|~{3,}).*?(?:^[\t >]*(?P=fence)[`~]*[\t ]*$|\Z)"
    r"|(?<![`\\])(?P<ticks>`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)(?P=ticks)(?!`)"
)
_CODE_OR_LINK = re.compile(rf"{_CODE}|\]\((?P<path>[^)\s:#]+)(?:#[^)\s]*)?\)", re.MULTILINE | re.DOTALL)
_CODE_OR_LINK_TO_A_TEST = re.compile(
    rf"{_CODE}|(?<!!)\[(?P<text>[^][]*)\]\([^)\s:]*/tests(?:/[^)\s:]*)?\)", re.MULTILINE | re.DOTALL
)
# Reports that are not committed, and their index.
_OF_THIS_MACHINE = re.compile(rf"/reports/(own-[^/]*|[^/]*-quick)/|^{HOUSE}/THIS_MACHINE\.md$")
# Folders of reports that have another name since: pages at the old places lead to the new ones.
RENAMED = {"cpu": "amd-avx512-2-cores-24gib", "nvidia-h200": "nvidia-h200-140gib"}
_VERSIONS = f"{HOUSE}/versions/report.md"
_PAGES = (
    "*.md",
    "docs/*.md",
    "docs/learn/*.md",
    "shared/*.md",
    "scripts/*.md",
    "examples/*.md",
    f"{HOUSE}/*.md",
    f"{HOUSE}/reports/*/report.md",
    _VERSIONS,
)
_LENS_PAGES = ("*.md", "csrc/**/*.md", "catalogue/*.md", "reports/*/report.md")
_MERMAID = re.compile(r"^```mermaid\n.*?^```$", re.MULTILINE | re.DOTALL)
_SOURCES = ("examples/*.py", "examples/*.sh", f"{HOUSE}/*/examples/*.py")

# The titles that lead to a page, from the tab down to its own, and the page.
Navigation = dict[tuple[str, ...], str]


@dataclass
class Site:
    """The content of the site. All paths are relative to the root of the repository.

    Attributes:
        root: The root of the repository.
        pages: Markdown files that are shown as they are.
        sources: Other files that are shown on a page each: ``LICENSE`` on ``LICENSE.md``.
        files: Files that are copied: figures, the trace viewer, the searchable catalogue.
        api: Generated pages: their path and the text that mkdocstrings fills in.
    """

    root: Path
    pages: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    api: dict[str, str] = field(default_factory=dict)


def write_catalogue(root: Path) -> None:
    """Write the pages of compile-bench's catalogue, which git does not hold.

    Its programs import torch. Without torch the site has the catalogue's index alone.
    """
    if importlib.util.find_spec("torch") is None:
        print("site: torch is not installed, so the catalogue's pages are left out")
        return
    from compile_bench.catalogue.page import write_page

    write_page(root / HOUSE / "compile-bench" / "catalogue")


def collect(root: Path) -> Site:
    """Collect every page, the files that pages link to, and an API page for each package."""
    site = Site(root)
    patterns = (*_PAGES, *(f"{HOUSE}/{lens}/{pattern}" for lens in lenses.manifests() for pattern in _LENS_PAGES))
    site.pages = [path for path in _matching(root, patterns) if not _OF_THIS_MACHINE.search(path)]
    site.sources = _matching(root, _SOURCES)
    site.files = _matching(root, [f"{HOUSE}/*/catalogue/*.html"])
    for page in site.pages:
        for target in linked_files(root, page):
            if target.endswith(".md") or target in site.sources or target in site.files or is_test(target):
                continue
            (site.files if _is_shown_as_it_is(target) else site.sources).append(target)
        site.files += [f for f in _matching(root, [f"{diagrams(page)}-*.svg"]) if f not in site.files]
    for source in sorted((*root.glob("shared/src/*/"), *root.glob(f"{HOUSE}/*/src/*/"))):
        if (source / "__init__.py").exists():
            home = source.parents[1].relative_to(root).as_posix()
            site.api[f"{home}/api/{source.name}.md"] = _api_page(source)
    return site


def linked_files(root: Path, page: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to or shows. Code has no links.

    Files outside the repository are left out.
    """
    for link in links(root, page):
        target = resolve(page, link)
        if not target.startswith(("../", "/")) and (root / target).is_file():
            yield target


def links(root: Path, page: str) -> Iterator[str]:
    """Yield the links of a page without their places inside the target, as they stand there. Code has no links."""
    for link in _CODE_OR_LINK.finditer((root / page).read_text(encoding="utf-8")):
        if link["path"]:
            yield link["path"]


def resolve(page: str, link: str) -> str:
    """Return a relative link of a page as a path from the root."""
    return normpath(PurePosixPath(page).parent / link)


def is_test(path: str) -> bool:
    """Whether a file belongs to tests. Those are read in the repository: the site has no page of them."""
    return "/tests/" in path


def link_to_source_pages(site: Site, page: str, text: str) -> str:
    """Make each link to a source file lead to the page that shows the file, and one to a test be text.

    Code stays as it is.
    """

    def turn(link: re.Match[str]) -> str:
        return f"]({link['path']}.md)" if resolve(page, link["path"] or "") in site.sources else link[0]

    without_tests = _CODE_OR_LINK_TO_A_TEST.sub(lambda link: link[0] if link["text"] is None else link["text"], text)
    return _CODE_OR_LINK.sub(turn, without_tests)


def diagrams(page: str) -> str:
    """The path to the pictures of a page's Mermaid diagrams, without ``-1.svg``, ``-2.svg`` and so on."""
    return str(PurePosixPath(page).parent / "figures" / PurePosixPath(page).stem)


def draw_diagrams(page: str, text: str) -> str:
    """The page's Markdown with a picture in place of each Mermaid diagram.

    GitHub draws Mermaid itself. The site opens from disk without a network, so it shows the committed pictures.
    """
    numbers = itertools.count(1)
    stem = PurePosixPath(diagrams(page)).relative_to(PurePosixPath(page).parent)
    return _MERMAID.sub(lambda _: f"![Diagram]({stem}-{next(numbers)}.svg)", text)


def distinct_heading(page: str, text: str) -> str:
    """Make the heading of a page unique, since the search lists pages by heading.

    The heading of a report gets the name of its machine, the heading of notes the name of their lens.
    """
    path = PurePosixPath(page)
    if path.name != "NOTES.md" and path.parent.parent.name != "reports":
        return text
    return re.sub(r"^# .+$", rf"\g<0> · {path.parent.name}", text, count=1, flags=re.MULTILINE)


def with_machine_switch(site: Site, page: str, text: str) -> str:
    """Return a report with links to the same report of the other machines below its heading."""
    path = PurePosixPath(page)
    machines = [_machine(other) for other in site.pages if other.startswith(f"{path.parent.parent}/")]
    if path.parent.parent.name != "reports" or len(machines) < 2:
        return text
    links = " ".join(
        f'<a href="../{machine}/report.html"{" aria-current=page" if machine == _machine(page) else ""}>{machine}</a>'
        for machine in machines
    )
    heading, _, rest = text.partition("\n")
    return f'{heading}\n\n<nav class="machine-switch" aria-label="Machine">Measured on {links}</nav>\n{rest}'


def redirects(site: Site) -> dict[str, str]:
    """Return the old place of each report that has moved, and its new one. A trace viewer's leads to the report."""
    moved = {}
    viewers = [path for path in site.files if path.endswith(".html")]
    for page in map(PurePosixPath, [*site.pages, *viewers]):
        for old, new in RENAMED.items():
            if page.parent.name == new and page.parent.parent.name == "reports":
                before = page.parent.with_name(old) / page.with_suffix(".md").name
                moved[str(before)] = str(page.with_name("report.md"))
    return moved


def source_page(path: Path) -> str:
    """Return a page that shows a source file in a code block."""
    text = path.read_text(encoding="utf-8")
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"# {path.name}\n\n{fence}{_LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def twin_as_html(site: Site, page: str) -> bool:
    """Tell whether the repository has the same page as HTML, under the name that the site gives to the Markdown."""
    return PurePosixPath(page).with_suffix(".html").as_posix() in site.files


def with_way_back(root: Path, path: str) -> str:
    """Return a page that is HTML already, with a link back to its lens."""
    _, lens, *folders = PurePosixPath(path).parent.parts
    up = "../" * len(folders)
    style = f'<link rel="stylesheet" href="{up}../../stylesheets/standalone.css">'
    line = f'<nav class="way-back" aria-label="Site"><a href="{up}index.html">← {lens}</a></nav>'
    text = (root / path).read_text(encoding="utf-8")
    return text.replace("</head>", f"{style}\n</head>", 1).replace("<body>", f"<body>\n{line}", 1)


def navigation(site: Site) -> Navigation:
    """Give each page its place: the path through the material, the tools, the reports, the reference."""
    places: Navigation = {}

    def put(section: tuple[str, ...], paths: Iterable[str]) -> None:
        for path in paths:
            if path in site.pages and path not in places.values():
                places[(*section, _title(site, path))] = path

    places["Learn", "Start"] = "README.md"
    learn = "docs/learn.md"
    chapters = linked_files(site.root, learn) if learn in site.pages else ()
    put(("Learn",), [learn, *(page for page in chapters if page.startswith("docs/learn/"))])
    put(("Learn",), [page for page in site.pages if page.startswith("docs/learn/")])
    places |= {("Learn", "From a kernel to torch.ops", title): page for title, page in _kernels(site)}
    put(("Learn",), ["docs/architecture.md", "docs/glossary.md"])
    put(("Tools",), ["docs/running.md"])
    for lens in lenses.manifests():
        places |= {("Tools", lens, *titles): page for titles, page in _of_a_lens(site, lens)}
    put(("Tools", "Your own code"), ["examples/README.md"])
    examples = [path for path in site.sources if path.startswith("examples/")]
    places |= {("Tools", "Your own code", PurePosixPath(path).name): f"{path}.md" for path in examples}
    places |= _reports(site)
    last = "Reference"
    places |= {(last, "API", PurePosixPath(page).stem): page for page in sorted(site.api, key=_api_order)}
    put((last, "shared"), ["shared/README.md", "docs/shared.md"])
    put((last,), ["scripts/README.md"])
    put((last,), ["CONTRIBUTING.md", "docs/random_programs.md", _VERSIONS])
    notes = [page for page in site.pages if page.endswith("/NOTES.md")]
    places |= {(last, "Notes", PurePosixPath(page).parent.name): page for page in notes}
    put((last,), [page for page in site.pages if "/" not in page])
    places |= {(last, path): f"{path}.md" for path in site.sources if "/" not in path}
    rest = [path for path in site.sources if f"{path}.md" not in places.values()]
    places |= {(last, "Sources", PurePosixPath(path).name): f"{path}.md" for path in rest}
    return places


def _reports(site: Site) -> Navigation:
    """The index, the whole step, and of each lens its reports with what belongs to them."""
    places: Navigation = {("Reports", "All reports"): f"{HOUSE}/README.md"}
    for lens in ("", *lenses.manifests()):
        home = f"{HOUSE}/{lens}/reports/" if lens else f"{HOUSE}/reports/"
        section = ("Reports", lens or "The whole step")
        places |= {(*section, _machine(page)): page for page in site.pages if page.startswith(home)}
        viewers = [page for page in site.files if page.startswith(home) and page.endswith(".html")]
        places |= {(*section, _look(page)): page for page in viewers}
    return places


def _kernels(site: Site) -> Iterator[tuple[str, str]]:
    """The pages on the sources of operators, in the order in which the first of them names the others."""
    pages = [page for page in site.pages if "/csrc/" in page]
    named = [page for page in linked_files(site.root, pages[0]) if page in pages] if pages else []
    for page in dict.fromkeys([*pages[:1], *named, *pages[1:]]):
        yield _title(site, page), page


def _api_order(page: str) -> tuple[bool, str]:
    """The lenses before what they share."""
    return page.startswith("shared/"), page


def _of_a_lens(site: Site, lens: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield titles and pages of one lens: README, guide, the catalogue, then the rest but reports and notes."""
    home = f"{HOUSE}/{lens}/"
    yield (lens,), f"{home}README.md"
    if f"docs/{lens}.md" in site.pages:
        yield ("Guide",), f"docs/{lens}.md"
    own = [page for page in (*site.pages, *site.files) if page.startswith(home) and page.endswith((".md", ".html"))]
    elsewhere = ("/reports/", "/csrc/", "/NOTES.md")
    for page in own:
        if page != f"{home}README.md" and not any(part in page for part in elsewhere):
            yield (_look(page) if page.endswith(".html") else _title(site, page),), page
    yield from (
        ((PurePosixPath(path).name,), f"{path}.md") for path in site.sources if path.startswith(f"{home}examples/")
    )


# What a user imports, before everything else that a package exports.
_FIRST = {
    "dispatcher_trace": ("trace", "assert_dispatch", "assert_no_hidden_copies", "table_of"),
    "rmsnorm_fused": ("rms_norm", "RMSNorm"),
    "custom_ops": ("flash_attention", "linear_cross_entropy", "bias_gelu", "rotary", "Linear", "AdamW", "load"),
    "compile_bench": ("Triage", "Bench"),
    "benchkit": ("compare", "measure"),
    "lowering": ("choose", "describe", "lower"),
}


def _api_page(source: Path) -> str:
    """A package's docstring, what a user imports, the other exported names, and the modules."""
    package = source.name
    exported = _exported(source / "__init__.py")
    first = [name for name in _FIRST.get(package, ()) if name in exported]
    # griffe reads the sources without running them: for it a name that is also a module's is the module.
    names = [
        f"{exported[name]}.{name}\n    options:\n      heading: {package}.{name}\n      toc_label: {name}"
        if (source / f"{name}.py").exists()
        else f"{package}.{name}"
        for name in dict.fromkeys([*first, *exported])
    ]
    imports = f"```python\nfrom {package} import {', '.join(first)}\n```\n" if first else ""
    modules = [f"{package}.{module}" for module in MODULES.get(package, ())]
    return "\n".join(
        [
            f"::: {package}\n    options:\n      heading_level: 1\n      members: false\n",
            imports,
            *(f"::: {name}\n" for name in (*names, *modules)),
        ]
    )


def _exported(module: Path) -> dict[str, str]:
    """Return the names in ``__all__``, each with the module that it is imported from."""
    names: list[str] = []
    modules: dict[str, str] = {}
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            modules |= {alias.name: node.module or "" for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
    return {name: modules.get(name, "") for name in names}


def full_title(page: str, title: str) -> str:
    """Return the title of a page for places without the navigation: search results and the browser's tab."""
    if page == "README.md":
        return "Start"
    home, *folders = PurePosixPath(page).parent.parts or [""]
    inside = home == HOUSE and folders and title != folders[0] and not title.startswith("API")
    return f"{title} · {folders[0] if folders[0] in lenses.manifests() else 'end to end'}" if inside else title


def _machine(page: str) -> str:
    return PurePosixPath(page).parent.name


def _title(site: Site, page: str) -> str:
    if twin_as_html(site, page):
        return f"{PurePosixPath(page).stem.capitalize()}, on one page"
    heading = re.search(r"^# (.+)$", (site.root / page).read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1] if heading else PurePosixPath(page).stem


def _look(page: str) -> str:
    path = PurePosixPath(page)
    if path.parent.parent.name == "reports":
        return f"Trace viewer: {_machine(page)}"
    return f"{path.stem.capitalize()}, searchable"


def _is_shown_as_it_is(path: str) -> bool:
    return PurePosixPath(path).suffix in {".svg", ".png", ".html", ".gz", ".json"}


def _matching(root: Path, patterns: Iterable[str]) -> list[str]:
    paths = {path.relative_to(root).as_posix(): None for pattern in patterns for path in sorted(root.glob(pattern))}
    return list(paths)
