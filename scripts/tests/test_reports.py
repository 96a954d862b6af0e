"""Every committed report answers in one screen: a short finding, few unfolded lines, each caption once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPORTS = sorted(
    path
    for path in (ROOT / "framework-internals").glob("**/report.md")
    if not path.parent.name.endswith("-quick") and "build" not in path.parts
)


def unfolded(text: str) -> str:
    """What a reader sees before he opens anything; a closed part counts with its summary."""
    return re.sub(r"(<details><summary>.*?</summary>).*?</details>", r"\1", text, flags=re.DOTALL)


def finding(text: str) -> str:
    return re.search(r"^\*\*(.+)\*\*$", text, re.MULTILINE)[1]


@pytest.fixture(params=REPORTS, ids=lambda path: str(path.parent.relative_to(ROOT / "framework-internals")))
def report(request) -> str:
    return request.param.read_text()


def test_at_most_250_lines_are_unfolded(report):
    assert len(unfolded(report).splitlines()) <= 250


def test_a_finding_has_at_most_two_sentences_and_60_words(report):
    text = finding(report)
    assert len(text.split()) <= 60, text
    assert len(re.split(r"[.!?] (?=[A-Z`])", text)) <= 2, text


def test_the_first_screen_holds_a_table_and_a_figure(report):
    first = unfolded(report).splitlines()[:40]
    assert any(line.startswith("|---") for line in first)
    if "](figures/" in report:  # the tested versions have none
        assert any(re.match(r"!\[.+\]\(figures/", line) for line in first)


def test_no_caption_is_said_twice(report):
    captions = re.findall(r"^\*(?!\*)(.+)\*$", report, re.MULTILINE)
    alternatives = re.findall(r"^!\[(.*)\]\(figures/", report, re.MULTILINE)
    said = captions + alternatives
    assert len(set(said)) == len(said), sorted(each for each in set(said) if said.count(each) > 1)
    assert all(alternatives)


def test_folds_are_balanced(report):
    assert report.count("<details>") == report.count("</details>") == report.count("<summary>")
