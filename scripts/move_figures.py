"""Prove that no test knows a measured figure: run tests in a copy of the repository whose results are others.

./scripts/python.sh scripts/move_figures.py                 the tests marked `committed`, which read committed reports
./scripts/python.sh scripts/move_figures.py -m "not slow"   others: the arguments go to pytest

In the copy every figure of every committed document is moved by up to 15 %, the processors and GPUs are others, and so
are their cores and memory, the folders have the names of those machines, and every report and the index are rendered
again. conftest.py fails a test without the marker that opens a committed report, so the marked ones are all that can
be affected.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchkit import Quantity, Record
from benchkit.environment import Environment
from benchkit.results import MAIN, SWEEP, Json, dump, load

ROOT = Path(__file__).resolve().parents[1]
HOUSE = Path("framework-internals")
LARGEST_MOVE = 0.15


def moved(quantity: Quantity, factor: float) -> Quantity:
    """A figure and its interval times a factor. A count stays one."""
    if quantity.unit == "" and float(quantity.value).is_integer():
        return replace(quantity, value=round(quantity.value * factor))
    ends = (None if end is None else end * factor for end in (quantity.low, quantity.high))
    low, high = ends
    return replace(quantity, value=quantity.value * factor, low=low, high=high)


def moved_data(data: Json, factor: float) -> Json:
    """Plain JSON with every fraction times a factor. Whole numbers are positions and counts, which belong together."""
    if isinstance(data, float):
        return data * factor
    if isinstance(data, list):
        return [moved_data(entry, factor) for entry in data]
    if isinstance(data, dict):
        return {key: moved_data(entry, factor) for key, entry in data.items()}
    return data


def moved_record(record: Record, draw: random.Random) -> Record:
    """A record with each figure moved on its own."""

    def factor() -> float:
        return 1 + draw.uniform(-LARGEST_MOVE, LARGEST_MOVE)

    values = {name: moved(quantity, factor()) for name, quantity in record.values.items()}
    return replace(record, values=values, data=moved_data(record.data, factor()))


def elsewhere(environment: Environment) -> Environment:
    """Another machine of the same kind: another processor or GPU, other cores, other memory; two stay two."""
    gpu = environment.gpu
    instructions = "avx512" if environment.instructions == "avx2" else "avx2"
    model = int(environment.family.rpartition(" ")[2] or 0)
    return replace(
        environment,
        cpu="Intel(R) Xeon(R) Processor",
        vendor="intel",
        family=f"family 6, model {1000 + model}",
        instructions=instructions,
        cores=3 * environment.cores + 1,
        memory=environment.memory // 3,
        gpu=gpu and replace(gpu, name=f"{gpu.name} Next", memory=gpu.memory // 2, multiprocessors=114),
    )


def copy_repository(target: Path) -> None:
    """Copy what git tracks, and what it would, into a repository of its own."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "--quiet"], ["add", "--all"], [*identity, "commit", "--quiet", "--message", "A copy"]):
        subprocess.run(["git", "-C", str(target), *arguments], check=True)


def move_everything(root: Path, seed: int = 0) -> dict[str, str]:
    """Move every figure below a repository's folder of lenses; return the new name of each machine's folder."""
    draw, renamed = random.Random(seed), {}  # nothing is secret
    folders = sorted({path.parent for name in (MAIN, SWEEP) for path in (root / HOUSE).glob(f"**/reports/*/{name}")})
    for folder in [*(f for f in folders if "golden" not in f.parts), root / HOUSE / "versions"]:
        name = folder.name
        for path in (folder / MAIN, folder / SWEEP):
            if path.exists():
                results = load(path)
                environment = elsewhere(results.environment)
                records = tuple(moved_record(record, draw) for record in results.records)
                path.write_text(dump(replace(results, environment=environment, records=records)), encoding="utf-8")
                name = environment.machine
        if folder.name != "versions":
            renamed[folder.name] = name
            folder.rename(folder.with_name(name))
    return renamed


def follow_names(root: Path, renamed: dict[str, str]) -> None:
    """Let pages and the site's table of renamed folders name the machines as they are now."""
    for path in (*root.rglob("*.md"), root / "scripts" / "website" / "pages.py"):
        if "golden" not in path.parts:
            text = path.read_text(encoding="utf-8")
            for old, new in renamed.items():
                text = text.replace(old, new)
            path.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Make the copy, render it and run pytest in it; return pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix="moved-figures-") as folder:
        root = Path(folder).resolve()
        copy_repository(root)
        follow_names(root, move_everything(root))
        variables = {**os.environ, "SETUP": "0", "PYTHON": sys.executable, "PYTHONPATH": ""}
        python = [str(root / "scripts" / "python.sh")]
        render = [*python, "scripts/check_reports.py", "--write"]
        subprocess.run(render, cwd=root, env=variables, check=True, stdout=subprocess.DEVNULL)
        chosen = arguments or ["-m", "committed and not slow", "--quiet", "scripts/tests"]
        return subprocess.run([*python, "-m", "pytest", *chosen], cwd=root, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
