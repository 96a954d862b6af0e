"""Find compilers, and say what to do if one is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchkit.processes.resources import available_memory, processors

# This linker flag comes before the compiler's own libraries. A toolchain that has libstdc++ only as a static library
# would put a second copy into the extension, which crashes when torch formats a number in an error message.
SHARED_STANDARD_LIBRARY = "-l:libstdc++.so.6"

INCLUDE_DIR = Path(__file__).with_name("include")
"""Headers for kernels on a CPU (``#include <native_build/simd.h>``); on the include path of this package's builds."""


def cxx_compiler() -> str:
    """The C++ compiler that torch's extension builder calls: ``CXX``, or ``c++``."""
    return os.environ.get("CXX", "c++")


def find_nvcc() -> Path | None:
    """The path of nvcc: in ``CUDA_HOME``, else on ``PATH``, in ``/usr/local/cuda`` or in the package nvidia-cuda-nvcc.

    Returns:
        None if there is none, or if ``CUDA_HOME`` names a folder without it.
    """
    if home := os.environ.get("CUDA_HOME"):
        candidate = Path(home) / "bin" / "nvcc"
        return candidate if candidate.exists() else None
    if on_path := shutil.which("nvcc"):
        return Path(on_path)
    nvidia = importlib.util.find_spec("nvidia")  # the namespace of NVIDIA's packages: nvidia/cu13/bin/nvcc
    packages = [Path(folder) for folder in (nvidia.submodule_search_locations if nvidia else None) or ()]
    installed = [path for folder in packages for path in sorted(folder.glob("*/bin/nvcc"), reverse=True)]
    return next((path for path in (Path("/usr/local/cuda/bin/nvcc"), *installed) if path.exists()), None)


def nvcc_version(nvcc: Path) -> str:
    """What nvcc says of its version."""
    return subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout


_COMPILER_BYTES = 1 << 30
"""Memory of one compiler at work, at most, rounded up: attention's kernels for a CPU take 0.7 GiB with g++ 12."""


def compilers_at_once() -> int:
    """How many compilers to run at a time: as many as there are processors for this process, and memory for them.

    ``MAX_JOBS`` is the user's own number, which torch's builder obeys too.
    """
    if (asked := os.environ.get("MAX_JOBS", "")).isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, min(processors(), available_memory() // _COMPILER_BYTES))


def missing_cxx() -> str | None:
    """Why C++ operators cannot be built here, with the remedy; None if they can."""
    system: str = sys.platform  # platform.system() cannot be traced by torch.compile
    if system != "linux":
        return f"operators are compiled on Linux alone, and this is {system} (use a Linux machine, a container or WSL)"
    return _missing_compiler()


def _missing_compiler() -> str | None:
    if shutil.which(cxx_compiler()) is None:
        return f"no C++ compiler {cxx_compiler()!r} on PATH (install one: apt-get install g++, or set CXX)"
    return None


def missing_inductor(device_type: str) -> str | None:
    """Why Inductor cannot compile here, with the remedy; None if it can.

    Args:
        device_type: ``"cpu"``, which needs a C++ compiler, or ``"cuda"``, which uses Triton.
    """
    reason = _missing_compiler() if device_type == "cpu" else None
    return None if reason is None else f"Inductor compiles for a CPU with a C++ compiler: {reason}"


def missing_gpu() -> str | None:
    """Why nothing can run on a CUDA GPU here, with the remedy; None if it can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build (install a CUDA build of torch)"
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU (check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES)"
    return None


def missing_cuda() -> str | None:
    """Why CUDA C++ operators cannot be built and run here, with the remedy; None if they can."""
    import torch

    if (reason := missing_cxx() or missing_gpu()) is not None:
        return reason
    if find_nvcc() is None:
        return f"no nvcc (install the CUDA {torch.version.cuda} toolkit, or set CUDA_HOME to where it is)"
    return None
