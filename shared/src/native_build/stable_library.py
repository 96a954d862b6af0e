"""Operators compiled into one shared library: on LibTorch's stable ABI, or as a Python module for this torch.

A library on the stable ABI calls torch through C functions that stay the same across versions. One file works with
every torch from the version that it was built for, and with every Python, because it contains no Python module and
``torch.ops.load_library`` loads it. It contains CUDA kernels for several architectures and the CUDA runtime. So it
serves machines without a compiler. A module (:func:`load_module`) can call all of torch's C++.

The file contains a description of what it works with (:class:`LibraryRecord`), which can be read without loading the
library. Without it, an older torch would only report a missing function, and name neither version.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchkit import UserError
from benchkit.command.progress import track
from benchkit.processes import result_of
from benchkit.processes.resources import cannot_write
from benchkit.processes.server import kill_group
from native_build.extension import (
    BuildError,
    build_root,
    ended_by_exceptions,
    first_complaint,
    import_library,
    locked,
    source_digest,
)
from native_build.toolchain import (
    INCLUDE_DIR,
    SHARED_STANDARD_LIBRARY,
    compilers_at_once,
    cxx_compiler,
    find_nvcc,
    missing_cxx,
    nvcc_version,
)

_POLL_SECONDS = 0.2
_MARK = "native_build library record: "
_SYMBOL = "native_build_library_record"
_UNDEFINED = re.compile(r"^.*undefined reference to [`'](.+)'.*$", re.MULTILINE)


TORCH_VERSIONS = ("2.10", "2.15")
"""The oldest and the newest version of torch that libraries are built for."""

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100", "sm_120", "compute_90")
"""Machine code for A100, H100, B200 and RTX 50, which (except the H100's) also runs on later GPUs of their generations,
and PTX, which the driver translates for every other GPU since the H100.
"""

_LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "baseline": (),
        "avx2": ("-march=x86-64-v3",),
        "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    },
    "aarch64": {"neon": ()},
}


def instruction_levels(machine: str | None = None) -> Mapping[str, tuple[str, ...]]:
    """Instruction sets that CPU kernels are compiled for on a family of processors, with their compiler flags.

    A library chooses among them at run time, because it may run on another processor than the one that built it.

    Args:
        machine: The family, as :func:`platform.machine` names it; this processor's if None.

    Returns:
        Flags by the name of the instruction set, the lowest first. Every processor of the family has the first.
    """
    return _LEVELS.get(machine or platform.machine(), {"baseline": ()})


class LibraryError(UserError):
    """A prebuilt library cannot be used here: it is missing, another kind of file, or built for something else."""


@dataclass(frozen=True)
class LibraryRecord:
    """What a library works with.

    Attributes:
        name: Name of the library.
        torch_at_least: Oldest torch whose stable ABI has everything that the library calls, such as ``"2.10"``.
        torch_at_most: Newest torch that it is built for, such as ``"2.15"``.
        machine: Processor family, as :func:`platform.machine` returns it.
        cuda: Version of the CUDA toolkit; None for a library without CUDA kernels.
        architectures: Architectures of the CUDA kernels: ``"sm_90a"`` is machine code, ``"compute_90"`` is PTX.
    """

    name: str
    torch_at_least: str
    torch_at_most: str
    machine: str
    cuda: str | None = None
    architectures: tuple[str, ...] = ()

    def refusal(self, torch_version: str) -> str | None:
        """Why this library cannot be loaded with a version of torch on this machine; None if it can.

        Args:
            torch_version: ``torch.__version__``.
        """
        if self.machine != platform.machine():
            return f"it is for {self.machine} processors, and this is a {platform.machine()} one"
        if not _version(self.torch_at_least) <= _version(torch_version) <= _version(self.torch_at_most):
            return f"it is for torch {self.torch_at_least} to {self.torch_at_most}, and this is torch {torch_version}"
        return None

    def cuda_refusal(self, capability: tuple[int, int]) -> str | None:
        """Why its CUDA kernels cannot run on a GPU; None if they can."""
        if self.cuda is None:
            return "it was built without CUDA"
        if any(_runs(architecture, capability) for architecture in self.architectures):
            return None
        return f"its kernels are for {', '.join(self.architectures)}, and this GPU is sm_{capability[0]}{capability[1]}"


@dataclass(frozen=True)
class Unit:
    """One compilation of a source file.

    Attributes:
        source: A ``.cpp`` or ``.cu`` file; several units may compile the same file.
        flags: Flags for this compilation only.
    """

    source: Path
    flags: tuple[str, ...] = ()


def build_library(
    name: str,
    units: Sequence[Unit],
    output: Path,
    *,
    torch_versions: tuple[str, str] | None,
    architectures: Sequence[str] = (),
    cflags: Sequence[str] = (),
    cuda_cflags: Sequence[str] = (),
    exports: Sequence[str] = (),
    libraries: Sequence[str] = (),
) -> LibraryRecord:
    """Compile and link a library; ``output`` is replaced atomically when everything has succeeded.

    Args:
        name: Name for the record and for error messages.
        units: Units to compile, as many at a time as there are processors. The longest should come first.
        output: Path of the library.
        torch_versions: Oldest and newest torch, such as ``("2.10", "2.15")``. The headers of the installed torch then
            offer only the stable ABI of the oldest. None: the installed torch alone, with all of its headers.
        architectures: Architectures of the CUDA kernels, such as ``"sm_90a"`` and ``"compute_90"``; empty for a library
            without CUDA, which needs no nvcc.
        cflags: Flags for the C++ compiler in addition to ``-O3`` and the standard that torch's headers need.
        cuda_cflags: Flags for nvcc likewise.
        exports: Symbols to export, such as ``"PyInit__C"``; all others except the record are hidden.
        libraries: Further libraries of torch to link with, such as ``"torch_python"``.

    Returns:
        The record that the library contains.

    Raises:
        BuildError: If a tool or a symbol is missing, the folder cannot be written, or a source does not compile.
    """
    nvcc = find_nvcc() if architectures else None
    if (reason := missing_cxx()) is not None:
        raise BuildError(f"cannot build {name}: {reason}")
    if architectures and nvcc is None:
        raise BuildError(f"cannot build {name}: no nvcc (install the CUDA toolkit, or set CUDA_HOME to where it is)")
    _prepare(output.parent)
    version = None if nvcc is None else _cuda_version(nvcc)
    versions = torch_versions or (_installed_torch(),) * 2
    record = LibraryRecord(name, *versions, platform.machine(), version, tuple(architectures))
    stable = torch_versions is not None
    with tempfile.TemporaryDirectory() as folder:
        stamp = Path(folder) / "record.cpp"
        stamp.write_text(_record_source(record), encoding="utf-8")
        places = _without_places(name, units)
        compilers = {
            ".cpp": [*_cxx_command(record, stable, cflags), *places],
            ".cu": [*_nvcc_command(nvcc, record, stable, cuda_cflags), "-Xcompiler", ",".join(places)],
        }

        def compile_unit(numbered: tuple[int, Unit]) -> str:
            index, unit = numbered
            made = Path(folder) / f"{index}-{unit.source.stem}.o"
            command = [*compilers[unit.source.suffix], *unit.flags, "-c", str(unit.source), "-o", str(made)]
            _run(name, command, stopped)
            return str(made)

        every_unit = [*units, Unit(stamp)]
        stopped = threading.Event()
        with ended_by_exceptions(), ThreadPoolExecutor(compilers_at_once()) as pool:
            try:
                compiling = [pool.submit(compile_unit, unit) for unit in enumerate(every_unit)]
                with track(compiling, f"compiling {name}") as units_in_turn:
                    objects = [result_of(unit) for unit in units_in_turn]
            except BaseException:  # the first error or an interrupt: nobody needs the rest
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        _link(name, objects, output, nvcc, Path(folder), exports, libraries)
    return record


def _prepare(folder: Path) -> None:
    """Raise an error for a folder that cannot be written, before anything is compiled."""
    if (reason := cannot_write(folder)) is not None:
        raise BuildError(f"cannot write into {folder}: {reason}; name another folder")


def build_library_once(
    name: str, units: Sequence[Unit], *, include_dirs: Sequence[Path] = (), **arguments: Any
) -> Path:
    """Build a library in the user's cache, unless it is there already.

    Args:
        name: Name of the library.
        units: See :func:`build_library`.
        include_dirs: Folders whose headers the sources include, in addition to the folders of the sources.
        arguments: The other arguments of :func:`build_library`.

    Returns:
        Path of the library, which depends on everything that determines the library.

    Raises:
        BuildError: See :func:`build_library`.
    """
    output = cached_library(name, units, include_dirs=include_dirs, **arguments)
    output.parent.mkdir(parents=True, exist_ok=True)
    with locked(output):
        if not output.is_file():
            build_library(name, units, output, **arguments)
    return output


def cached_library(name: str, units: Sequence[Unit], *, include_dirs: Sequence[Path] = (), **arguments: Any) -> Path:
    """Path of the library that :func:`build_library_once` builds for these arguments, whether it exists or not."""
    flags = [flag for unit in units for flag in (*unit.flags, "/")]
    given = [f"{key}={value}" for key, value in sorted(arguments.items())]
    digest = source_digest([unit.source for unit in units], include_dirs, [*flags, *given, cxx_compiler()])
    return build_root(cuda=bool(arguments.get("architectures"))) / f"{name}-{digest}.so"


def load_module(name: str, units: Sequence[Unit], *, architectures: Sequence[str] = ()) -> ModuleType:
    """Build a pybind11 module for this torch and this Python in the user's cache, unless it is there, and import it.

    Args:
        name: Name of the module, which a source passes to ``PYBIND11_MODULE`` as ``TORCH_EXTENSION_NAME``.
        units: See :func:`build_library`.
        architectures: See :func:`build_library`.

    Returns:
        The module. Within a process, the same arguments return the same object.

    Raises:
        BuildError: See :func:`build_library`; the same call fails again without another attempt.
    """
    module = _module(name, tuple(units), tuple(architectures))
    if isinstance(module, BuildError):
        raise module
    return module


@functools.cache
def _module(name: str, units: tuple[Unit, ...], architectures: tuple[str, ...]) -> ModuleType | BuildError:
    try:
        library = build_library_once(
            name, units, torch_versions=None, architectures=architectures,
            exports=(f"PyInit_{name}",), libraries=("torch_python",),
        )  # fmt: skip
    except BuildError as error:
        return error
    return import_library(name, library)


def read_record(library: Path) -> LibraryRecord:
    """Read the record of a library without loading the library.

    Raises:
        LibraryError: If the file does not exist, or :func:`build_library` has not built it.
    """
    if not library.is_file():
        raise LibraryError(f"there is no library {library}")
    found = re.search(re.escape(_MARK.encode()) + rb"(\{[^\0]*\})\0", library.read_bytes())
    if found is None:
        raise LibraryError(f"{library} is not a library that native_build has made; name one from build_library")
    fields = json.loads(found[1])
    return LibraryRecord(**{**fields, "architectures": tuple(fields["architectures"])})


def load_library(library: Path) -> LibraryRecord:
    """Check that a library works with this torch, and load its operators into this process.

    Returns:
        The record of the library.

    Raises:
        LibraryError: If the library is for another torch or processor, was not built by :func:`build_library`, or needs
            a library that is missing here.
    """
    import torch

    record = read_record(library)
    if (reason := record.refusal(torch.__version__)) is not None:
        raise LibraryError(f"cannot load {library}: {reason}; build it again here, or install a matching torch")
    try:
        torch.ops.load_library(str(library))
    except OSError as error:  # the dynamic linker's: a C or C++ library here is older than on the building machine
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
    # Machine code runs on later GPUs of its generation, and PTX on every later GPU.
    return own <= capability and ((kind == "compute" and not specific) or own[0] == capability[0])


def _record_source(record: LibraryRecord) -> str:
    text = json.dumps(_MARK + json.dumps(asdict(record)))  # an ASCII string has the same literal in JSON and in C
    return (
        f'extern "C" __attribute__((used, visibility("default"))) const char {_SYMBOL}[];\n'
        f"const char {_SYMBOL}[] = {text};\n"
    )


def _without_places(name: str, units: Sequence[Unit]) -> list[str]:
    """Flags that remove folders of this machine from the library, so that equal sources give equal bytes anywhere."""
    import torch

    sources = os.path.commonpath([unit.source.resolve().parent for unit in units])
    packages = Path(torch.__file__).resolve().parents[1]
    return [f"-ffile-prefix-map={packages}/=", f"-ffile-prefix-map={sources}={name}"]


def _cxx_command(record: LibraryRecord, stable: bool, cflags: Sequence[str]) -> list[str]:
    from torch.utils.cpp_extension import include_paths

    headers = include_paths()
    if stable:
        major, minor = _version(record.torch_at_least)
        defined = [f"-DTORCH_TARGET_VERSION={(major << 56) | (minor << 48):#x}ULL"]
    else:
        # The last one keeps torch's headers from including all operators where they need a few: a fifth of the time.
        defined = [f"-DTORCH_EXTENSION_NAME={record.name}", "-DAT_PER_OPERATOR_HEADERS"]
        headers = [*headers, sysconfig.get_path("include")]
    return [
        cxx_compiler(), "-O3", _standard(stable), "-fPIC", "-fvisibility=hidden", *defined,
        f"-I{INCLUDE_DIR}",
        *(flag for path in headers for flag in ("-isystem", path)),
        *cflags,
    ]  # fmt: skip


def _nvcc_command(nvcc: Path | None, record: LibraryRecord, stable: bool, cuda_cflags: Sequence[str]) -> list[str]:
    codes = [
        f"arch={re.sub('^sm', 'compute', architecture)},code={architecture}" for architecture in record.architectures
    ]
    return [
        str(nvcc), "-O3", _standard(stable), "-ccbin", cxx_compiler(), "-Xcompiler", "-fPIC,-fvisibility=hidden",
        *(flag for code in codes for flag in ("-gencode", code)),
        *cuda_cflags,
    ]  # fmt: skip


def _standard(stable: bool) -> str:
    return "-std=c++17" if stable else "-std=c++20"  # ATen's headers need C++20 from torch 2.12 on


def _installed_torch() -> str:
    import torch

    return "{}.{}".format(*_version(torch.__version__))


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
            # libtorch.so pulls in torch's CUDA library, if there is one, for the only weak symbol in it.
            "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", *(f"-l{library}" for library in libraries),
            "-ltorch_cpu", "-lc10", *runtime,
        ])  # fmt: skip
        # Python's own functions are in the program that imports the library, and need not be linked.
        missing = [found for found in _UNDEFINED.finditer(log) if not found[1].startswith(("Py", "_Py"))]
        if missing:
            raise BuildError(f"cannot build {name}: {missing[0][0].strip()}")
        made.replace(output)
    finally:
        made.unlink(missing_ok=True)


def _run(name: str, command: Sequence[str], stopped: threading.Event | None = None) -> str:
    """Run a compiler and return what it prints; it ends soon after ``stopped`` is set."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    ) as process:
        log = None
        while log is None:
            try:
                log, _ = process.communicate(timeout=_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                if stopped is not None and stopped.is_set():
                    kill_group(process.pid)
    if process.returncode != 0:
        raise BuildError(f"cannot build {name}: {first_complaint(log)}")
    return log


def _cuda_version(nvcc: Path) -> str:
    answer = nvcc_version(nvcc)
    found = re.search(r"release (\d+\.\d+)", answer)
    if found is None:
        raise BuildError(f"{nvcc} --version prints no release: {answer.strip().splitlines()[-1]}")
    return found[1]


def _cuda_libraries(nvcc: Path) -> Path:
    # nvcc may be a script that calls the real one, whose dry run prints the folder of its toolkit.
    plan = subprocess.run(
        [str(nvcc), "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
    )
    found = re.search(r"^#\$ TOP=(.+)$", plan.stderr, re.MULTILINE)
    home = Path(found[1].strip()).resolve() if found else nvcc.resolve().parent.parent
    for folder in (home / "lib64", home / "lib", *home.glob("targets/*/lib")):
        if (folder / "libcudart_static.a").exists():
            return folder
    raise BuildError(f"no libcudart_static.a in {home} (install the CUDA toolkit's runtime development files)")
