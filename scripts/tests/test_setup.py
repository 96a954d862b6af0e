"""Set-up: what it says when it cannot go on, and that a second call costs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def setup(checkout: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "scripts" / "setup.sh"],
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


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout whose environment is this Python, with a pip that notes what it is asked for."""
    (lens, *_) = sorted(ROOT.glob("framework-internals/*/pyproject.toml"))
    for path in (ROOT / "scripts" / "setup.sh", ROOT / "constraints.txt", ROOT / "shared" / "pyproject.toml", lens):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$2" = pip ] && echo "$@" >>asked.txt || exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return tmp_path


def test_a_second_call_installs_nothing_until_a_pin_changes(checkout):
    def asked() -> int:
        done = setup(checkout, SETUP="1", PYTHON=sys.executable)
        assert done.returncode == 0, done.stderr
        return len((checkout / "asked.txt").read_text().splitlines())

    first = asked()
    assert first > 1
    assert asked() == first
    with (checkout / "constraints.txt").open("a") as pins:
        pins.write("another==1.0\n")
    assert asked() == 2 * first


def test_a_driver_that_is_too_old_leaves_the_cpu_with_one_line(checkout):
    program = checkout / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        '[ "$1" = -L ] && echo "GPU 0: Tesla T4 (UUID: GPU-0)"'
        ' || echo "| NVIDIA-SMI 470.82   Driver Version: 470.82   CUDA Version: 11.4     |"\n'
    )
    program.chmod(0o755)
    path = f"{checkout}{os.pathsep}{os.environ['PATH']}"
    done = setup(checkout, SETUP="1", PYTHON=sys.executable, PATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().splitlines()[0] == (
        "setup: the NVIDIA driver supports CUDA 11, and torch 2.13.0 needs 13: the CPU build is used "
        "(remedy: update the driver)"
    )
    assert "torch==2.13.0+cpu" in (checkout / "asked.txt").read_text()


@pytest.mark.parametrize("name", ["setup", "site"])
def test_a_script_works_through_a_link_and_names_a_python_that_is_none(tmp_path, name):
    link = tmp_path / name
    link.symlink_to(ROOT / "scripts" / f"{name}.sh")
    environment = {**os.environ, "SETUP": "0", "PYTHON": "no-such-python"}
    done = subprocess.run([link], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("python.sh: PYTHON=no-such-python is no program; name a Python")
    assert done.stderr.count("\n") == 1


def test_python_sh_puts_every_source_folder_on_the_path():
    packages = ("benchkit", "torch_baseline", "native_build", "dispatcher_trace", "custom_ops")
    program = (
        f"import importlib.util; print(*(importlib.util.find_spec(name).origin for name in {packages}), sep='\\n')"
    )
    done = subprocess.run(
        [ROOT / "scripts" / "python.sh", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "SETUP": "0", "PYTHON": sys.executable, "PYTHONPATH": ""},
    )
    places = done.stdout.splitlines()
    assert len(places) == len(packages)
    assert all(Path(place).is_relative_to(ROOT) for place in places)
