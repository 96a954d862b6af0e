"""Operators compiled ahead of time into one shared library on LibTorch's stable ABI, for machines without a compiler.

Such a library calls torch through C functions that keep their meaning from one version to the next, so that one file
serves every torch from the version that it was built for on, and every Python: it holds no Python module, and
``torch.ops.load_library`` loads it. CUDA kernels lie in it for several architectures, with the CUDA runtime linked in.

The file says itself what it is good for (:class:`LibraryRecord`), where it can be read without loading it: the dynamic
linker's own words for a function that an older torch lacks would name neither version.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from benchkit import UserError
from native_build.extension import BuildError, build_root, first_complaint, source_digest
from native_build.toolchain import SHARED_STANDARD_LIBRARY, cxx_compiler, find_nvcc, missing_cxx

_MARK = "native_build library record: "
_SYMBOL = "native_build_library_record"
_UNDEFINED = re.compile(r"^.*undefined reference to [`'](.+)'.*$", re.MULTILINE)


TORCH_VERSIONS = ("2.10", "2.15")
"""The versions of torch that a library is meant for, the oldest and the newest."""

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100", "sm_120", "compute_90")
"""Machine code for A100, H100, B200 and RTX 50 and, but for the H100's, the later GPUs of their generations; for every
other GPU since the H100 what its driver translates.
"""

_X86_LEVELS: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}


def instruction_levels() -> Mapping[str, tuple[str, ...]]:
    """Names of the instruction sets that CPU kernels are compiled for on this processor's family, and their flags.

    A library chooses among them at run time: it may be used on another processor than it was built on.
    """
    return _X86_LEVELS if platform.machine() == "x86_64" else {"baseline": ()}


class LibraryError(UserError):
    """A prebuilt library cannot be used here: it is missing, no such library, or made for something else."""


@dataclass(frozen=True)
class LibraryRecord:
    """What a library is good for.

    Attributes:
        name: of the library.
        torch_at_least: the oldest torch whose stable ABI has everything that it calls, ``"2.10"``.
        torch_at_most: the newest torch that it is meant for, ``"2.15"``.
        machine: processor family, as :func:`platform.machine` says it.
        cuda: version of the CUDA toolkit; None for a library of CPU kernels.
        architectures: of the CUDA kernels: ``"sm_90a"`` is machine code, ``"compute_90"`` what a driver translates.
    """

    name: str
    torch_at_least: str
    torch_at_most: str
    machine: str
    cuda: str | None = None
    architectures: tuple[str, ...] = ()

    def refusal(self, torch_version: str) -> str | None:
        """Why this library cannot be loaded under a version of torch on this machine; None where it can.

        Args:
            torch_version: ``torch.__version__``.
        """
        if self.machine != platform.machine():
            return f"it is for {self.machine} processors, and this is a {platform.machine()} one"
        if not _version(self.torch_at_least) <= _version(torch_version) <= _version(self.torch_at_most):
            return f"it is for torch {self.torch_at_least} to {self.torch_at_most}, and this is torch {torch_version}"
        return None

    def cuda_refusal(self, capability: tuple[int, int]) -> str | None:
        """Why its CUDA kernels cannot run on a GPU; None where they can.

        Args:
            capability: compute capability of the GPU, (9, 0).
        """
        if self.cuda is None:
            return "it was built without CUDA"
        if any(_runs(architecture, capability) for architecture in self.architectures):
            return None
        return f"its kernels are for {', '.join(self.architectures)}, and this GPU is sm_{capability[0]}{capability[1]}"


@dataclass(frozen=True)
class Unit:
    """One compilation of a source file.

    Attributes:
        source: a ``.cpp`` or ``.cu`` file; the same file may be in several units.
        flags: for this compilation alone.
    """

    source: Path
    flags: tuple[str, ...] = ()


def build_library(
    name: str,
    units: Sequence[Unit],
    output: Path,
    *,
    torch_versions: tuple[str, str],
    architectures: Sequence[str] = (),
    cflags: Sequence[str] = (),
    cuda_cflags: Sequence[str] = (),
    exports: Sequence[str] = (),
    libraries: Sequence[str] = (),
) -> LibraryRecord:
    """Compile and link a library; ``output`` is replaced in one step, when everything has worked.

    Args:
        name: for the record and for error messages.
        units: what to compile, as many at a time as there are processors: the longest first.
        output: path of the library.
        torch_versions: the oldest and the newest torch that it is for, ``("2.10", "2.15")``. The headers of the torch
            that is installed here then offer the sources no more than the stable ABI of the oldest.
        architectures: of the CUDA kernels, ``"sm_90a"`` and ``"compute_90"`` alike; empty for a library without CUDA,
            which needs no nvcc.
        cflags: for the C++ compiler, besides ``-O3 -std=c++17``.
        cuda_cflags: for nvcc, besides ``-O3 -std=c++17``.
        exports: symbols that others may look up in it, ``"PyInit__C"``; all else but the record is hidden.
        libraries: of torch's to link with besides those of its C++ functions, ``"torch_python"``.

    Returns:
        What was written into it.

    Raises:
        BuildError: when a tool is missing, or the folder cannot be made or written, or a source does not compile, or a
            symbol is missing.
    """
    nvcc = find_nvcc() if architectures else None
    if (reason := missing_cxx()) is not None:
        raise BuildError(f"cannot build {name}: {reason}")
    if architectures and nvcc is None:
        raise BuildError(f"cannot build {name}: no nvcc (install the CUDA toolkit, or set CUDA_HOME to where it is)")
    _prepare(output.parent)
    version = None if nvcc is None else _cuda_version(nvcc)
    record = LibraryRecord(name, *torch_versions, platform.machine(), version, tuple(architectures))
    with tempfile.TemporaryDirectory() as folder:
        stamp = Path(folder) / "record.cpp"
        stamp.write_text(_record_source(record), encoding="utf-8")
        places = _without_places(name, units)
        compilers = {
            ".cpp": [*_cxx_command(record, cflags), *places],
            ".cu": [*_nvcc_command(nvcc, record, cuda_cflags), *(f for each in places for f in ("-Xcompiler", each))],
        }

        def compile_unit(numbered: tuple[int, Unit]) -> str:
            index, unit = numbered
            made = Path(folder) / f"{index}-{unit.source.stem}.o"
            _run(name, [*compilers[unit.source.suffix], *unit.flags, "-c", str(unit.source), "-o", str(made)])
            return str(made)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_unit, enumerate([*units, Unit(stamp)])))
        _link(name, objects, output, nvcc, Path(folder), exports, libraries)
    return record


def _prepare(folder: Path) -> None:
    """Refuse a folder that cannot hold the library before anything is compiled for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BuildError(f"cannot write into {folder}: {error.strerror}; name another folder") from error


def build_library_once(
    name: str, units: Sequence[Unit], *, include_dirs: Sequence[Path] = (), **arguments: Any
) -> Path:
    """The library of these sources from the user's cache, built there if it is not.

    Args:
        name: of the library.
        units: as for :func:`build_library`.
        include_dirs: folders whose headers the sources include, besides the sources' own folders.
        arguments: the others of :func:`build_library`.

    Returns:
        Its path, which changes with anything that the library depends on.

    Raises:
        BuildError: as :func:`build_library`.
    """
    output = cached_library(name, units, include_dirs=include_dirs, **arguments)
    output.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{output}.lock"):
        if not output.is_file():
            build_library(name, units, output, **arguments)
    return output


def cached_library(name: str, units: Sequence[Unit], *, include_dirs: Sequence[Path] = (), **arguments: Any) -> Path:
    """Where :func:`build_library_once` puts a library, whether it is there or not; the arguments are the same."""
    flags = [flag for unit in units for flag in (*unit.flags, "/")]
    given = [f"{key}={value}" for key, value in sorted(arguments.items())]
    digest = source_digest([unit.source for unit in units], include_dirs, [*flags, *given, cxx_compiler()])
    return build_root(cuda=bool(arguments.get("architectures"))) / f"{name}-{digest}.so"


def read_record(library: Path) -> LibraryRecord:
    """What a library is good for, read from the file without loading it.

    Raises:
        LibraryError: when there is no such file, or it is none of :func:`build_library`'s.
    """
    if not library.is_file():
        raise LibraryError(f"there is no library {library}")
    found = re.search(re.escape(_MARK.encode()) + rb"(\{[^\0]*\})\0", library.read_bytes())
    if found is None:
        raise LibraryError(f"{library} is not a library that native_build has made")
    fields = json.loads(found[1])
    return LibraryRecord(**{**fields, "architectures": tuple(fields["architectures"])})


def load_library(library: Path) -> LibraryRecord:
    """Load a library's operators into this process, having looked whether it is for this torch.

    Returns:
        What it is good for.

    Raises:
        LibraryError: when it is for another version of torch or another processor, no such library, or needs another
            that is not here.
    """
    import torch

    record = read_record(library)
    if (reason := record.refusal(torch.__version__)) is not None:
        raise LibraryError(f"cannot load {library}: {reason}; build it again here, or install what it is for")
    try:
        torch.ops.load_library(str(library))
    except OSError as error:  # the dynamic linker's: a C or C++ library here is older than where this one was linked
        raise LibraryError(f"cannot load {library}: {error}") from error
    return record


def _version(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"expected a version like 2.10, got {version!r}")
    return int(found[1]), int(found[2])


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    kind, digits, specific = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", architecture).groups()  # type: ignore[union-attr]
    own = int(digits[:-1]), int(digits[-1])
    if specific == "a":
        return own == capability
    # Machine code runs on later GPUs of its generation; what the driver translates, on every later GPU.
    return own <= capability and ((kind == "compute" and not specific) or own[0] == capability[0])


def _record_source(record: LibraryRecord) -> str:
    text = json.dumps(_MARK + json.dumps(asdict(record)))  # as JSON writes a string of ASCII, so does C
    return (
        f'extern "C" __attribute__((used, visibility("default"))) const char {_SYMBOL}[];\n'
        f"const char {_SYMBOL}[] = {text};\n"
    )


def _without_places(name: str, units: Sequence[Unit]) -> list[str]:
    """Flags under which errors do not name folders of this machine: the same sources make the same bytes anywhere."""
    import torch

    sources = os.path.commonpath([unit.source.resolve().parent for unit in units])
    packages = Path(torch.__file__).resolve().parents[1]
    return [f"-ffile-prefix-map={packages}/=", f"-ffile-prefix-map={sources}={name}"]


def _cxx_command(record: LibraryRecord, cflags: Sequence[str]) -> list[str]:
    from torch.utils.cpp_extension import include_paths

    major, minor = _version(record.torch_at_least)
    return [
        cxx_compiler(), "-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden",
        f"-DTORCH_TARGET_VERSION={(major << 56) | (minor << 48):#x}ULL",
        *(flag for path in include_paths() for flag in ("-isystem", path)),
        *cflags,
    ]  # fmt: skip


def _nvcc_command(nvcc: Path | None, record: LibraryRecord, cuda_cflags: Sequence[str]) -> list[str]:
    codes = [
        f"arch={re.sub('^sm', 'compute', architecture)},code={architecture}" for architecture in record.architectures
    ]
    return [
        str(nvcc), "-O3", "-std=c++17", "-ccbin", cxx_compiler(), "-Xcompiler", "-fPIC,-fvisibility=hidden",
        *(flag for code in codes for flag in ("-gencode", code)),
        *cuda_cflags,
    ]  # fmt: skip


def _link(
    name: str,
    objects: Sequence[str],
    output: Path,
    nvcc: Path | None,
    folder: Path,
    symbols: Sequence[str],
    libraries: Sequence[str],
) -> None:
    from torch.utils.cpp_extension import library_paths

    exports = folder / "exports.map"
    exports.write_text(f"{{ global: {'; '.join([_SYMBOL, *symbols])}; local: *; }};\n", encoding="utf-8")
    made = output.with_name(f"{output.stem}.{os.getpid()}{output.suffix}")
    runtime = [] if nvcc is None else [f"-L{_cuda_libraries(nvcc)}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    try:
        log = _run(name, [
            cxx_compiler(), "-shared", "-s", "-o", str(made), *objects, SHARED_STANDARD_LIBRARY,
            f"-Wl,--version-script={exports}", "-Wl,--no-undefined", "-Wl,--warn-unresolved-symbols",
            *(f"-L{path}" for path in library_paths()),
            # libtorch.so brings torch's CUDA library along where there is one, for the one weak symbol that is in it.
            "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", *(f"-l{library}" for library in libraries),
            "-ltorch_cpu", "-lc10", *runtime,
        ])  # fmt: skip
        # Python's own functions are in the program that imports the library, and nowhere to be linked with.
        missing = [found for found in _UNDEFINED.finditer(log) if not found[1].startswith(("Py", "_Py"))]
        if missing:
            raise BuildError(f"cannot build {name}: {missing[0][0].strip()}")
        made.replace(output)
    finally:
        made.unlink(missing_ok=True)


def _run(name: str, command: Sequence[str]) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    log = answer.stderr + answer.stdout
    if answer.returncode != 0:
        raise BuildError(f"cannot build {name}: {first_complaint(log)}")
    return log


def _cuda_version(nvcc: Path) -> str:
    answer = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+\.\d+)", answer)
    if found is None:
        raise BuildError(f"{nvcc} --version names no release: {answer.strip().splitlines()[-1]}")
    return found[1]


def _cuda_libraries(nvcc: Path) -> Path:
    # nvcc may be a script that calls the real one; what that one would do says where its toolkit lies.
    plan = subprocess.run(
        [str(nvcc), "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
    )
    found = re.search(r"^#\$ TOP=(.+)$", plan.stderr, re.MULTILINE)
    home = Path(found[1].strip()).resolve() if found else nvcc.resolve().parent.parent
    for folder in (home / "lib64", home / "lib", *home.glob("targets/*/lib")):
        if (folder / "libcudart_static.a").exists():
            return folder
    raise BuildError(f"no libcudart_static.a in {home} (install the CUDA toolkit's runtime development files)")
