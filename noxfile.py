"""Tests this repository with other versions of Python, torch and jax: ``scripts/versions.sh``, or ``nox`` alone.

Each combination leaves its outcome in build/versions/, from which scripts/versions.sh writes the report.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
sys.path.append(str(ROOT / "scripts"))

from tested_versions.plan import JAXES, PACKAGES, PYTHONS, SELECTION, TORCHES, constraints  # noqa: E402

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_VERSIONS = """
import importlib.metadata, json, platform
installed = {name: importlib.metadata.version(name) for name in ("torch", "jax", "jaxlib", "flax", "numpy")}
print(json.dumps({"python": platform.python_version(), **installed}))
"""

nox.needs_version = ">=2025.5.1"
nox.options.envdir = "build/nox"
nox.options.report = "build/versions/nox.json"
nox.options.default_venv_backend = "uv|venv"
nox.options.error_on_missing_interpreters = False


@nox.session(python=PYTHONS)
@nox.parametrize("jax", JAXES)
@nox.parametrize("torch", TORCHES)
def versions(session: nox.Session, torch: str, jax: str) -> None:
    """Try one combination, unless it was tried at this commit: install it, run a selection of every package's tests.

    After ``--``: ``cuda`` allows builds of torch that download gigabytes of CUDA libraries, ``fresh`` repeats what was
    tried, ``keep`` keeps the environment.
    """
    try:
        _try(session, torch, jax)
    finally:
        if "keep" not in session.posargs:
            shutil.rmtree(session.virtualenv.location, ignore_errors=True)


def _try(session: nox.Session, torch: str, jax: str) -> None:
    folder = ROOT / "build" / "versions" / f"python{session.python}-torch{torch}-jax{jax}"
    outcome: dict[str, object] = {"labels": {"python": session.python, "torch": torch, "jax": jax}, **_commit()}
    if "fresh" not in session.posargs and _was_tried(folder, outcome):
        session.skip("it was tried at this commit; `-- fresh` repeats it")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.monotonic()
    with _reason(folder, outcome):
        _install(session, folder, torch, jax)
    outcome["versions"] = json.loads(session.run("python", "-c", _VERSIONS, silent=True) or "{}")
    passed = [_passes(session, folder, package) for package in SELECTION]
    _keep(folder, outcome | {"seconds": time.monotonic() - start})
    if not all(passed):
        session.error("tests failed")


def _commit() -> dict[str, object]:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return {"commit": git("rev-parse", "HEAD") or None, "dirty": bool(git("status", "--porcelain", "-uno"))}


def _was_tried(folder: Path, outcome: dict[str, object]) -> bool:
    """Tell whether these sources were tried. What was not available may be available now."""
    try:
        kept = json.loads((folder / "outcome.json").read_text())
    except (OSError, ValueError):
        return False
    same = kept["commit"] == outcome["commit"] is not None and not (kept["dirty"] or outcome["dirty"])
    return same and "why" not in kept


def _keep(folder: Path, outcome: dict[str, object]) -> None:
    (folder / "outcome.json").write_text(json.dumps(outcome))


@contextlib.contextmanager
def _reason(folder: Path, outcome: dict[str, object]) -> Iterator[None]:
    """Keep why an installation failed: what pip or uv complained of last."""
    try:
        yield
    except CommandFailed:
        lines = (folder / "install.log").read_text(errors="replace").strip().splitlines() or ["no output"]
        # pip first says only that a build failed; the cause comes later.
        complaints = [line for line in lines if "rror: " in line.lower() and "subprocess-exited" not in line]
        _keep(folder, outcome | {"why": f"it cannot be installed: {(complaints or lines)[-1].strip()}"})
        raise


def _install(session: nox.Session, folder: Path, torch: str, jax: str) -> None:
    """Install torch, jax and the packages of this repository."""
    pins = folder / "constraints.txt"
    text = constraints((ROOT / "constraints.txt").read_text())
    pins.write_text(f"{text}torch=={torch}.*\njax=={jax}.*\njaxlib=={jax}.*\n")
    with (folder / "install.log").open("w") as log:

        def install(*arguments: str) -> None:
            session.install("--constraint", str(pins), *arguments, silent=False, stdout=log, stderr=subprocess.STDOUT)

        # The local version names the CPU build where the index that is set up has one, as scripts/setup.sh has it.
        builds = [[f"torch=={torch}.0+cpu"], ["--index-url", CPU_INDEX, f"torch=={torch}.*"]]
        if "cuda" in session.posargs:
            builds.append([f"torch=={torch}.*"])
        for build in builds[:-1]:
            try:
                install(*build)
                break
            except CommandFailed:
                continue
        else:
            install(*builds[-1])
        install("setuptools>=77", "wheel")  # venv brings an older one, which cannot build these packages
        install("--no-build-isolation", *(word for package in PACKAGES for word in ("--editable", package)))


def _passes(session: nox.Session, folder: Path, package: str) -> bool:
    """Run the selected tests of a package; pytest keeps their outcomes in ``<package>.xml``."""
    # CUDA kernels take minutes to compile and no test here can run them, so the GPU and nvcc are hidden. Extensions
    # that are compiled for a version of torch are reused for every version of jax.
    variables = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_HOME": os.devnull,
        "XDG_CACHE_HOME": str(folder.parent / "builds"),
    }
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", f"--junit-xml={folder / package}.xml"]
    try:
        session.run("python", "-m", "pytest", *SELECTION[package], *options, env=variables)
    except CommandFailed:
        return False
    return True
