"""``custom-ops new``: the package that it writes builds, and its own tests pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import ninja
import pytest
from typer.testing import CliRunner

import native_build
from custom_ops.cli import app

runner = CliRunner()


@pytest.mark.slow
@pytest.mark.skipif(native_build.missing_cxx() is not None, reason=str(native_build.missing_cxx()))
def test_a_new_operator_builds_and_passes_its_tests(tmp_path: Path) -> None:
    # A name that the C headers have too.
    result = runner.invoke(app, ["new", "exp", "--folder", str(tmp_path)])
    assert result.exit_code == 0, result.output
    root = tmp_path / "exp"
    path = f"{ninja.BIN_DIR}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join([str(root / "src"), *sys.path])}
    for command in (
        ["setup.py", "--quiet", "build_ext", "--inplace"],
        ["-m", "pytest", "-q", "-p", "no:cacheprovider"],
    ):
        answer = subprocess.run(
            [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True, check=False
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
    assert re.search(r"^\d+ passed", answer.stdout, re.MULTILINE)
    assert (root / "src" / "exp" / "_C.abi3.so").is_file()


@pytest.mark.parametrize("name", ["Square", "1st", "_norm", "my-norm", ""])
def test_names_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    result = runner.invoke(app, ["new", name, "--folder", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith("custom-ops: expected a name of lower-case letters")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("class", "it is a reserved word of Python (choose another, for example my_class)"),
        ("double", "it is a reserved word of C++ (choose another, for example my_double)"),
        ("std", "it is a reserved word of C++"),
        ("norm_", "a project's name must not end with an underscore"),
        ("layer__norm", "C++ reserves names with two in a row (choose another, for example my_layer_norm)"),
        ("tuple", "it is a builtin name of Python (choose another, for example my_tuple)"),
        ("json", "it is a module of Python's standard library"),
        ("setup", "or of the folder that would be written"),
        ("torch", "it is a package that is installed here, "),
        ("custom_ops", "it is a package that is installed here, "),
        ("aten", "torch.ops.aten exists already"),
        ("load_library", "torch.ops.load_library exists already"),
        ("name", "torch.ops.name exists already"),  # an attribute of every namespace
    ],
)
def test_names_that_others_have_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    result = runner.invoke(app, ["new", name, "--folder", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"custom-ops: expected an unused name, got {name!r}: ")
    assert reason in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_package_takes_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exp").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    result = runner.invoke(app, ["new", "exp", "--folder", str(tmp_path / "elsewhere")])
    assert result.exit_code == 0, result.output


def test_a_project_that_is_installed_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Image_Tools-1.0.dist-info").mkdir()  # its package has another name, as that of Pillow
    monkeypatch.syspath_prepend(str(tmp_path))
    result = runner.invoke(app, ["new", "image_tools", "--folder", str(tmp_path)])
    assert result.exit_code == 2
    assert "it is a project that is installed here, which the new one would replace" in result.stderr


def test_a_missing_parent_is_named_and_not_made(tmp_path: Path) -> None:
    result = runner.invoke(app, ["new", "square", "--folder", str(tmp_path / "absent")])
    assert result.exit_code == 2
    assert "--folder: expected an existing folder, got" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "square").mkdir()
    result = runner.invoke(app, ["new", "square", "--folder", str(tmp_path)])
    assert result.exit_code == 2
    assert "exists already" in result.stderr
