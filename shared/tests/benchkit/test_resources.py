"""What a process may use: control groups and limits, and a cache folder where the usual one cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchkit import UserError
from benchkit.processes import resources


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A control group within another, in which this process is."""
    inner = tmp_path / "batch" / "job"
    inner.mkdir(parents=True)
    read = resources._text
    monkeypatch.setattr(
        resources, "_text", lambda path: "0::/batch/job\n" if str(path) == "/proc/self/cgroup" else read(path)
    )
    return tmp_path


def test_a_quota_of_any_group_around_limits_the_processors(groups):
    without = resources.processors(groups)
    assert without == len(os.sched_getaffinity(0))
    (groups / "batch" / "job" / "cpu.max").write_text("max 100000\n")
    assert resources.processors(groups) == without
    (groups / "batch" / "cpu.max").write_text("50000 100000\n")
    assert resources.processors(groups) == 1


def test_the_tightest_limit_is_what_is_available(groups, tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  8192 kB\nMemAvailable:  4096 kB\n")
    assert resources.available_memory(groups, meminfo) == 4096 * 1024
    job = groups / "batch" / "job"
    (job / "memory.max").write_text("3000000\n")
    (job / "memory.current").write_text("2500000\n")
    (job / "memory.stat").write_text("anon 1\ninactive_file 400000\n")
    assert resources.available_memory(groups, meminfo) == 900000
    (groups / "batch" / "memory.max").write_text("100\n")
    (groups / "batch" / "memory.current").write_text("200\n")
    assert resources.available_memory(groups, meminfo) == 0


def test_a_control_group_of_version_1_counts_too(groups, tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable:  4096 kB\n")
    read = resources._text
    lines = "4:memory:/batch\n3:cpu,cpuacct:/other\n0::/\n"
    monkeypatch.setattr(resources, "_text", lambda path: lines if str(path) == "/proc/self/cgroup" else read(path))
    batch = groups / "memory" / "batch"
    batch.mkdir(parents=True)
    (batch / "memory.limit_in_bytes").write_text("3000000\n")
    (batch / "memory.usage_in_bytes").write_text("2500000\n")
    (batch / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 400000\n")
    assert resources.available_memory(groups, meminfo) == 900000


@pytest.mark.parametrize("option", ["v", "d"])  # the address space, data
def test_a_limit_of_the_process_counts(option):
    program = "from benchkit.processes.resources import available_memory; print(available_memory())"
    limited = subprocess.run(
        ["bash", "-c", f'ulimit -{option} 4000000; exec "{sys.executable}" -c "{program}"'],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0 < int(limited.stdout) < 4_000_000 * 1024


@pytest.fixture
def cache(monkeypatch):
    """The function, with nothing remembered and nothing named."""
    monkeypatch.delenv("FRAMEWORK_INTERNALS_BUILD_DIR", raising=False)
    return resources.user_cache


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_a_cache_that_is_empty_or_relative_is_not_the_current_folder(cache, value, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache() == tmp_path / "home" / ".cache" / "framework-internals"
    assert cache().is_dir()


def test_a_named_folder_is_used_or_refused(cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FRAMEWORK_INTERNALS_BUILD_DIR", str(tmp_path / "file"))
    with pytest.raises(
        UserError, match=r"FRAMEWORK_INTERNALS_BUILD_DIR: cannot write into .*file.*name another folder"
    ):
        cache()
    monkeypatch.setenv("FRAMEWORK_INTERNALS_BUILD_DIR", str(tmp_path / "named"))
    assert cache() == tmp_path / "named"


def test_a_home_that_cannot_be_written_leaves_a_temporary_folder(cache, tmp_path, monkeypatch, capsys):
    (tmp_path / "home").write_text("")  # where a folder should be: refused to root, too
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(resources.tempfile, "tempdir", str(tmp_path))
    folder = cache()
    assert folder == tmp_path / f"framework-internals-{os.getuid()}"
    assert folder.stat().st_mode & 0o077 == 0
    assert len(capsys.readouterr().err.splitlines()) == 1
    folder.chmod(0o777)  # another user could put a library there, which this process would load
    with pytest.raises(UserError, match="can write into it"):
        cache()


def test_a_user_without_a_home_has_a_temporary_folder(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(resources.os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(resources.tempfile, "tempdir", str(tmp_path))
    assert cache() == tmp_path / f"framework-internals-{os.getuid()}"


def test_a_link_in_the_temporary_folder_is_not_followed(cache, tmp_path, monkeypatch):
    (tmp_path / "home").write_text("")
    (tmp_path / "elsewhere").mkdir()
    Path(tmp_path, f"framework-internals-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(resources.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match="FRAMEWORK_INTERNALS_BUILD_DIR"):
        cache()
