"""Which source a run measures: the commit of this repository, and the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def answer(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> str | None:
    """What a program prints; None if it fails or takes longer than half a minute."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit_label(commit: str | None, dirty: bool | None) -> str:
    """A commit as Markdown."""
    name = f"`{commit[:12]}`" if commit else "an unknown commit (no git checkout)"
    return name + (", with uncommitted changes" if dirty else "")


def repository_of(path: Path) -> Path | None:
    """The top folder of this repository that contains a path; None outside it."""
    here = path.resolve()
    marks = ("constraints.txt", "framework-internals")
    return next((folder for folder in (here, *here.parents) if all((folder / name).exists() for name in marks)), None)


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """The commit of this repository, and whether tracked files other than reports differ from it.

    An exported tree may lie inside a checkout of something else, whose commit says nothing of it: both are then None.
    """
    if "BENCHKIT_COMMIT" in os.environ:  # an exported tree without .git, on a machine that only measures
        return os.environ["BENCHKIT_COMMIT"], None
    # Git sets these for its hooks, where they name the repository that is committed to.
    variables = {
        name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    }

    def git(*arguments: str) -> str | None:
        return answer(["git", "-C", str(root), *arguments], environment=variables)

    top = git("rev-parse", "--show-toplevel")
    if top is None or repository_of(root) != Path(top).resolve():
        return None, None
    if (commit := git("rev-parse", "HEAD")) is None:
        return None, None
    folders = (f"framework-internals/{what}" for what in ("*/reports/*", "reports/*", "versions/*", "README.md"))
    generated = (f":(exclude,top){what}" for what in (*folders, "docs/random_programs.*"))
    status = git("status", "--porcelain", "--untracked-files=no", "--", ":/", *generated)
    return commit, None if status is None else bool(status)


def command_line(root: Path) -> str:
    """The command line without folders of this machine, which mean nothing to a reader."""
    top = repository_of(root) or root.resolve()

    def shorten(argument: str) -> str:
        path = Path(argument)
        try:
            is_path = path.is_absolute() or path.exists()
        except OSError:  # the argument is too long for a file name
            is_path = False
        if is_path:
            resolved = path.resolve()
            return str(resolved.relative_to(top)) if resolved.is_relative_to(top) else path.name
        return argument

    return " ".join(["python", *(shorten(argument) for argument in sys.argv)])
