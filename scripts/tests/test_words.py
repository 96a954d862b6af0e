"""The words that the glossary retired appear nowhere but where they have to."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RETIRED = re.compile(
    r"\b(mend(s|ed|ing)?|nurser(y|ies)|dear(er|est)|given up|draw_up|to be had|(another|other) bas(is|es)"
    r"|not to be told|walked|faithful step|stood still)\b",
    re.IGNORECASE,
)
# The two lists of old words, and what reads documents that were written with them.
EXEMPT = re.compile(r"CHANGELOG\.md|docs/glossary\.md|.*/golden/.*|.*/test_words\.py")
TEXT = {".py", ".md", ".j2", ".toml", ".yml", ".sh", ".cpp", ".cu", ".cuh", ".h", ".c", ".html"}


def texts() -> list[str]:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("no git checkout")
    return [path for path in tracked.stdout.splitlines() if Path(path).suffix in TEXT and not EXEMPT.fullmatch(path)]


@pytest.mark.committed
def test_no_retired_word_is_used():
    found = [
        f"{path}:{number}: {match[0]}"
        for path in texts()
        if (ROOT / path).exists()
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
        for match in RETIRED.finditer(line)
    ]
    assert found == []


def test_a_retired_word_would_be_found():
    assert RETIRED.search("what a change mended")
    assert not RETIRED.search("recommended, amended, dear reader")
