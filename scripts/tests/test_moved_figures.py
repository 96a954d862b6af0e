"""The proof that no test knows a measured figure: what is moved, and the guard that names the tests it concerns."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import move_figures
import pytest

from benchkit import Quantity, Record
from benchkit.results import load

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden" / "reports"


def test_every_figure_is_moved_within_its_bound_and_keeps_its_order():
    record = Record(
        "step",
        {"n": 8},
        {"time": Quantity(2.0, "s", 1.9, 2.2, 9, "p20-p80"), "calls": Quantity(40, "")},
        {"shares": [0.25, {"loss": 5.5}], "position": 3, "fused": True, "name": "a"},
    )
    found = move_figures.moved_record(record, random.Random(0))
    time, calls = found["time"], found["calls"]
    assert time.low < time.value < time.high
    assert time.high / time.low == pytest.approx(2.2 / 1.9)
    assert 0 < abs(time.value / 2.0 - 1) <= 0.15
    assert isinstance(calls.value, int)
    assert found.labels == record.labels
    share, nested = found.data["shares"]
    assert 0 < abs(share / 0.25 - 1) <= 0.15
    assert nested["loss"] / 5.5 == pytest.approx(share / 0.25)
    assert (found.data["position"], found.data["fused"], found.data["name"]) == (3, True, "a")


def test_the_machines_are_others_and_their_folders_follow(tmp_path):
    house = tmp_path / "framework-internals"
    before = {}
    for golden in ("cpu", "gpu"):
        before[golden] = load(GOLDEN / golden / "results.json")
        shutil.copytree(GOLDEN / golden, house / "reports" / before[golden].environment.machine)
        shutil.copytree(GOLDEN / golden, house / "lens" / "tests" / "golden" / "reports" / golden)
    shutil.copytree(GOLDEN / "cpu", house / "versions")
    renamed = move_figures.move_everything(tmp_path)
    assert set(renamed) == {results.environment.machine for results in before.values()}
    for old, new in renamed.items():
        assert old != new
        assert not (house / "reports" / old).exists()
        after = load(house / "reports" / new / "results.json")
        assert after.environment.machine == new
        (known,) = (results for results in before.values() if results.environment.machine == old)
        assert after.environment.cores != known.environment.cores
        pairs = list(zip(known.records, after.records, strict=True))
        figures = [(a[name], b[name]) for a, b in pairs for name in a.values if a[name].unit]
        assert figures
        assert all(a.value == 0 or a.value != b.value for a, b in figures)
    for golden in before:
        kept = house / "lens" / "tests" / "golden" / "reports" / golden / "results.json"
        assert kept.read_bytes() == (GOLDEN / golden / "results.json").read_bytes()


READER = """
from pathlib import Path
import pytest

REPORT = Path(__file__).parents[{up}] / "framework-internals" / "lens" / "reports" / "machine" / "report.md"
{at_import}

@pytest.fixture(scope="module")
def report():
    return REPORT.read_text()

{marker}
def test_it(report):
    assert report
"""


@pytest.mark.parametrize(
    ("folder", "marker", "at_import", "told"),
    [
        ("scripts/tests", "@pytest.mark.committed", "", "1 passed"),
        ("scripts/tests", "", "", "report.md without the marker `committed`; render frozen results instead"),
        ("shared/tests", "@pytest.mark.committed", "", "report.md without the marker `committed`"),
        ("scripts/tests", "@pytest.mark.committed", "REPORT.read_text()", "was read while tests were collected"),
    ],
)
def test_a_test_that_reads_a_committed_report_says_so(folder, marker, at_import, told, tmp_path):
    report = tmp_path / "framework-internals" / "lens" / "reports" / "machine" / "report.md"
    report.parent.mkdir(parents=True)
    report.write_text("1.23×")
    (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    committed: a\n    fuzz: b\n")
    (tmp_path / folder / "test_reader.py").write_text(READER.format(up=2, marker=marker, at_import=at_import))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", folder],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told in done.stdout + done.stderr
    assert (done.returncode == 0) == (told == "1 passed")
