"""Every command of examples/README.md as it stands, and what the page says that it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import native_build

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "examples" / "README.md").read_text()
COMMANDS = re.findall(r"\| `([^`]+)` \|$", PAGE, re.MULTILINE)
EXCERPTS = dict(re.findall(r"^## (\w+\.\w+): about \d+ s\n[^#]*?^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
# What each prints when it did what it is for.
SIGNS = {
    "trace_hugging_face.py": r"by key: CPU \d+, AutogradCPU \d+.*\n(.*\n)*copy: aten::copy_ under aten::addmm",
    "compile_hugging_face.py": r"modeling_wav2vec2\.py:\d+",
    "faster_compiled_step.py": "2 rows kept for this machine",
    "lowerings_in_hugging_face.py": "2 rows kept for this machine",
    "two_functions.py": r"Inductor",
    "fused_norms_in_llama.py": r"largest difference of a logit: \d\.\de-0[67]\na step with fused norms is ",
    "own_operator.sh": r"^\d+ passed",
}


# A figure with its unit: what differs from run to run and from machine to machine.
FIGURE = r"\d[\d,.]*(?:e-\d+)?(?: (?:ns|µs|ms|s|B|KiB|MiB)\b)?"


def as_printed(excerpt: str) -> re.Pattern[str]:
    """The excerpt with any figures in place of its own, anything for an … and any lines for a line of it."""

    def line_as_printed(line: str) -> str:
        if line == "…":
            return r"(?:.*\n)*?"
        parts = re.split(rf"({FIGURE}|…)", line)
        patterns = [re.escape(part) if part and not index % 2 else "" for index, part in enumerate(parts)]
        for index in range(1, len(parts), 2):
            patterns[index] = ".*" if parts[index] == "…" else FIGURE
        return rf"{''.join(patterns)}\n"

    return re.compile("^" + "".join(map(line_as_printed, excerpt.splitlines())), re.MULTILINE)


def example_of(command: str) -> str:
    return re.search(r"examples/(\w+\.\w+)", command)[1]


def test_every_example_is_in_the_table():
    files = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".sh")}
    assert files == {example_of(command) for command in COMMANDS} == SIGNS.keys()


def test_the_page_shows_what_every_example_prints_and_how_long_it_takes():
    assert EXCERPTS.keys() == SIGNS.keys()


def test_an_excerpt_is_held_against_its_words_and_not_its_figures():
    pattern = as_printed("runs 282 µs, 1,024 × f32[2]\n…\n12 passed in …\n")
    assert pattern.search("before\nruns 1.5 ms, 7 × f32[3]\nbetween\nand\n9 passed in 6.29s\n")
    assert not pattern.search("takes 1.5 ms, 7 × f32[3]\n9 passed in 6.29s\n")
    assert not pattern.search("runs long, 7 × f32[3]\n9 passed in 6.29s\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=example_of)
def test_an_example_does_what_its_line_says(command, run_command, tmp_path):
    pytest.importorskip("transformers")
    if (reason := native_build.missing_cxx()) is not None:
        pytest.skip(reason)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = run_command(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(SIGNS[example_of(command)], done.stdout, re.MULTILINE), done.stdout
    assert as_printed(EXCERPTS[example_of(command)]).search(done.stdout), done.stdout
