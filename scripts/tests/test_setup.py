"""Set-up: what it says when it cannot go on, and that a second call costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def setup(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "setup.sh"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_a_python_that_cannot_serve_is_named_with_the_remedy(tmp_path):
    done = setup(PYTHON=str(tmp_path / "no-such-python"), SETUP="1")
    assert done.returncode == 1
    assert "no-such-python is not a Python 3.11-3.13 with the venv module; name another, or unset PYTHON" in done.stderr


def test_a_ready_environment_is_taken_as_it_is():
    assert setup(SETUP="0", PYTHON=sys.executable).returncode == 0


def test_a_ready_environment_that_lacks_packages_is_refused_with_their_names(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S: no site-packages
    bare.chmod(0o755)
    done = setup(SETUP="0", PYTHON=str(bare), PYTHONPATH="")
    assert done.returncode == 1
    assert "lacks torch, numpy, jinja2, matplotlib, rich, typer, filelock" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_missing_compiler_is_one_line_each_with_the_remedy_and_no_failure(tmp_path):
    done = setup(SETUP="0", PYTHON=sys.executable, CXX="no-such-compiler", CUDA_HOME=str(tmp_path))
    assert done.returncode == 0
    assert "no C++ compiler" in done.stderr
    assert "apt-get install g++" in done.stderr


@pytest.mark.skipif(not (ROOT / ".venv" / "setup.stamp").exists(), reason="no .venv: a ready environment is in use")
def test_a_second_call_returns_at_once():
    start = time.perf_counter()
    done = setup(SETUP="1", PYTHON="")
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 5.0


@pytest.mark.skipif(not (ROOT / ".venv" / "setup.stamp").exists(), reason="no .venv: a ready environment is in use")
def test_a_driver_that_is_too_old_leaves_the_cpu_with_one_line(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        '[ "$1" = -L ] && echo "GPU 0: Tesla T4 (UUID: GPU-0)"'
        ' || echo "| NVIDIA-SMI 470.82   Driver Version: 470.82   CUDA Version: 11.4     |"\n'
    )
    program.chmod(0o755)
    done = setup(SETUP="1", PYTHON="", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().splitlines()[0] == (
        "setup: the NVIDIA driver supports CUDA 11, and torch 2.13.0 needs 13: the CPU build is used "
        "(remedy: update the driver)"
    )


def test_python_sh_puts_every_source_folder_on_the_path():
    program = "import benchkit, torch_baseline, native_build, dispatcher_trace, custom_ops; print(custom_ops.__file__)"
    done = subprocess.run(
        [ROOT / "scripts" / "python.sh", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "SETUP": "0", "PYTHON": sys.executable, "PYTHONPATH": ""},
    )
    assert Path(done.stdout.strip()).is_relative_to(ROOT)
