"""Running the commands of a page as a reader would."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RunCommand = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def run_command(tmp_path: Path) -> RunCommand:
    """Runs a command of a page in an empty folder: this Python's, on a CPU, with the packages of this checkout."""

    def run(command: str) -> subprocess.CompletedProcess[str]:
        name, *arguments = shlex.split(command)
        if name == "bash":
            program = [name, *arguments]
        elif name == "python":
            program = [sys.executable, *arguments]
        else:
            program = [sys.executable, "-m", name.replace("-", "_"), *arguments]
        environment = {
            "PYTHON": sys.executable,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "CUDA_VISIBLE_DEVICES": "",
        }
        return subprocess.run(
            program, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, **environment}
        )

    return run
