"""The chapters of docs/learn and the READMEs of the kernels: what they show is what they print."""

from __future__ import annotations

import re
from pathlib import Path

import chapters
import pytest

import native_build

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path for path in chapters.pages()}
CHAPTERS = {name: path for name, path in PAGES.items() if name.startswith("docs/learn/")}
PAGE = """# Page

```python
print(sum(range(5)))
```

```text
10
```

```python file=greet.py
print("hello")
```

````console
$ python greet.py && \\
    echo 0x7f00aa12 took 3.1 ms
hello
0x7f00bbff took 12 µs
$ exit 3
````

```python no-run
print(torch.cuda.get_device_name())
```
"""


def test_a_page_is_read_as_blocks_in_their_order():
    python, file, console, ended = chapters.blocks(PAGE)
    assert (python.code, python.shown) == ("print(sum(range(5)))\n", "10\n")
    assert (file.file, file.shown) == ("greet.py", None)
    assert console.code == "python greet.py && \\\n    echo 0x7f00aa12 took 3.1 ms"
    assert console.shown == "hello\n0x7f00bbff took 12 µs\n"
    assert (ended.code, ended.shown) == ("exit 3", "")


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("a\n…\nz\n", "a\nb\nc\nz\n"),
        ("takes 3.1 ms, 2.0× (1.9–2.1)", "takes 12 µs, 1.5× (1.9–2.1)\n\n"),
        ("error 1.2e-07 in 0x7fe012ab of 2.13.0+cpu", "error 4e-08 in 0x000012cd of 2.12.1"),
        ("| dx | 1.2e-07 | 0.10 |", "| dx | 7e-08 | 0.096 |"),
        ("at RegisterCPU_0.cpp:12", "at RegisterCPU_0.cpp:99"),
        ("one … of three", "one out of three"),
        ("", ""),
    ],
)
def test_an_output_agrees_but_for_what_varies(shown, printed):
    assert chapters.agrees(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("16 hops", "17 hops"),
        ("| dx | 1.2e-07 | 0.10 |", "| dx | 1.2e-07 | 1.10 |"),
        ("a\n…\nz", "a\nb"),
        ("one … of three", "one of\nof three"),
        ("", "surprise"),
        ("surprise", ""),
        ("at RegisterCPU_0.cpp:12", "at RegisterCUDA_0.cpp:12"),
    ],
)
def test_an_output_does_not_agree_with_another(shown, printed):
    assert not chapters.agrees(shown, printed)


def test_a_wrong_output_is_named_and_written_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(chapters, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("10\n", "11\n"))
    (fault,) = chapters.differences(page, tmp_path)
    assert fault.startswith("page.md:4: `print(sum(range(5)))`")
    assert "-11\n+10" in fault
    assert chapters.rewritten(page.read_text(), tmp_path) == PAGE


def test_a_block_that_raises_is_a_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(chapters, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\n1 / 0\n```\n")
    (fault,) = chapters.differences(page, tmp_path)
    assert "ZeroDivisionError" in fault


def test_a_notebook_has_the_code_and_not_the_outputs():
    text = chapters.for_jupytext(PAGE)
    assert "```python\nprint(sum(range(5)))\n```" in text
    assert "%%writefile greet.py" in text
    assert "```bash\npython greet.py" in text
    assert "```python .noeval\nprint(torch.cuda" in text
    assert "\n10\n" not in text


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_has_its_parts(name):
    text = CHAPTERS[name].read_text()
    for part in ("**You will understand**", "**You need**", "**Time**", "## Takeaways", "## Exercises", "## Read on"):
        assert part in text, part
    exercises = text.partition("## Exercises")[2].partition("## Read on")[0]
    assert re.findall(r"^\*\*(\d)\.\*\*", exercises, re.MULTILINE) == ["1", "2", "3"]
    assert exercises.count("<summary>Solution</summary>") == 3
    figures = re.findall(r"^!\[.+\]\(([^)]+\.svg)\)\n\n\*.+\*$", text, re.MULTILINE)
    assert len(figures) >= 2
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in target]
    assert [target for target in targets if not (CHAPTERS[name].parent / target).exists()] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_command_shows_what_it_prints(name):
    silent = [block.code for block in chapters.blocks(PAGES[name].read_text()) if block.shown == ""]
    assert [code for code in silent if not re.match(r"cp |export ", code)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_what_its_blocks_print(name, tmp_path):
    if (reason := native_build.missing_cxx()) is not None:
        pytest.skip(reason)
    assert list(chapters.differences(PAGES[name], tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_runs_as_a_notebook(name, tmp_path, monkeypatch):
    jupytext, nbclient = pytest.importorskip("jupytext"), pytest.importorskip("nbclient")
    if (reason := native_build.missing_cxx()) is not None:
        pytest.skip(reason)
    for variable, value in chapters.environment().items():
        monkeypatch.setenv(variable, value)
    book = jupytext.reads(chapters.for_jupytext(CHAPTERS[name].read_text()), fmt="md")
    nbclient.NotebookClient(book, timeout=1500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any(cell.get("outputs") for cell in book.cells)
