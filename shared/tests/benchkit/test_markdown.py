"""Markdown out of hostile values, read by a CommonMark parser of its own."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from benchkit.markdown import block, code, inert
from benchkit.report import markdown_table

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "`<script>`<b>",
    "a ` b",
    "``",
    "\\`<script>`",
    "a|b\\|c\\\\|d",
    "line\n\n<script>\n```\n<i>",
    "~~~\n```",
    "[here](javascript:alert(1))",
    "[here](<javascript:alert(1)>)",
    "[here]( java\nscript:x)",
    "[here](&#106;avascript:alert(1))",
    "[x]: javascript:alert(1)\n\n[x]",
    "<javascript:alert(1)>",
    "<!-- Generated --><details open ontoggle=alert(1)>",
    "<details>\n`<script>`",
    "<?php x ?>",
    "<![CDATA[ x ]]>",
    "$(touch owned) `touch owned` %s {{ 7 * 7 }} {% raw %}",
    "\r<b>\r\n",
    "",
]
PLAIN = re.compile(r"(</?(details|summary)>|<br>|<!-- Generated [^<>]*-->|\s)*")
READER = MarkdownIt("commonmark", {"html": True}).enable("table")
READER.validateLink = lambda url: True  # of its own it would drop what we look for


def tokens(text: str):
    found = READER.parse(text)
    return [*found, *(child for token in found for child in token.children or [])]


def active(text: str) -> list[str]:
    """What a browser would act on."""
    found = []
    for token in tokens(text):
        if token.type in ("html_block", "html_inline"):
            # In a block of HTML, text stands between the tags: none of it may be a tag.
            rest = re.sub(r"</?(details|summary)>|<br>|<!-- Generated [^<>]*-->", "", token.content)
            found += re.findall(r"<[A-Za-z/!?][^>]*", rest)
        link = str(token.attrGet("href") or token.attrGet("src") or "")
        if re.match(r"\s*[\w+.-]+:", link) and not re.match(r"https?://", link):
            found.append(link)
    return found


PAGES = {
    "prose": lambda text: f"# A page\n\nSee {text} and `this`.\n",
    "code by hand": lambda text: f"See `{text}` here, and `<b>` there.\n",
    "item": lambda text: f"- Not in this report: **{text}** ({text}).\n",
    "table": lambda text: markdown_table(["a", "b"], [[text, f"`{text}`"], [code(text), text]]) + "\n",
    "block": lambda text: f"Before.\n\n{block(text, 'diff')}\n\nAfter {text}\n",
    "block by hand": lambda text: f"Before.\n\n```\n{text}\n```\n\nAfter {text}\n",
    "folded": lambda text: f"<details><summary>{text}</summary>\n\n{text}\n\n</details>\n",
}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("text", HOSTILE)
def test_no_value_brings_anything_active_onto_a_page(page, text):
    assert active(inert(PAGES[page](text))) == []


PIECES = (
    *("<b>", "<script>", "<details>", "<br>", "<!--", "-->", "`", "``", "```", "~~~", "\\", "|", "|-|", "&", "!"),
    *("](javascript:x)", "[a", "- ", "> ", "    ", " ", "a", "\n", "\n\n"),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.sampled_from(sorted(PAGES)))
def test_no_text_at_all_does(parts, page):
    text = inert(PAGES[page]("".join(parts)))
    assert active(text) == []
    assert inert(text) == text


@pytest.mark.parametrize("text", HOSTILE)
def test_code_shows_the_text_as_it_is(text):
    shown = re.sub(r"\s", " ", text)
    (paragraph,) = [token for token in READER.parse(f"x {code(text)} y") if token.type == "inline"]
    if shown.strip():
        assert [child.content for child in paragraph.children if child.type == "code_inline"] == [shown]
    fences = [token for token in READER.parse(block(text, "diff")) if token.type == "fence"]
    assert [(fence.info, fence.content) for fence in fences] == [("diff", re.sub("\r\n?", "\n", text) + "\n")]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_cell_stays_in_its_table_and_its_column(text):
    rows = READER.parse(markdown_table(["a", "b"], [[text, 1], [2, code(text)]]))
    assert [token.type for token in rows if token.type in ("tr_open", "td_open", "paragraph_open")] == [
        "tr_open",
        *["tr_open", "td_open", "td_open"] * 2,
    ]


def test_what_pages_hold_on_purpose_is_left():
    page = (
        "<!-- Generated from results.json; edits are lost. -->\n\n<details><summary>All</summary>\n\n"
        "| a |\n|---|\n| `std::vector<int>`<br>x < y, `a \\| b` |\n\n```cpp\n#include <vector>\n```\n\n</details>\n"
        "[one](reports/cpu/report.md#times) ![two](figures/a.svg) [three](https://example.org/?a=b&c=d)\n"
    )
    assert inert(page) == page
