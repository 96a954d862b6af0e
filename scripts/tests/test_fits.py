"""Every report fits into the memory that is free: sizes on simulated devices, whole reports under real limits.

Those of a CPU are also without a network and with empty caches, as after set-up.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import lenses
import pytest

from benchkit.processes import memory
from benchkit.report import render
from benchkit.results import SMALLER, Results, load, load_report
from benchkit.run import Lens
from whole_step.measure import build_lens

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden" / "reports"
GIB = 1 << 30
NAMES = [*lenses.manifests(), "end-to-end"]


def lens_of(name: str) -> Lens:
    return build_lens(lenses.HOUSE) if name == "end-to-end" else lenses.manifests()[name].build()


def fitted(name: str, available: float, *, quick: bool = False, device: str = "cuda") -> tuple[dict, dict]:
    """The configuration that is asked for, and what is different in it where so much is free."""
    lens = lens_of(name)
    asked = dict(lens.configure(device, quick))
    return asked, {} if lens.fit is None else dict(lens.fit(asked, device, available))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quick", [True, False], ids=["quick", "whole"])
def test_a_smaller_configuration_has_the_same_entries_and_says_so(name, quick):
    asked, _ = fitted(name, math.inf, quick=quick)
    differences = [fitted(name, gib * GIB, quick=quick)[1] for gib in (8, 16, 24, 40)]
    for changes in differences:
        assert bool(changes) == bool(changes.get(SMALLER))
        assert all("free" in sentence for sentence in changes.get(SMALLER, ()))
        assert changes.keys() - asked.keys() <= {SMALLER, "block_size"}
    assert [bool(changes) for changes in differences] == sorted((bool(c) for c in differences), reverse=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_there_is_room_nothing_is_smaller(name, device):
    assert fitted(name, math.inf, device=device)[1] == {}


@pytest.mark.parametrize("name", NAMES)
def test_on_a_cpu_every_size_fits_into_six_gibibytes(name):
    assert fitted(name, 6 * GIB, device="cpu")[1] == {}


def test_a_report_names_the_sizes_that_fit():
    results = load_report(GOLDEN / "gpu")
    asked, changes = fitted("end-to-end", 16 * GIB)
    changes["variants"] = results.configuration["variants"]
    small = Results(results.lens, results.environment, {**asked, **changes}, results.records)
    text = render(small, lens_of("end-to-end").report)
    assert f"| Sizes that fit | {changes[SMALLER][0]} |" in text
    assert f"batch {changes['batch_size']}" in text
    assert "Sizes that fit" not in render(results, lens_of("end-to-end").report)


@contextmanager
def six_gibibytes() -> Iterator[Callable[[], None]]:
    """Yield what a child calls before it starts, so that it and its children have 6 GiB of main memory.

    A control group holds them all together, where this user may make one; otherwise each process has a limit on its
    data.
    """
    with ExitStack() as stack:
        for folder, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
            group = Path("/sys/fs/cgroup", folder, f"framework-internals-{os.getpid()}")
            try:
                group.mkdir()
                stack.callback(group.rmdir)
                (group / limit).write_text(str(6 * GIB))
            except OSError:
                continue
            yield partial(_join, group)
            return
        yield partial(resource.setrlimit, resource.RLIMIT_DATA, (6 * GIB, 6 * GIB))


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def report_of(
    name: str,
    folder: Path,
    device: str,
    *,
    through: Sequence[str] = (),
    before: Callable[[], None] | None = None,
    **variables: str,
) -> Results:
    """The results of a quick run, which ends without a traceback of its own and writes a report."""
    script = ROOT / ("scripts/end_to_end.py" if name == "end-to-end" else f"framework-internals/{name}/scripts/run.py")
    run = subprocess.run(
        [*through, sys.executable, str(script), "--quick", "--out", str(folder), "--device", device],
        preexec_fn=before,
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    assert (folder / "report.md").exists()
    return load(folder / "results.json")


def of_memory(results: Results) -> list[str]:
    """What is missing for want of memory."""
    lacking = ("not enough memory", "are free", "were free")
    return [
        f"{absence.what}: {absence.why}"
        for absence in results.absences
        if any(words in absence.why for words in lacking)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("_jax_as_users_have_it")
def test_a_report_on_a_cpu_is_complete_with_six_gibibytes_and_no_network(name, tmp_path):
    alone = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        alone = []
    caches = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    with six_gibibytes() as limit:
        results = report_of(name, tmp_path / "out", "cpu", through=alone, before=limit, **caches)
    assert results.complete
    assert of_memory(results) == []
    if not alone:
        pytest.skip("right with six gibibytes, but there is no network namespace of one's own here")


@contextmanager
def left_free_on_the_gpu(gib: int) -> Iterator[None]:
    """Hold all other memory of the GPU in a process of its own."""
    program = (
        "import sys, torch\n"
        "free, _ = torch.cuda.mem_get_info()\n"
        f"held = torch.empty(max(free - {gib * GIB}, 1), dtype=torch.uint8, device='cuda')\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            yield
        finally:
            holder.stdin.close()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("gib", [8, 16, 24, 40])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("_jax_as_users_have_it")
def test_a_report_on_a_gpu_is_complete_with_what_is_left_free(name, gib, tmp_path):
    if memory.free("cuda") < gib * GIB:
        pytest.skip(f"{memory.gib(memory.free('cuda'))} are free")
    with left_free_on_the_gpu(gib):
        results = report_of(name, tmp_path, "cuda")
    assert results.complete
    assert of_memory(results) == []
