"""Run the chapters of docs/learn and the READMEs that show what their commands print; make notebooks of the chapters.

./scripts/python.sh scripts/chapters.py check [PAGE …]   run every block; say where a page and its run differ
./scripts/python.sh scripts/chapters.py write [PAGE …]   put what the blocks print into the page
./scripts/python.sh scripts/chapters.py notebooks        docs/learn/*.ipynb, which git ignores (needs jupytext)

A page is Markdown as GitHub shows it. Three kinds of fenced blocks run, from top to bottom, in one folder:

- ``console``: each line ``$ command`` is run by bash, and the lines below it are what it prints;
- ``python``: all such blocks of a page share one interpreter; a ``text`` block right below has what it prints;
- ``python file=NAME``, ``cpp file=NAME`` and so on: the block is written to that file, and not run.

``no-run`` behind the language keeps a block from being run: its text says what the block needs. In an output, a line
``…`` stands for any lines and ``…`` within a line for any characters. Times, their ratios and intervals, shares,
rounding errors (``1.2e-07``) and their parts of a bound, addresses, versions and numbers of source lines may differ
(``VARIES``); all else has to be equal.

Sybil and pytest-examples compare doctests and comments in code with what Python prints. These pages also have commands,
files and one folder for both, so this is a program of its own.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchkit.command import one_line_errors
from benchkit.errors import UserError
from benchkit.results import write_text_atomically

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<words>[^`\n]+)\n(?P<body>.*?)^(?P=ticks)$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"\s*^(?P<output_ticks>`{3,})text\n(?P<output>.*?)^(?P=output_ticks)$", re.MULTILINE | re.DOTALL)
# What differs from run to run, from machine to machine or from one build of torch to the next.
VARIES = (
    (re.compile(r"0x[0-9a-f]{6,}"), "<address>"),
    (re.compile(r"\d[\d.,]*(?:–\d[\d.,]*)? ?(?:ns|µs|us|ms|s|seconds)\b"), "<time>"),
    (re.compile(r"\d+(?:\.\d+)?×"), "<ratio>"),
    (re.compile(r"\(\d[\d.,]*–\d[\d.,]*\)"), "(<interval>)"),
    (re.compile(r"\b\d+(?:\.\d+)? ?%"), "<share>"),
    (re.compile(r"\b\d(?:\.\d+)?e-\d\d\b(?: \| 0\.\d+)?"), "<rounding>"),  # in a table, with its part of the bound
    (re.compile(r"\b\d+\.\d+\.\d+(?:\+\w+)?\b"), "<version>"),
    (re.compile(r"(\.(?:cpp|h|py)):\d+"), r"\1:<line>"),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
)
# The interpreter of a page: a block comes in as a line of JSON, and what it printed goes out as one.
INTERPRETER = """
import contextlib, io, json, linecache, os, sys, traceback
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
names = {"__name__": "__main__"}
for number, line in enumerate(sys.stdin):
    source, name, printed = json.loads(line), f"<block {number + 1}>", io.StringIO()
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(source, name, "exec"), names)
        except BaseException:
            traceback.print_exc()
            traceback.print_exc(file=printed)
    print(json.dumps(printed.getvalue()), file=replies, flush=True)
"""


@dataclass(frozen=True)
class Block:
    """A block that does something when its page is run.

    Attributes:
        line: The line of the page where its code begins.
        language: The first word behind the fence.
        words: The other words behind the fence.
        code: What is run, or what the file has.
        shown: What the page says that it prints; None for a block without an output.
        span: Where ``shown`` stands in the page.
    """

    line: int
    language: str
    words: tuple[str, ...]
    code: str
    shown: str | None = None
    span: tuple[int, int] = (0, 0)

    @property
    def file(self) -> str | None:
        """The name of the file that the block is written to."""
        return next((word.partition("=")[2] for word in self.words if word.startswith("file=")), None)


def blocks(page: str) -> list[Block]:
    """The blocks of a page that are run or written to a file, one for each command of a console."""
    wanted = []
    for fence in FENCE.finditer(page):
        language, *words = fence["words"].split()
        line = page[: fence.start("body")].count("\n") + 1
        block = Block(line, language, tuple(words), fence["body"])
        if "no-run" in words:
            continue
        if block.file is not None:
            wanted.append(block)
        elif language == "console":
            wanted += _commands(page, fence.span("body"))
        elif language == "python":
            output = _output_below(page, fence)
            shown, span = (output["output"], output.span("output")) if output else (None, (0, 0))
            wanted.append(Block(line, language, (), fence["body"], shown, span))
    return wanted


def _output_below(page: str, fence: re.Match[str]) -> re.Match[str] | None:
    """The output right below a block of Python that is run."""
    return OUTPUT.match(page, fence.end()) if fence["words"] == "python" else None


def _commands(page: str, span: tuple[int, int]) -> Iterator[Block]:
    """Yield each command of a console, with the lines below it."""
    pattern = re.compile(r"^\$ (?P<code>(?:.*\\\n)*.*)\n(?P<shown>(?:(?!\$ ).*\n)*)", re.MULTILINE)
    for command in pattern.finditer(page, *span):
        line = page[: command.start()].count("\n") + 1
        yield Block(line, "console", (), command["code"], command["shown"], command.span("shown"))


class Run:
    """What runs the blocks of one page, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = environment()
        self._interpreter: subprocess.Popen[str] | None = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self._interpreter is not None:
            self._interpreter.communicate()

    def printed(self, block: Block) -> str:
        """Run a block, and return what it prints."""
        if block.file is not None:
            path = self._folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code)
            return ""
        text = self._python(block.code) if block.language == "python" else self._console(block.code)
        return text.replace(f"{self._folder}/", "").replace(f"{ROOT}/", "")

    def _console(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        return done.stdout

    def _python(self, source: str) -> str:
        if self._interpreter is None:
            self._interpreter = subprocess.Popen(
                [sys.executable, "-c", INTERPRETER],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._interpreter.stdin is not None
        assert self._interpreter.stdout is not None
        print(json.dumps(source), file=self._interpreter.stdin, flush=True)
        reply = self._interpreter.stdout.readline()
        if not reply:
            raise RuntimeError(f"the page's interpreter ended with status {self._interpreter.wait()}")
        return json.loads(reply)


def environment() -> dict[str, str]:
    """The variables under which a page runs: this Python's commands, two threads on a CPU, 80 columns, no colours.

    A sum by several threads has views of its parts and another order, so its operators and its rounding are not those
    of one thread.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    ours = {"PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    ours |= {"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}
    packages = [str(ROOT / "shared" / "src"), *map(str, ROOT.glob("framework-internals/*/src"))]
    return {**os.environ, **ours, "PYTHONPATH": os.pathsep.join(packages), "REPOSITORY": str(ROOT)}


def agrees(shown: str, printed: str) -> bool:
    """Tell whether a run printed what the page shows."""
    lines = [
        r"(?:.*\n)*?" if line == "…" else "[^\n]*?".join(map(re.escape, line.split("…"))) + r"\n"
        for line in settled(shown).splitlines()
    ]
    return re.fullmatch("".join(lines), settled(printed)) is not None


def settled(output: str) -> str:
    """The output with a name in place of each thing that may differ, and a line break at its end."""
    for pattern, name in VARIES:
        output = pattern.sub(name, output)
    return f"{output.rstrip()}\n" if output.strip() else ""


def differences(path: Path, folder: Path) -> Iterator[str]:
    """Run a page in an empty folder, and yield where what it shows is not what was printed."""
    with Run(folder) as run:
        for block in blocks(path.read_text(encoding="utf-8")):
            printed = run.printed(block)
            if not agrees(block.shown or "", printed):
                lines = difflib.unified_diff(
                    settled(block.shown or "").splitlines(), settled(printed).splitlines(), "page", "run", lineterm=""
                )
                yield "\n".join([f"{path.relative_to(ROOT)}:{block.line}: `{block.code.strip()}`", *lines])


def rewritten(page: str, folder: Path) -> str:
    """The page with what its blocks print; an output that still agrees, and one with a ``…``, stays as it is."""
    outputs = []
    with Run(folder) as run:
        for block in blocks(page):
            printed = run.printed(block)
            if block.shown is not None and "…" not in block.shown and not agrees(block.shown, printed):
                outputs.append((block.span, f"{printed.rstrip()}\n"))
    for (begin, end), text in reversed(outputs):
        page = page[:begin] + text + page[end:]
    return page


def for_jupytext(page: str) -> str:
    """The page as jupytext reads a notebook: commands are bash cells, and outputs are left to the notebook."""
    metadata = "jupyter:\n  kernelspec: {name: python3, display_name: Python 3, language: python}"

    def cell(fence: re.Match[str]) -> str:
        language, *words = fence["words"].split()
        if "no-run" in words:
            return fence[0].replace(f"```{fence['words']}", f"```{language} .noeval", 1)
        if file := Block(0, language, tuple(words), "").file:
            return f"```python\n%%writefile {file}\n{fence['body']}```"
        if language != "console":
            return fence[0]
        commands = re.findall(r"^\$ ((?:.*\\\n)*.*)\n", fence["body"], re.MULTILINE)
        return "```bash\n" + "\n".join(commands) + "\n```"

    outputs = [match.span() for block in FENCE.finditer(page) if (match := _output_below(page, block))]
    for begin, end in reversed(outputs):
        page = page[:begin] + page[end:]
    text = re.sub(r"<details><summary>(.*?)</summary>|</details>", r"\1", FENCE.sub(cell, page))
    return f"---\n{metadata}\n---\n\n{text}"


def pages() -> list[Path]:
    """The pages that are run: the chapters, then the READMEs of custom-ops' kernels."""
    learn = ROOT / "docs" / "learn"
    order = re.findall(r"\]\(learn/([\w-]+\.md)\)", learn.with_suffix(".md").read_text(encoding="utf-8"))
    kernels = sorted((ROOT / "framework-internals" / "custom-ops" / "csrc").glob("**/README.md"))
    return [*(learn / name for name in dict.fromkeys(order)), *kernels]


app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)
Pages = Annotated[list[Path] | None, typer.Argument(help="Pages; all by default.", exists=True, dir_okay=False)]


@app.command()
def check(chosen: Pages = None) -> None:
    """Run every block, and say where a page and its run differ."""
    faults = []
    for path in [page.resolve() for page in chosen or pages()]:
        with tempfile.TemporaryDirectory() as folder:
            faults += list(differences(path, Path(folder)))
    print("\n\n".join(faults) or "every page shows what its blocks print")
    raise typer.Exit(bool(faults))


@app.command()
def write(chosen: Pages = None) -> None:
    """Put what the blocks print into their pages."""
    for path in [page.resolve() for page in chosen or pages()]:
        with tempfile.TemporaryDirectory() as folder:
            write_text_atomically(path, rewritten(path.read_text(encoding="utf-8"), Path(folder)))


@app.command()
def notebooks() -> None:
    """Write each chapter as a notebook beside it; git ignores them."""
    try:
        import jupytext
    except ModuleNotFoundError:
        raise UserError("jupytext is not installed: make notebooks installs it") from None
    for path in (page for page in pages() if page.parent.name == "learn"):
        book = jupytext.reads(for_jupytext(path.read_text(encoding="utf-8")), fmt="md")
        jupytext.write(book, path.with_suffix(".ipynb"))
        print(path.with_suffix(".ipynb").relative_to(ROOT))


if __name__ == "__main__":
    with one_line_errors("chapters"):
        app()
