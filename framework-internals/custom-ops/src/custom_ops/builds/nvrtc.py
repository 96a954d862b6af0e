"""Compile CUDA C++ at run time with NVRTC, which a CUDA build of torch installs, and launch it through the driver.

This needs no nvcc, no C++ compiler and no torch headers: a library of 60 MB replaces the toolkit. The calls go through
ctypes; the functions are documented and have not changed for years (NVRTC user guide; CUDA driver API, "Module
Management", "Execution Control").
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from native_build import BuildError

Argument = ctypes.Structure | ctypes._SimpleCData


def missing() -> str | None:
    """Say why nothing can be compiled at run time here, with the remedy; None if it can."""
    try:
        _library()
        headers()
    except BuildError as error:
        return str(error)
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    import torch

    major = (torch.version.cuda or "13").split(".")[0]
    folders = [Path(folder) for folder in sys.path if folder]
    candidates = [
        *(str(path) for folder in folders for path in sorted(folder.glob(f"nvidia/*/lib/libnvrtc.so.{major}*"))),
        f"libnvrtc.so.{major}",
    ]
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise BuildError(f"no libnvrtc.so.{major} (it comes with a CUDA build of torch: nvidia-cuda-nvrtc)")


@functools.cache
def headers() -> Path:
    """Find the folder of CUDA's headers.

    Raises:
        BuildError: If no such folder is found.
    """
    homes = [Path(home) / "include" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    packages = [path for folder in sys.path if folder for path in sorted(Path(folder).glob("nvidia/*/include"))]
    for folder in (*packages, *homes):
        if (folder / "cuda_fp16.h").is_file():
            return folder
    raise BuildError("no cuda_fp16.h (it comes with a CUDA build of torch: nvidia-cuda-runtime; or set CUDA_HOME)")


@dataclass(frozen=True)
class Compiled:
    """Machine code, and the names of the kernels in it.

    Attributes:
        cubin: Machine code for one architecture.
        names: Mangled name of each requested expression.
    """

    cubin: bytes
    names: tuple[bytes, ...]


def compile_kernels(
    source: str, expressions: Sequence[str], architecture: str, include_dirs: Sequence[Path]
) -> Compiled:
    """Compile instances of kernel templates to machine code.

    Raises:
        BuildError: If there is no NVRTC, or the source does not compile.
    """
    nvrtc = _library()
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"custom_ops.cu", 0, None, None))
    try:
        for expression in expressions:
            _check(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        flags = [f"-arch={architecture}", "-std=c++17", *(f"-I{path}" for path in (*include_dirs, headers()))]
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        if nvrtc.nvrtcCompileProgram(program, len(flags), options) != 0:
            log = _bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
            complaint = next((line for line in log.splitlines() if "error" in line), log.strip().split("\n")[0])
            raise BuildError(f"NVRTC does not compile for {architecture}: {complaint}")
        names = []
        for expression in expressions:
            name = ctypes.c_char_p()
            _check(nvrtc.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(name)))
            names.append(name.value or b"")
        cubin = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return Compiled(cubin, tuple(names))


def _bytes(size_of: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status != 0:
        raise BuildError(f"NVRTC failed with status {status}")


class Kernel:
    """A compiled kernel, loaded into the context of the current device."""

    def __init__(self, compiled: Compiled, index: int = 0) -> None:
        self._driver = _driver()
        self._compiled = compiled  # the driver keeps no copy
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(module), compiled.cubin))
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(function), module, compiled.names[index]))
        self._function = function

    def launch(self, grid: tuple[int, int], block: int, stream: int, arguments: Sequence[Argument]) -> None:
        """Launch the kernel on a stream of the current device.

        Raises:
            RuntimeError: If the driver reports an error.
        """
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        self._check(
            self._driver.cuLaunchKernel(
                self._function, *grid, 1, block, 1, 1, 0, ctypes.c_void_p(stream), pointers, None
            )
        )

    def _check(self, status: int) -> None:
        if status != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"CUDA driver error {status}: {(text.value or b'unknown').decode()}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
