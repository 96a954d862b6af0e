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


# An argument that a loader of data must be given, so that it runs no code that the data holds.
SAFE_LOADING = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
# Only child processes read pickles, from the private socket to their owner. Programs that the catalogue shows are data
# here.
OWN_PICKLES = {"processes/server.py"}
NEVER = re.compile(
    r"(os\.(system|popen|spawn\w+)|subprocess\.(getoutput|getstatusoutput)|tempfile\.mktemp"
    r"|(c?[pP]ickle|dill|cloudpickle|marshal|shelve|joblib)\.(load|loads|open|Unpickler)|yaml\.(load|unsafe_load|full_load))"
)
MOST_LINES = 80


@cache
def calls() -> list[tuple[Path, ast.Call, str]]:
    """Every call, with the name of what it calls; the programs that the catalogue shows are left out."""
    return [
        (path, node, dotted(node.func))
        for path, tree in trees().items()
        if "catalogue" not in path.parts
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


def dotted(called: ast.expr) -> str:
    """``subprocess.run`` for what is called by such a name; what else is called has none."""
    if isinstance(called, ast.Attribute):
        return f"{dotted(called.value)}.{called.attr}"
    return called.id if isinstance(called, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> object:
    found = [word.value for word in call.keywords if word.arg == name]
    return found[0].value if found and isinstance(found[0], ast.Constant) else None


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def test_there_is_something_to_read():
    assert len(trees()) > 150
    assert len(calls()) > 5000


def test_no_data_is_loaded_that_could_bring_code():
    found = [
        f"{place(path, call)}: {name} needs {wanted}={value}"
        for path, call, name in calls()
        if name in SAFE_LOADING
        for wanted, value in [SAFE_LOADING[name]]
        if keyword(call, wanted) is not value
    ]
    assert found == []


def test_no_shell_no_pickle_from_elsewhere_and_no_predictable_temporary_name():
    found = [
        f"{place(path, call)}: {name}"
        for path, call, name in calls()
        if (NEVER.fullmatch(name) or keyword(call, "shell") is not None)
        and "/".join(path.parts[-2:]) not in OWN_PICKLES
    ]
    found += [
        f"{place(path, node)}: {node.value}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.match(r"/(tmp|var/tmp|dev/shm)/", node.value)
    ]
    assert found == []


def test_a_subprocess_takes_a_list_and_never_one_string():
    started = [
        (path, call)
        for path, call, name in calls()
        if re.fullmatch(r"subprocess\.(run|Popen|check_output|check_call|call)", name)
    ]
    assert len(started) > 10
    assert [place(path, call) for path, call in started if isinstance(call.args[0], ast.JoinedStr | ast.Constant)] == []


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
        f"{place(path, node)}: {node.name} has {lines} lines, at most {MOST_LINES}"
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
