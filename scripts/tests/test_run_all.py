"""The main job's command line, what it leaves behind, and the index."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import check_reports
import index_reports
import lenses
import pytest
import run_all
import warm_python

from benchkit.report import figures
from benchkit.results import load, load_report
from benchkit.run import committed_reports
from whole_step import tuning

# run_all.py forks with a function of its own to run in the child. It never imports JAX, which warns of that; another
# test of the process may have.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")

ROOT = Path(__file__).resolve().parents[2]
HOUSE = ROOT / "framework-internals"
JOBS = len(run_all.JOBS)


def test_every_lens_is_declared_in_its_folder_and_nowhere_else():
    declared = lenses.manifests()
    assert [manifest.place for manifest in declared.values()] == list(range(1, len(declared) + 1))
    assert {path.parent.name for path in HOUSE.glob("*/pyproject.toml")} == set(declared)
    assert list(run_all.JOBS) == [run_all.END_TO_END, *declared]
    assert {name: lens.name for name, lens in index_reports.all_lenses().items()} == {
        "end to end": "end-to-end",
        **{name: name for name in declared},
    }


def test_every_lens_is_checked_by_mypy_and_import_linter():
    """Their settings take no patterns: the only two lists of packages that are written out."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    for name, manifest in lenses.manifests().items():
        package = manifest.entry_point.partition(".")[0]
        assert package in tools["mypy"]["packages"]
        assert f"framework-internals/{name}/src" in tools["mypy"]["mypy_path"]
        assert package in tools["importlinter"]["root_packages"]


def test_a_folder_that_declares_no_lens_or_two_is_an_error(tmp_path):
    manifest = tmp_path / "pyproject.toml"
    manifest.write_text('[project]\nname = "a"\n')
    with pytest.raises(KeyError, match="entry-points"):
        lenses.read(manifest)
    manifest.write_text(f'[project.entry-points."{lenses.GROUP}"]\na = "a:b"\nc = "c:d"\n')
    with pytest.raises(ValueError, match="too many values"):
        lenses.read(manifest)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm_python.run([ROOT / "scripts" / "run_all.py", *arguments], env={**os.environ, **environment})


@pytest.mark.committed  # it reads the index
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nonsense"], "run_all: --only takes one of end-to-end, dispatcher-trace, "),
        (["--device", "tpu"], "run_all: --device takes auto, cpu or cuda, got 'tpu'"),
        (["--device", "cuda"], "run_all: --device cuda was asked for, but "),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(arguments, message):
    before = (HOUSE / "README.md").read_bytes()
    failed = run(*arguments, CUDA_VISIBLE_DEVICES="")
    assert failed.returncode == 2
    assert failed.stderr.startswith(message)
    assert len(failed.stderr.strip().splitlines()) == 1
    assert failed.stdout == ""
    assert (HOUSE / "README.md").read_bytes() == before


@pytest.fixture
def house(tmp_path, monkeypatch):
    """Every job as a script that prints a path; compile-bench fails."""
    for name, path in run_all.JOBS.items():
        script = tmp_path / path
        script.parent.mkdir(parents=True)
        status = 3 if name == "compile-bench" else 0
        report = tmp_path / f"{name}.md"
        script.write_text(
            f"import pathlib, sys\nprint(sys.argv[1:])\npathlib.Path({str(report)!r}).touch()\nprint({str(report)!r})\n"
            f"sys.exit({status})\n"
        )
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    monkeypatch.setattr(run_all, "write_index", lambda **_: 0)
    monkeypatch.setattr(run_all, "_first_builds", lambda report: 0.0)
    monkeypatch.setattr(tuning, "tuned", lambda device: True)
    monkeypatch.setenv("BENCHKIT_COMMIT", "0123456789")
    return tmp_path


@pytest.fixture
def golden_house(tmp_path, monkeypatch) -> Path:
    """The folder of the lenses, with the frozen reports of the tests as the committed ones."""
    moved = {}
    for name, lens in index_reports.all_lenses().items():
        root = tmp_path / (name if name in lenses.manifests() else "")
        for golden in check_reports.golden_reports(lens):
            machine = load(golden / "results.json").environment.machine
            report = root / "reports" / machine
            shutil.copytree(golden, report)
            (report / "figures").mkdir()
            for figure in figures(load_report(report), lens.report):  # test_reports.py draws them
                (report / "figures" / f"{figure.name}.svg").touch()
        moved[name] = dataclasses.replace(lens, root=root)
    monkeypatch.setattr(index_reports, "HOUSE", tmp_path)
    monkeypatch.setattr(index_reports, "all_lenses", lambda: moved)
    return tmp_path


@pytest.fixture
def in_this_process(house, monkeypatch):
    """The same jobs without processes; the value is the set of those that fail."""
    failing = {"compile-bench"}

    def run_job(job: str, **_) -> run_all.Outcome:
        report = house / f"{job}.md"
        report.touch()
        return run_all.Outcome(job, 0.0, *((3, None) if job in failing else (0, report)))

    monkeypatch.setattr(run_all, "run_job", run_job)
    return failing


def run_them(**options) -> int:
    unset = {**dict.fromkeys(("quick", "fresh", "publish", "full"), False), "only": None, "budget": None}
    try:
        run_all.main(**{"device": "cpu", **unset, **options})
    except run_all.typer.Exit as stopped:
        return stopped.exit_code
    except SystemExit as stopped:
        return stopped.code
    return 0


def test_started_again_it_does_what_is_missing_and_then_begins_anew(in_this_process, capsys):
    assert run_them() == 1
    capsys.readouterr()
    in_this_process.clear()
    assert run_them() == 0
    printed = capsys.readouterr().out
    assert f"1/{JOBS} end-to-end was finished by the previous run" in printed
    assert f"3/{JOBS} compile-bench on cpu" in printed
    assert f"{JOBS}/{JOBS} {list(run_all.JOBS)[-1]} was finished by the previous run" in printed
    assert run_them() == 0
    assert "from the run before" not in capsys.readouterr().out


@pytest.mark.parametrize("change", ["fresh", "commit", "report", "cut short", "size"])
def test_what_cannot_be_gone_on_with_is_measured_anew(change, house, in_this_process, monkeypatch, capsys):
    assert run_them() == 1
    capsys.readouterr()
    kept = house / "build" / "run_all" / "cpu.json"
    if change == "commit":
        monkeypatch.setenv("BENCHKIT_COMMIT", "abcdef0123")
    if change == "report":
        (house / "end-to-end.md").unlink()
    if change == "cut short":
        kept.write_text(kept.read_text()[:20])
    run_them(fresh=change == "fresh", quick=change == "size")
    assert f"1/{JOBS} end-to-end on cpu" in capsys.readouterr().out


def test_a_second_run_is_refused_while_one_or_a_job_that_outlived_it_is_under_way(in_this_process, capsys):
    with run_all.only_run("cpu", run_all.Size()) as kept:
        assert run_them() == 2
        assert "another run_all on cpu is under way" in capsys.readouterr().err
        assert run_them(quick=True) == 1  # it writes other reports
        outlives = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[kept.lock])
    capsys.readouterr()
    assert run_them() == 2
    outlives.communicate(b"\n")
    assert run_them() == 1


def test_a_folder_that_cannot_be_written_is_one_line(house, capsys):
    (house / "build").write_text("a file where the folder should be")
    assert run_them() == 2
    printed = capsys.readouterr().err
    assert printed.startswith("run_all: ")
    assert "build" in printed
    assert len(printed.strip().splitlines()) == 1


def test_it_goes_on_past_a_failing_lens_and_names_it(house, capsys):
    assert run_them() == 1
    printed = capsys.readouterr()
    assert "run_all: failed: compile-bench" in printed.err
    assert "failed with status 3" in printed.out
    assert all(f"{number}/{JOBS} {name}" in printed.out for number, name in enumerate(run_all.JOBS, start=1))


def test_an_interrupt_of_the_run_alone_ends_its_job_too(house, monkeypatch, capsys):
    monkeypatch.setattr(run_all, "ENDING", 0.1)
    job = house / run_all.JOBS["jax-baseline"]
    job.write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)\n")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs this in background
    try:
        assert run_them() == run_all.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    printed = capsys.readouterr()
    assert "interrupted" in printed.out
    assert list(run_all.JOBS)[-1] not in printed.out
    assert printed.err.endswith("run_all: failed: compile-bench\nrun_all: interrupted: jax-baseline\n")


def test_a_quick_job_alone_is_always_run_and_leaves_the_index_alone(in_this_process, monkeypatch, capsys):
    monkeypatch.setattr(run_all, "write_index", lambda **_: pytest.fail("it was written"))
    for _ in range(2):
        assert run_them(only=["custom-ops"], quick=True) == 0
        printed = capsys.readouterr().out
        assert "1/1 custom-ops on cpu" in printed
        assert not re.search("jax-baseline|is the index", printed)


def test_the_index_says_which_reports_are_of_which_hardware():
    def entry(lens, cpu, day=1):
        machine = SimpleNamespace(gpu=None, cpu=cpu, cores=2, memory_gib=24, date=f"2026-01-0{day}T00:00:00Z")
        return index_reports.Entry(lens, Path(), SimpleNamespace(environment=machine), "", "")

    same = [entry("one", "A"), entry("two", "A")]
    assert index_reports.measured_on(same) == "A, 2 cores, 24 GiB; measured 2026-01-01"
    mixed = [entry("one", "A", 3), entry("two", "B"), entry("three", "A")]
    described = "A, 2 cores, 24 GiB (one, three); B, 2 cores, 24 GiB (two); measured from 2026-01-01 to 2026-01-03"
    assert index_reports.measured_on(mixed) == described


def test_the_figure_in_the_index_is_this_machines_or_of_the_gpu_with_most_records():
    def entry(folder, gpu, records):
        results = SimpleNamespace(environment=SimpleNamespace(gpu=gpu), records=[None] * records)
        return index_reports.Entry("lens", Path(folder), results, "", "")

    reports = [entry("own-cpu", None, 1), entry("h100", "H100", 2), entry("h200", "H200", 3), entry("zen-4", None, 4)]
    by_weight = sorted(reports, key=index_reports._weight)
    assert [each.folder.name for each in by_weight] == ["zen-4", "h100", "h200", "own-cpu"]


def test_the_index_has_a_figure_for_each_lens_and_a_sentence_for_each_machine(golden_house):
    sections = index_reports.render().partition("\n## The machines\n")[0].split("\n## ")[1:]
    for section, lens in zip(sections, index_reports.all_lenses().values(), strict=True):
        (figure,) = re.findall(r"\[!\[.+\]\((\S+\.svg)\)\]", section)
        assert (golden_house / figure).is_file()
        rows = re.findall(r"^\| \[(.+?)\]\((\S+)\) \| (.+) \|$", section, re.MULTILINE)
        environments = [load(path / "results.json").environment for path in committed_reports(lens.root)]
        gpus_first = sorted(environments, key=lambda environment: environment.gpu is None)
        assert [row[0] for row in rows] == [environment.described for environment in gpus_first]
        assert [environment.gpu is None for environment in gpus_first] == [False, True]
        for _, report, finding in rows:
            assert (golden_house / report).is_file()
            assert len(finding.split()) <= 30, finding


@pytest.mark.parametrize(
    ("options", "arguments", "index"),
    [
        ({}, [], "framework-internals/THIS_MACHINE.md is the index"),
        ({"publish": True}, ["--publish"], "framework-internals/README.md is the index"),
    ],
)
def test_only_a_run_that_is_published_writes_the_committed_index(options, arguments, index, house, monkeypatch, capsys):
    written = []
    monkeypatch.setattr(run_all, "write_index", lambda *, publish: written.append(publish) or 0)
    jobs = []
    monkeypatch.setattr(
        run_all, "run_job", lambda job, *, size, **_: jobs.append(size.arguments) or run_all.Outcome(job, 1.0, 0, house)
    )
    assert run_them(only=["custom-ops"], **options) == 0
    assert (jobs, written) == ([arguments], [bool(options)])
    assert index in capsys.readouterr().out


def outcomes_of(monkeypatch, seconds: float, apart: float = 0.0) -> list[tuple[str, float]]:
    """Replace the jobs by ones that take so many seconds; the result fills with each job and its budget."""
    budgets = []

    def job_of(job, *, seconds: float, **_) -> run_all.Outcome:
        budgets.append((job, seconds))
        return run_all.Outcome(job, took, 0, Path(__file__), apart)

    took = seconds
    monkeypatch.setattr(run_all, "run_job", job_of)
    return budgets


@pytest.mark.parametrize(
    ("kept", "forbidden", "writable", "set_"),
    [(True, True, True, False), (False, False, True, False), (False, True, True, True), (False, False, False, True)],
    ids=["kept already", "will be kept", "forbidden", "read-only"],
)
def test_jobs_keep_bytecode_where_each_would_compile_anew(kept, forbidden, writable, set_, tmp_path, monkeypatch):
    module = tmp_path / "torch" / "_dynamo" / "convert_frame.py"
    module.parent.mkdir(parents=True)
    module.touch()
    cached = module.parent / "__pycache__" / f"convert_frame.{sys.implementation.cache_tag}.pyc"
    cached.parent.mkdir()
    if kept:
        cached.touch()
    found = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(run_all.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(sys, "dont_write_bytecode", forbidden)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    monkeypatch.setenv("FRAMEWORK_INTERNALS_BUILD_DIR", str(tmp_path / "cache"))
    here = run_all.bytecode()
    assert bool(here) == set_
    if set_:
        program = "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)"
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **here}
        shown = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True).stdout
        assert shown.split() == ["False", str(tmp_path / "cache" / "bytecode")]


@pytest.mark.parametrize("tuned", [True, False])
def test_jobs_share_the_time_and_what_one_leaves_goes_to_the_others(tuned, house, monkeypatch, capsys):
    budgets = outcomes_of(monkeypatch, 10.0)
    monkeypatch.setattr(tuning, "tuned", lambda device: tuned)
    assert run_them(budget="10m") == 0
    assert [job for job, _ in budgets] == list(run_all.JOBS)
    shares, left = dict(run_all.SHARES), 600.0
    shares[run_all.END_TO_END] += 0 if tuned else run_all.TUNING
    for job, seconds in budgets:
        measuring = left - run_all.STARTING * len(shares)
        assert seconds == pytest.approx(run_all.STARTING + measuring * shares[job] / sum(shares.values()))
        del shares[job]
        left -= 10
    assert seconds == pytest.approx(600 - 10 * (JOBS - 1))
    assert "10.0 min to go at most" in capsys.readouterr().out
    assert run_them(budget="10m") == 0
    assert f"{10 * JOBS} s to go by the last run" in capsys.readouterr().out


def test_first_builds_take_nothing_from_the_budget(house, monkeypatch):
    budgets = outcomes_of(monkeypatch, 100.0, apart=100.0)
    assert run_them(budget="60s") == 0
    assert budgets[-1][1] == pytest.approx(60)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 720),
        ({"quick": True}, 180),
        ({"full": True}, math.inf),
        ({"publish": True}, math.inf),
        ({"only": ["custom-ops"]}, math.inf),
        ({"only": ["custom-ops"], "budget": "90s"}, 90),
    ],
)
def test_the_budget_of_each_kind_of_run(options, seconds, house, monkeypatch):
    budgets = outcomes_of(monkeypatch, 0.0)
    assert run_them(**options) == 0
    assert budgets[-1][1] == seconds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"full": True, "quick": True}, "--full has no budget"),
        ({"full": True, "budget": "3m"}, "--full has no budget"),
        ({"budget": "soon"}, "expected a duration such as"),
        ({"quick": True, "publish": True}, "--publish writes the reports of a whole run"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said, house, capsys):
    assert run_them(**options) == 2
    assert capsys.readouterr().err.startswith(f"run_all: {said}")


def test_what_a_run_writes_is_not_tracked(tmp_path):
    """The folders that a run writes into are ignored in every lens, and so is the index of this machine."""
    written = [
        f"{home}/reports/own-{machine}/results.json"
        for home in ("framework-internals", *(f"framework-internals/{lens}" for lens in lenses.manifests()))
        for machine in ("amd-avx512-2-cores-24gib", "amd-avx512-2-cores-24gib-quick")
    ]
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "-C", tmp_path, "init", "-q"], check=True)
    written.append("framework-internals/THIS_MACHINE.md")
    ignored = subprocess.run(
        ["git", "-C", tmp_path, "check-ignore", *written], capture_output=True, text=True, check=False
    )
    assert ignored.stdout.splitlines() == written


def test_an_index_that_cannot_be_written_is_a_failure(in_this_process, monkeypatch, capsys):
    monkeypatch.setattr(run_all, "write_index", lambda **_: 1)
    assert run_them(only=["custom-ops"]) == 1
    assert "failed: index of reports" in capsys.readouterr().err
