"""What holds for every source file of the repository, read as syntax trees.

Ruff says the rest: every public name has a docstring (``D``); shells, pickles, yaml, predictable temporary names and
templates without escapes (``S``).
"""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOUSES = ("shared", "scripts", "examples", "framework-internals")


@cache
def trees() -> dict[Path, ast.Module]:
    """Every source but those of tests, parsed."""
    sources = sorted(
        path
        for house in HOUSES
        for path in (ROOT / house).rglob("*.py")
        if not {"tests", "build", "golden", "reports"} & set(path.relative_to(ROOT).parts)
    )
    return {path: ast.parse(path.read_bytes()) for path in sources}


MOST_LINES = 80


def test_no_data_is_loaded_that_could_bring_code():
    """torch and NumPy refuse it by default."""
    assert len(trees()) > 150
    unsafe = re.compile("weights_only=False|allow_pickle=True")
    assert [path for path in trees() if unsafe.search(path.read_text(encoding="utf-8"))] == []


def test_shell_scripts_quote_what_they_were_given_and_evaluate_nothing():
    for script in [*ROOT.glob("scripts/*.sh"), *ROOT.glob("examples/*.sh")]:
        text = script.read_text()
        assert "set -euo pipefail" in text or "set -eu" in text, script
        assert not re.search(r"^\s*eval\b|\bmktemp -u\b|/tmp/", text, re.MULTILINE), script


def is_kernel(function: ast.FunctionDef) -> bool:
    return any(
        "jit" in ast.unparse(decorator) and "triton" in ast.unparse(decorator) for decorator in function.decorator_list
    )


def test_no_function_is_longer_than_a_screen():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {lines} lines, at most {MOST_LINES}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_LINES
        and not is_kernel(node)
    ]
    assert found == []


def test_no_file_that_git_keeps_is_open_to_others_to_write():
    done = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    assert [path for path in files if path.exists() and path.stat().st_mode & 0o002] == []
