"""Finds interpreters and builds of torch on this machine, and makes virtual environments."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tested_versions.matrix import Outcome, Unavailable
from tested_versions.plan import SELECTION, Combination, constraints

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_EXTRAS = {"shared": "[dev]", "custom-ops": "[tools]", "rmsnorm-fused": "[tools,triton]"}
PACKAGES = tuple(
    f"{'' if name == 'shared' else 'framework-internals/'}{name}{_EXTRAS.get(name, '')}" for name in SELECTION
)
# Time limits in seconds: for the tests of one package, and for one installation.
TEST_LIMIT, INSTALL_LIMIT = 900, 1800
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")
# pip first says only that a build failed; the cause comes later.
_COMPLAINT = re.compile(r"\s*(ERROR: |error: (?!subprocess-exited)|\w+Error: )")
_LISTED = " short test summary info "
_SUMMARY = re.compile(r"\d+ (passed|failed|skipped|error).* in \d")
_VERSIONS = """
import importlib.metadata, json, platform
found = {name: importlib.metadata.version(name) for name in ("torch", "jax", "jaxlib", "flax", "numpy")}
print(json.dumps({"python": platform.python_version(), **found}))
"""
_CUDA = re.compile(r"^(nvidia-|cuda-)")


@dataclass(frozen=True)
class Build:
    """A build of torch that pip would install.

    Attributes:
        version: The version with its local part: ``"2.13.0+cpu"``.
        options: Options with which pip finds it.
    """

    version: str
    options: tuple[str, ...] = ()


class ThisMachine:
    """Makes a virtual environment for each combination, with uv where it is installed, else with venv and pip.

    Args:
        root: The root of the repository.
        cache: Folder for the environments.
        cuda: Whether builds of torch that depend on CUDA (gigabytes) are allowed.
        keep: Whether to keep the environments.
    """

    def __init__(self, root: Path, cache: Path, *, cuda: bool = False, keep: bool = False) -> None:
        self.root = root
        self.cache = cache
        self.cuda = cuda
        self.keep = keep
        self._builds: dict[tuple[str, str], Build | str] = {}
        self._jaxes: dict[tuple[str, str], bool] = {}

    def prepare(self, combination: Combination) -> VirtualEnvironment:
        """Make the environment of a combination.

        Raises:
            Unavailable: If a part of the combination is missing here.
        """
        interpreter = find_interpreter(combination.python)
        if interpreter is None:
            raise Unavailable(f"no Python {combination.python} here (neither on PATH, nor pyenv's, nor uv's)")
        build = self._torch(interpreter, combination)
        self._require_jax(interpreter, combination)
        self.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = self.cache / f"python{combination.python}-torch{combination.torch}-jax{combination.jax}"
        environment = VirtualEnvironment(self.root, folder, keep=self.keep)
        try:
            environment.lock.acquire()
        except Timeout:
            raise Unavailable(f"another run uses {folder}") from None
        try:
            environment.make(interpreter)
            environment.install(combination, build)
        except BaseException:
            environment.close()
            raise
        return environment

    def _torch(self, interpreter: Path, combination: Combination) -> Build:
        """Return the build of torch to install; the indexes are asked once for all versions of jax.

        Raises:
            Unavailable: If the indexes have no build, or only one that is not allowed.
        """
        key = (combination.python, combination.torch)
        if key not in self._builds:
            self._builds[key] = find_torch(interpreter, combination.torch, cuda=self.cuda)
        found = self._builds[key]
        if isinstance(found, str):
            raise Unavailable(found)
        return found

    def _require_jax(self, interpreter: Path, combination: Combination) -> None:
        """Raise :class:`Unavailable` if the index has no such jax for this Python."""
        key = (combination.python, combination.jax)
        if key not in self._jaxes:
            self._jaxes[key] = _resolved(interpreter, f"jax=={combination.jax}.*", ()) is not None
        if not self._jaxes[key]:
            raise Unavailable(f"no jax {combination.jax} for this Python in the package index that is set up here")


def find_interpreter(version: str) -> Path | None:
    """Find a Python of a version such as ``"3.12"``: this one, one on ``PATH``, or one of pyenv or uv."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [sys.executable, shutil.which(f"python{version}")]
    candidates += [str(path) for path in sorted(home.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)]
    if (uv := shutil.which("uv")) is not None:
        candidates.append(_output([uv, "python", "find", "--offline", version]))
    for candidate in filter(None, candidates):
        if _output([candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]) == version:
            return Path(candidate)
    return None


def find_torch(interpreter: Path, version: str, *, cuda: bool) -> Build | str:
    """Find the build of torch that pip would install, without a download.

    Args:
        interpreter: The Python that it is for.
        version: A version such as ``"2.13"``.
        cuda: Whether a build that depends on CUDA's libraries is allowed.

    Returns:
        The build, or the reason why there is none.
    """
    refused = ""
    for options in ((), ("--index-url", CPU_INDEX)):
        item = _resolved(interpreter, f"torch=={version}.*", options)
        if item is None:
            continue
        build = Build(item["metadata"]["version"], options)
        needs = [one for one in item["metadata"].get("requires_dist", []) if _CUDA.match(one)]
        if cuda or not needs:
            return build
        refused = (
            f"the only build of torch {version} in the index is for CUDA ({build.version}, which needs {len(needs)} "
            "packages of CUDA's libraries); --cuda installs it"
        )
    return refused or f"no build of torch {version} for this Python in the package index that is set up here"


def _resolved(interpreter: Path, requirement: str, options: Sequence[str]) -> dict[str, Any] | None:
    # This environment's pip asks on behalf of the interpreter, since Debian's interpreters have no pip.
    command = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--dry-run", "--ignore-installed"]
    text = _output([*command, "--no-deps", "--quiet", "--only-binary", ":all:", "--report", "-", *options, requirement])
    try:
        (item,) = json.loads(text)["install"]
    except (ValueError, KeyError):
        return None
    found: dict[str, Any] = item
    return found


class VirtualEnvironment:
    """A virtual environment.

    Args:
        root: The root of the repository.
        folder: Folder of the environment.
        keep: Whether to keep the folder when the environment is closed.

    Attributes:
        versions: Versions of the installed packages.
        lock: Lock that is taken while the environment is in use. Left-overs of a killed run are replaced.
    """

    def __init__(self, root: Path, folder: Path, *, keep: bool) -> None:
        self.root = root
        self.folder = folder
        self.keep = keep
        self.versions: Mapping[str, str] = {}
        self.lock = FileLock(f"{folder}.lock", timeout=0)
        self._uv = shutil.which("uv")

    @property
    def python(self) -> Path:
        """Path of the environment's interpreter."""
        return self.folder / "bin" / "python"

    def make(self, interpreter: Path) -> None:
        """Make the environment, with pip alone.

        Raises:
            Unavailable: With the first line of the error output.
        """
        by_uv = [self._uv or "", "venv", "--clear", "--python", str(interpreter), str(self.folder)]
        self._do(by_uv if self._uv else [str(interpreter), "-m", "venv", "--clear", str(self.folder)])

    def install(self, combination: Combination, build: Build) -> None:
        """Install torch, jax and the packages of this repository.

        Raises:
            Unavailable: With the first line of the error output.
        """
        pins = self.folder / "constraints.txt"
        text = constraints((self.root / "constraints.txt").read_text())
        pins.write_text(f"{text}torch=={build.version}\njax=={combination.jax}.*\njaxlib=={combination.jax}.*\n")
        self._pip([*build.options, f"torch=={build.version}"], pins)
        self._pip(["setuptools>=77", "wheel"], pins)  # venv brings an older one, which cannot build these packages
        editable = [word for package in PACKAGES for word in ("--editable", str(self.root / package))]
        self._pip(["--no-build-isolation", *editable], pins)
        self.versions = json.loads(_output([str(self.python), "-c", _VERSIONS]) or "{}")

    def run(self, package: str) -> Outcome:
        """Run the selected tests of a package."""
        command = [str(self.python), "-m", "pytest", *map(str, SELECTION[package])]
        # CUDA kernels take minutes to compile and no test here can run them, so the GPU and nvcc are hidden. Extensions
        # that are compiled for a version of torch are reused for every version of jax.
        variables = {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "CUDA_HOME": os.devnull,
            "XDG_CACHE_HOME": str(self.folder.parent / "builds"),
        }
        try:
            done = subprocess.run(
                [*command, "-q", "-rfE", "-m", "not slow", "-p", "no:cacheprovider"],
                cwd=self.root,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=TEST_LIMIT,
            )
        except subprocess.TimeoutExpired:
            return Outcome(0, 1, 0, [f"time limit of {TEST_LIMIT} s exceeded"])
        return read_tests(done.returncode, done.stdout + done.stderr)

    def close(self) -> None:
        """Remove the environment."""
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.lock.release()

    def _pip(self, arguments: Sequence[str], pins: Path) -> None:
        by_uv = [self._uv or "", "pip", "install", "--python", str(self.python)]
        command = by_uv if self._uv else [str(self.python), "-m", "pip", "install", "--disable-pip-version-check"]
        self._do([*command, "--quiet", "--constraint", str(pins), *arguments])

    def _do(self, command: Sequence[str]) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_LIMIT)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"its installation exceeded the time limit of {INSTALL_LIMIT} s") from None
        if done.returncode != 0:
            complaints = [line for line in done.stderr.splitlines() if _COMPLAINT.match(line)]
            said = (complaints or done.stderr.strip().splitlines() or ["no error output"])[0]
            raise Unavailable(f"it cannot be installed: {said.strip().removeprefix('ERROR: ').rstrip('.')}")


def read_tests(status: int, output: str) -> Outcome:
    """Read pytest's list of failures and its summary line. A library may print more after the summary."""
    lines = output.strip().splitlines() or ["no output of pytest"]
    summary = next(filter(_SUMMARY.search, reversed(lines)), "")
    counts = {what: int(count) for count, what in _COUNT.findall(summary)}
    # Only lines after pytest's headline count: logged lines before it may begin with ERROR too.
    listed = lines[next((at for at, line in enumerate(lines) if _LISTED in line), len(lines)) :]
    failures = [line.partition(" ")[2] for line in listed if line.startswith(("FAILED ", "ERROR "))]
    failed = counts.get("failed", 0) + counts.get("error", 0)
    if status != 0 and not failed:  # pytest ended before it ran a test
        failed, failures = 1, [lines[-1]]
    return Outcome(counts.get("passed", 0), failed, counts.get("skipped", 0), [one[:300] for one in failures])


def _output(command: Sequence[str]) -> str:
    """Return what a program prints; empty if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_LIMIT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
