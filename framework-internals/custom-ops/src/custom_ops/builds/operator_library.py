"""The library of all operators: its sources, how it is compiled, and where it is cached."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchkit.environment.processor import processor_field
from benchkit.results import write_bytes_atomically
from native_build import (
    ARCHITECTURES,
    TORCH_VERSIONS,
    BuildError,
    LibraryError,
    Unit,
    build_library,
    build_library_once,
    cached_library,
    find_nvcc,
    instruction_levels,
)

CSRC = Path(__file__).resolve().parents[3] / "csrc"
SCHEMAS_FOLDER = Path(__file__).resolve().parents[1] / "operators"
FILE_NAME = "_C.abi3.so"
LEVEL_VARIABLE = "CUSTOM_OPS_CPU"

EXAMPLES = (
    "vector_add",
    "scale",
    "bias_gelu",
    "conv_bn_relu",
    "cross_entropy",
    "adamw",
    "rotary",
    "mm",
    "flash_attention",
)


_FLAGS_OF_LEVELS = {
    "avx2": {"avx2", "fma", "bmi2"},
    "avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_bf16", "amx_tile"},
}
"""What each level needs beside those before it, as Linux names a processor's features (csrc/stable/cpu_levels.cpp)."""


def units(*, cuda: bool, anywhere: bool) -> list[Unit]:
    """The compilation units of the library, the slowest first.

    Args:
        cuda: Whether it has CUDA kernels.
        anywhere: Whether other machines load it. Otherwise instruction sets that this processor lacks are left out.
    """
    levels = attention_levels() if anywhere else _levels_here()
    headers = ("-isystem", sysconfig.get_paths()["include"])
    flags = ("-DCUSTOM_OPS_CUDA",) if cuda else ()
    folders = [CSRC / example for example in EXAMPLES]
    device = [path for folder in reversed(folders) for path in sorted(folder.rglob("*.cu"))]
    units = [Unit(path) for path in [*device, CSRC / "stable" / "runtime.cu"]] if cuda else []
    counted = (*flags, f"-DCUSTOM_OPS_LEVELS={len(levels)}")
    units += [Unit(path, counted) for path in sorted((CSRC / "stable").rglob("*.cpp")) if path.name != "jax.cpp"]
    for level, instructions in levels.items():
        units.append(Unit(CSRC / "flash_attention" / "cpu.cpp", _level_flags(level, instructions)))
    units.append(Unit(CSRC / "vector_add" / "cpu.cpp"))
    by_level = [folder for folder in folders if folder.name not in ("vector_add", "flash_attention")]
    for path in sorted(path for folder in by_level for path in folder.rglob("cpu.cpp")):
        for level, instructions in instruction_levels().items():
            if level in levels:
                units.append(Unit(path, _level_flags(level, instructions)))
    units.append(Unit(CSRC / "scale" / "module.cpp", headers))
    if (jax_headers := _jax_headers()) is not None:
        units.append(Unit(CSRC / "stable" / "jax.cpp", (*flags, "-isystem", str(jax_headers))))
    return units


def attention_levels() -> Mapping[str, tuple[str, ...]]:
    """Instruction sets that attention is compiled for: the common ones, and those for bfloat16 products."""
    levels = instruction_levels()
    if "avx512" not in levels:
        return levels
    bfloat16 = (*levels["avx512"], "-mavx512bf16")
    return {**levels, "avx512_bf16": bfloat16, "amx": (*bfloat16, "-mamx-tile", "-mamx-bf16")}


def _levels_here() -> Mapping[str, tuple[str, ...]]:
    """The levels up to the best one that this processor has; all where Linux does not say what it has."""
    features = set(processor_field("flags").split())
    best = itertools.takewhile(lambda level: _FLAGS_OF_LEVELS.get(level, set()) <= features, attention_levels())
    return {level: attention_levels()[level] for level in best} if features else attention_levels()


def _level_flags(level: str, instructions: tuple[str, ...]) -> tuple[str, ...]:
    # No code here reads the floating-point status flags; without this flag GCC does not vectorise comparisons.
    return (f"-DCUSTOM_OPS_LEVEL={level}", "-fno-trapping-math", *instructions)


def _jax_headers() -> Path | None:
    """The folder that ``jax.ffi.include_dir()`` returns, found without importing jax, which takes seconds."""
    spec = importlib.util.find_spec("jaxlib")
    folders = spec.submodule_search_locations if spec else None
    headers = Path(folders[0]) / "include" if folders else None
    return headers if headers and (headers / "xla" / "ffi" / "api" / "ffi.h").is_file() else None


def _arguments(architectures: tuple[str, ...]) -> Mapping[str, Any]:
    return {
        "torch_versions": TORCH_VERSIONS,
        "architectures": architectures,
        "cuda_cflags": ("-compress-mode=size",),
        "exports": ("PyInit__C", "add_one", "custom_ops_cpu_level", "custom_ops_jax_*"),
    }


def build(output: Path) -> Path:
    """Write the library for a wheel or for another machine; it is compiled unless the user's cache has it.

    The library has CUDA kernels for :data:`native_build.ARCHITECTURES` if there is nvcc, else none.

    Returns:
        ``output``.

    Raises:
        BuildError: If a tool is missing, a source does not compile, or the output cannot be written.
    """
    built = build_once(ARCHITECTURES if find_nvcc() else (), anywhere=True)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(output, built.read_bytes())
    except OSError as error:
        raise BuildError(f"cannot write {output}: {error.strerror}; name another folder") from error
    return output


def compile_anew(output: Path, architectures: tuple[str, ...]) -> Path:
    """Compile the library for this machine without the user's cache, to time it; no architectures are no CUDA kernels.

    Returns:
        ``output``.
    """
    build_library("custom_ops", units(cuda=bool(architectures), anywhere=False), output, **_arguments(architectures))
    return output


def build_once(architectures: tuple[str, ...], *, anywhere: bool = False) -> Path:
    """Return the library for this machine, or for others too, from the user's cache; compile it if it is missing."""
    every_unit = units(cuda=bool(architectures), anywhere=anywhere)
    return build_library_once("custom_ops", every_unit, include_dirs=_folders(), **_arguments(architectures))


def cpu_level(library: Path) -> str:
    """The instruction set whose kernels a library uses in this process: the best that this processor has.

    ``CUSTOM_OPS_CPU`` names a lower one, and ``ATEN_CPU_CAPABILITY`` limits it as it limits torch.

    Raises:
        LibraryError: If ``CUSTOM_OPS_CPU`` names one that is unknown, or that this processor lacks.
    """
    function = ctypes.CDLL(str(library)).custom_ops_cpu_level
    function.restype = ctypes.c_char_p
    level = str(function().decode())
    if level.startswith(LEVEL_VARIABLE):  # the library's own message, which a call without Python gets too
        raise LibraryError(level)
    return level


def keep(library: Path, architectures: tuple[str, ...]) -> None:
    """Copy a library that :func:`compile_anew` made into the user's cache, unless the cache has one."""
    path = _cache_path(architectures)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(shutil.copy2(library, path.with_suffix(f".{os.getpid()}.partial")))
        partial.replace(path)


def cached(architectures: tuple[str, ...]) -> Path | None:
    """Return the library for this machine if the user's cache has it, else None."""
    path = _cache_path(architectures)
    return path if path.is_file() else None


def _cache_path(architectures: tuple[str, ...]) -> Path:
    units_here = units(cuda=bool(architectures), anywhere=False)
    return cached_library("custom_ops", units_here, include_dirs=_folders(), **_arguments(architectures))


def _folders() -> list[Path]:
    return [*(CSRC / name for name in ("common", *EXAMPLES)), SCHEMAS_FOLDER]
