"""What a run says of where it ran."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python

from benchkit import environment
from benchkit.environment import processor

HERE = Path(__file__).parent


def make_repository(folder: Path) -> None:
    """A repository with everything in the folder committed."""
    identity = {f"GIT_{who}_{what}": "t@t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for arguments in (("init",), ("add", "."), ("commit", "-m", "first")):
        subprocess.run(
            ["git", "-C", folder, *arguments], check=True, capture_output=True, env={**os.environ, **identity}
        )


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.delenv("BENCHKIT_COMMIT", raising=False)
    (tmp_path / "constraints.txt").write_text("")
    (tmp_path / "code.py").write_text("1")
    report = tmp_path / "framework-internals" / "lens" / "reports" / "cpu" / "report.md"
    report.parent.mkdir(parents=True)
    report.write_text("old")
    make_repository(tmp_path)
    return tmp_path


def test_the_commit_and_whether_the_code_differs_from_it(repository):
    found = environment.capture("cpu", root=repository)
    assert len(found.commit) == 40
    assert found.dirty is False
    (repository / "framework-internals" / "lens" / "reports" / "cpu" / "report.md").write_text("new")
    assert environment.capture("cpu", root=repository).dirty is False  # a report is what a run writes
    (repository / "code.py").write_text("2")
    assert environment.capture("cpu", root=repository).dirty is True


def test_an_exported_tree_takes_its_commit_from_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHKIT_COMMIT", "abc123")
    found = environment.capture("cpu", root=tmp_path)
    assert (found.commit, found.dirty) == ("abc123", None)


def test_outside_a_checkout_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.delenv("BENCHKIT_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    found = environment.capture("cpu", root=tmp_path)
    assert (found.commit, found.dirty) == (None, None)


def test_a_tree_inside_another_repository_has_no_commit(repository, tmp_path):
    inside = tmp_path / "vendored" / "internals"
    (inside / "framework-internals").mkdir(parents=True)
    (inside / "constraints.txt").touch()
    assert environment.capture("cpu", root=inside).commit is None
    (inside / "code.py").touch()
    make_repository(inside)
    own = environment.capture("cpu", root=inside / "framework-internals").commit
    assert own is not None
    assert own != environment.capture("cpu", root=repository).commit


def test_a_hook_of_another_repository_does_not_name_the_commit(repository, tmp_path, monkeypatch):
    expected = environment.capture("cpu", root=repository).commit
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    make_repository(elsewhere)
    monkeypatch.setenv("GIT_DIR", str(elsewhere / ".git"))
    assert environment.capture("cpu", root=repository).commit == expected


def test_the_command_line_names_no_folder_of_this_machine(repository, monkeypatch):
    script = repository / "code.py"
    monkeypatch.setattr("sys.argv", [str(script), "--out", "/somewhere/else/entirely", "--quick"])
    assert environment.capture("cpu", root=repository).command == "python code.py --out entirely --quick"


def test_a_long_argument_and_a_program_that_hangs_end_no_run(repository, monkeypatch):
    """Neither is what a run is about: a field is left out."""
    monkeypatch.setattr("sys.argv", ["x", "a" * 5000])
    assert environment.capture("cpu", root=repository).command.endswith("a" * 5000)

    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, 30)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert environment.capture("cpu", root=repository).commit is None


def test_it_survives_the_way_through_json_and_names_the_machine():
    found = environment.capture("cpu", root=HERE)
    assert environment.Environment.from_json(dataclasses.asdict(found)) == found
    assert found.cores >= 1
    assert found.packages["numpy"]


def of(**what):
    found = environment.capture("cpu", root=HERE)
    return dataclasses.replace(found, **{"gpu": None, "family": "", "cores": 2, "memory": 25_276_502_016, **what})


@pytest.mark.parametrize(
    ("what", "name", "described"),
    [
        (
            {"cpu": "AMD EPYC", "vendor": "amd", "instructions": "avx512"},
            "amd-avx512-2-cores-24gib",
            "an AVX-512 AMD server, two cores",
        ),
        (
            {"cpu": "AMD EPYC", "vendor": "amd", "family": "family 25, model 17", "instructions": "avx512"},
            "amd-zen-4-avx512-2-cores-24gib",
            "an AVX-512 AMD server (Zen 4), two cores",
        ),
        (
            {
                "cpu": "Intel(R) Core(TM) i5",
                "vendor": "intel",
                "family": "family 6, model 154",
                "instructions": "avx2",
                "cores": 14,
                "memory": 2**34 - 1,
            },
            "intel-family-6-model-154-avx2-14-cores-16gib",
            "an AVX2 Intel processor (family 6, model 154), 14 cores",
        ),
        # Documents from before had neither of the two: what is not known is left out.
        ({"cpu": "AMD EPYC", "vendor": "", "instructions": ""}, "amd-2-cores-24gib", "an AMD server, two cores"),
        (
            {"cpu": "aarch64", "vendor": "", "instructions": "neon", "cores": 1, "memory": 7 * 10**9},
            "aarch64-neon-1-cores-7gib",
            "a NEON aarch64 processor, one core",
        ),
        (
            {"gpu": environment.Gpu("NVIDIA H200", "9.0", 132, 150_109_880_320, 1, "13.0")},
            "nvidia-h200-140gib",
            "an NVIDIA H200, 140 GiB",
        ),
    ],
)
def test_a_machine_is_named_by_what_decides_speed(what, name, described):
    assert (of(**what).machine, of(**what).described) == (name, described)


@pytest.mark.parametrize("kept_by_the_kernel", [0, 8 << 20, 512 << 20])
@pytest.mark.parametrize("installed", [4, 8, 16, 24, 32, 64, 96, 512])
def test_the_name_does_not_change_with_what_the_kernel_keeps_of_the_memory(installed, kept_by_the_kernel):
    assert of(memory=(installed << 30) - kept_by_the_kernel).memory_gib == installed


FLAGS = {"avx512": "fma avx2 avx512vl avx512bw avx512dq", "avx2": "fma avx2 avx512f", "baseline": "sse2 avx"}


@pytest.mark.parametrize("level", FLAGS)
def test_without_torch_its_rule_names_the_vector_instructions(level, tmp_path, monkeypatch):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: GenuineIntel\nflags\t\t: {FLAGS[level]}\n")
    assert processor.vector_instructions(tmp_path / "cpuinfo") == level
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert processor.vector_instructions(tmp_path / "cpuinfo") == "baseline"


@pytest.mark.parametrize("asked", ["", "avx2", "default"])
def test_the_rule_agrees_with_torch(asked):
    program = """
import sys
from benchkit.environment import processor
torch = sys.modules.pop("torch")  # which reads the variable when it is first asked
alone = processor.vector_instructions()
sys.modules["torch"] = torch
assert processor.vector_instructions() == alone, (alone, torch.backends.cpu.get_cpu_capability())
"""
    chosen = {"ATEN_CPU_CAPABILITY": asked} if asked else {}
    done = warm_python.run(["-c", program], env={**os.environ, **chosen})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", "amd"),
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", "intel"),
        ("vendor_id\t: HygonGenuine\n", "hygongenuine"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", ""),
        (None, ""),
    ],
)
def test_the_vendor_of_a_processor(tmp_path, text, vendor):
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert processor.vendor(tmp_path / "cpuinfo") == vendor


@pytest.mark.parametrize(
    ("vendor", "numbers", "design"),
    [
        ("amd", (23, 49), "Zen 2"),
        ("amd", (25, 1), "Zen 3"),
        ("amd", (25, 0x44), "Zen 3"),
        ("amd", (25, 0x61), "Zen 4"),
        ("amd", (26, 2), "Zen 5"),
        ("amd", (26, 0x50), "Zen 6"),
        ("intel", (6, 143), "Sapphire Rapids"),
        ("intel", (6, 154), "family 6, model 154"),
        ("hygongenuine", (24, 1), "family 24, model 1"),
    ],
)
def test_the_design_of_a_processor(vendor, numbers, design):
    assert processor.design(vendor, "family {}, model {}".format(*numbers)) == design


def test_a_design_without_numbers_has_no_name():
    assert processor.design("amd", "") == ""


@pytest.mark.gpu
def test_the_gpu_is_described():
    found = environment.capture("cuda", root=HERE).gpu
    assert found.multiprocessors > 0
    assert found.l2_cache > 0
    assert found.driver


def test_a_part_of_a_run_says_where_it_comes_from():
    found = dataclasses.replace(
        environment.capture("cpu", root=Path(__file__).parent), commit="0123456789abcdef", dirty=True
    )
    assert found.source == {"date": found.date, "command": found.command, "commit": found.commit, "dirty": True}
    assert environment.commit_label(found.commit, found.dirty) == "`0123456789ab`, with uncommitted changes"
    assert environment.commit_label("0123456", None) == "`0123456`"
    assert environment.commit_label(None, None) == "an unknown commit (no git checkout)"
