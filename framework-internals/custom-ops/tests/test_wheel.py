"""The wheel, the library alone, and the script that tests it under other versions; without nvcc, for the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import custom_ops
import native_build
from custom_ops.builds import operator_library
from custom_ops.cli import app

ROOT = Path(__file__).resolve().parents[1]
needs_cxx = pytest.mark.skipif(native_build.missing_cxx() is not None, reason=str(native_build.missing_cxx()))


@pytest.mark.slow
@needs_cxx
def test_a_wheel_for_any_python_carries_the_library(tmp_path: Path) -> None:
    command = [
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "--wheel-dir",
        str(tmp_path),
    ]
    answer = subprocess.run(
        [sys.executable, "-m", *command, str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_HOME": str(tmp_path)},  # where no nvcc is
    )
    assert answer.returncode == 0, answer.stderr
    (wheel,) = tmp_path.glob("custom_ops-*-cp311-abi3-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract(f"custom_ops/{operator_library.FILE_NAME}", tmp_path))
        assert {"custom_ops/templates/new/setup.py.j2", "custom_ops/operators/schemas.inc"} <= set(archive.namelist())
    record = native_build.read_record(library)
    assert (record.torch_at_least, record.torch_at_most) == operator_library.TORCH_VERSIONS
    assert record.cuda is None


@pytest.mark.slow
@needs_cxx
def test_the_library_alone_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["build", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert native_build.read_record(tmp_path / operator_library.FILE_NAME).name == "custom_ops"
    assert f"CUSTOM_OPS_LIBRARY={tmp_path / operator_library.FILE_NAME}" in result.output.replace("\n", "")


@pytest.mark.slow
def test_the_script_for_other_versions_tries_an_interpreter(tmp_path: Path) -> None:
    library = custom_ops.load().file
    script = str(ROOT / "scripts" / "versions.py")
    answer = subprocess.run(
        [sys.executable, script, str(library), "--interpreter", sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert ": works, sha256" in answer.stdout
