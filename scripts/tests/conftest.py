"""Running the commands of a page as a reader would."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import warm_python

RunCommand = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def run_command(tmp_path: Path) -> RunCommand:
    """Runs a command of a page in an empty folder: this Python's, on a CPU, with the packages of this checkout."""

    def run(command: str) -> subprocess.CompletedProcess[str]:
        name, *arguments = shlex.split(command)
        environment = {
            "PYTHON": sys.executable,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "CUDA_VISIBLE_DEVICES": "",
        }
        variables = {**os.environ, **environment}
        if name == "bash":
            program = [name, *arguments]
            return subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path, env=variables)
        program = arguments if name == "python" else ["-m", name.replace("-", "_"), *arguments]
        return warm_python.run(program, env=variables, cwd=tmp_path)

    return run
