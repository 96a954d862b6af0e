"""Compiled ahead of time into a wheel, by ``csrc/vector_add/setup.py`` or ``csrc/scale/setup.py``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import cast

import ninja
import torch

from custom_ops.roads.module import NAME, SOURCES, VectorAddModule
from native_build import BuildError, missing_cxx
from native_build.extension import first_complaint

_INSTALL = "custom-ops build, then pip install --no-deps --force-reinstall the wheel that it names"


def missing() -> str | None:
    """Say that the wheel is not installed, with the remedy; None if it is."""
    return None if importlib.util.find_spec(NAME) else f"no module {NAME} is installed ({_INSTALL})"


def load() -> VectorAddModule:
    """Import the installed module.

    Raises:
        BuildError: If it is not installed, does not load, or was compiled against another torch: it may then load
            and crash later.
    """
    if (reason := missing()) is not None:
        raise BuildError(reason)
    try:
        module = cast(VectorAddModule, importlib.import_module(NAME))
    except ImportError as error:
        raise BuildError(
            f"the installed {NAME} does not load with torch {torch.__version__}: {error} (build it again: {_INSTALL})"
        ) from error
    running = torch.__version__.split("+")[0]
    if module.torch_version != running:
        raise BuildError(
            f"the installed {NAME} was compiled against torch {module.torch_version}, but torch {running} is running: "
            f"its C++ interface changes between versions (build it again: {_INSTALL})"
        )
    return module


def build_wheel(out: Path, example: str = SOURCES.name) -> Path:
    """Build the wheel of an example with this machine's C++ compiler, and with nvcc if there is one.

    Returns:
        The path of the wheel.

    Raises:
        BuildError: If a compiler is missing or fails.
    """
    if (reason := missing_cxx()) is not None:
        raise BuildError(f"cannot build the wheel of {example}: {reason}")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # Build from a copy, because setuptools leaves build/ and *.egg-info beside setup.py.
        source = shutil.copytree(SOURCES.parent, Path(folder) / "csrc") / example
        wheels = Path(folder) / "wheels"
        command = [
            sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
            "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(wheels), str(source),
        ]  # fmt: skip
        path = f"{ninja.BIN_DIR}{os.pathsep}{os.environ.get('PATH', '')}"  # the venv may not be activated
        answer = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path})
        built = list(wheels.glob("*.whl"))
        if answer.returncode != 0 or len(built) != 1:
            log = out / "build.log"
            log.write_text(f"{answer.stderr}{answer.stdout}\nstatus {answer.returncode}\n", encoding="utf-8")
            raise BuildError(
                f"cannot build the wheel of {example}: {first_complaint(log.read_text())} (whole log: {log})"
            )
        return Path(shutil.copy2(built[0], out))
