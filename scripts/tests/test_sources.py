"""What holds for every source file of the repository, read as syntax trees.

Ruff's bandit rules (``S``) say the rest: shells, pickles, yaml, predictable temporary names, templates without escapes.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOUSES = ("shared", "scripts", "examples", "framework-internals")
SOURCES = sorted(
    path
    for house in HOUSES
    for path in (ROOT / house).rglob("*.py")
    if not {"tests", "build", "golden", "reports"} & set(path.relative_to(ROOT).parts)
)
TREES = {path: ast.parse(path.read_bytes()) for path in SOURCES}

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


def calls() -> Iterator[tuple[Path, ast.Call, str]]:
    for path, tree in TREES.items():
        if "catalogue" in path.parts:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield path, node, ast.unparse(node.func)


def keyword(call: ast.Call, name: str) -> object:
    found = [word.value for word in call.keywords if word.arg == name]
    return found[0].value if found and isinstance(found[0], ast.Constant) else None


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def test_there_is_something_to_read():
    assert len(SOURCES) > 150
    assert len(list(calls())) > 5000


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
        for path, tree in TREES.items()
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
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_LINES
        and not is_kernel(node)
    ]
    assert found == []


def public(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Public functions and classes of a module, and public methods of public classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                        yield f"{node.name}.{inner.name}", inner


PACKAGES = [path for path in SOURCES if "src" in path.parts and "catalogue" not in path.parts]


def test_every_public_name_says_what_it_is():
    found = [
        f"{place(path, node)}: {name}"
        for path in PACKAGES
        for name, node in public(TREES[path])
        if not ast.get_docstring(node)
        and not any(re.search("overload|setter", ast.unparse(one)) for one in node.decorator_list)
    ]
    assert found == []
    assert [str(path.relative_to(ROOT)) for path in PACKAGES if not ast.get_docstring(TREES[path])] == []


def test_no_file_that_git_keeps_is_open_to_others_to_write():
    done = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    assert [path for path in files if path.exists() and path.stat().st_mode & 0o002] == []
