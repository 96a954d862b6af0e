"""Reports of small frozen results: what they render to, their form, and the check of the committed ones."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import check_reports
import index_reports
import pytest
import random_programs
import version_matrix

from benchkit import UserError
from benchkit.report import figures, write
from benchkit.results import dump, load, load_report
from lowering.table import Evidence, Row, write_table

LENSES = index_reports.all_lenses()
GOLDEN = [(name, path) for name, lens in LENSES.items() for path in check_reports.golden_reports(lens)]


@pytest.mark.parametrize(("name", "directory"), GOLDEN, ids=[f"{name}-{path.name}" for name, path in GOLDEN])
def test_a_report_is_a_pure_function_of_its_results_and_has_its_form(name, directory, tmp_path):
    """After a change of the wording: scripts/check_reports.py --write."""
    declare, kept = LENSES[name].report, tmp_path / directory.name
    shutil.copytree(directory, kept)
    (kept / "figures").mkdir()
    for figure in figures(load_report(directory), declare):
        (kept / "figures" / f"{figure.name}.svg").touch()
    assert list(check_reports.problems(kept, load_report(kept), declare)) == []


# Those of the other lenses take two seconds and more.
DRAWN_SOONEST = {("rmsnorm-fused", "cpu"), ("dispatcher-trace", "cpu")}


@pytest.mark.parametrize(
    ("name", "directory"),
    [
        pytest.param(
            name,
            path,
            marks=() if (name, path.name) in DRAWN_SOONEST else pytest.mark.slow,
            id=f"{name}-{path.name}",
        )
        for name, path in GOLDEN
    ],
)
def test_every_figure_of_a_report_is_drawn(name, directory, tmp_path):
    shutil.copy(directory / "results.json", tmp_path)
    page = write(tmp_path, LENSES[name].report).read_text()
    drawn = {f"figures/{path.name}" for path in (tmp_path / "figures").iterdir()}
    assert drawn == set(re.findall(r"\((figures/[^)]+\.svg)\)", page))


def test_every_lens_has_frozen_results_of_both_kinds_of_machine():
    assert {(name, path.name) for name, path in GOLDEN} == {(name, kind) for name in LENSES for kind in ("cpu", "gpu")}


@pytest.fixture
def house(tmp_path, monkeypatch) -> Path:
    """A repository with one lens, whose committed report is a frozen one, and nothing else to check."""
    name, directory = GOLDEN[0]
    results = load(directory / "results.json")
    home = tmp_path / "framework-internals"
    committed = home / "reports" / results.environment.machine
    shutil.copytree(directory, committed)
    lens = replace(LENSES[name], root=home)
    write(committed, lens.report)
    monkeypatch.setattr(index_reports, "ROOT", tmp_path)
    monkeypatch.setattr(index_reports, "HOUSE", home)
    monkeypatch.setattr(index_reports, "all_lenses", lambda: {name: lens})
    (home / "README.md").write_text(index_reports.render())
    monkeypatch.setattr(version_matrix, "DIRECTORY", committed)
    monkeypatch.setattr(check_reports, "VERSIONS", lens.report)
    return committed


def test_the_check_finds_nothing_where_everything_is_as_rendered(house):
    assert check_reports.check() == []


def test_the_check_names_what_was_edited_moved_or_lost(house):
    (house.parent / "elsewhere").symlink_to(house)
    report = house / "report.md"
    report.write_text(report.read_text() + "edited")
    next((house / "figures").iterdir()).unlink()
    found = "\n".join(check_reports.check())
    assert "elsewhere: it was measured on " in found
    assert f"{house.name}: report.md is not what its results render to" in found
    assert ".svg is missing" in found
    assert "framework-internals/README.md is not what the results render to" in found
    report.unlink()
    (house.parents[1] / "README.md").unlink()
    found = "\n".join(check_reports.check())
    assert f"{house.name}: report.md is missing" in found
    assert "framework-internals/README.md is not what the results render to" in found


def test_results_of_another_lens_are_refused_by_name(house):
    results = load(house / "results.json")
    (house / "results.json").write_text(dump(replace(results, lens="another-lens")))
    for read in (check_reports.check, index_reports.render):
        with pytest.raises(UserError, match=f"{house.name} holds results of another-lens, not of {results.lens}"):
            read()


def test_the_check_names_a_page_that_was_edited_and_a_kernel_that_did_not_win(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text(random_programs.render() + "edited")
    monkeypatch.setattr(random_programs, "PAGE", tmp_path / "page.md")
    evidence = Evidence("gpt", 1.05, 1.03, 1.07, 0.98, 1.02, "a processor", "2.13.0", "0123456789", "2026-01-01")
    row = Row("cpu-avx2-amd", "norm", "float32", "training", {"rows": 8}, "kernel", evidence)
    lost = replace(row, operator="gelu", evidence=replace(evidence, control_high=1.04))
    write_table(tmp_path / "table.json", [row, lost, replace(lost, operator="other", choice="formula")])
    monkeypatch.setattr(check_reports, "LOWERINGS", tmp_path / "table.json")
    assert check_reports.check_tables() == [
        "page.md is not what its records render to",
        "table.json: gelu on cpu-avx2-amd took a kernel that did not win",
    ]


def test_each_machine_is_a_row(house):
    third = house.with_name("intel-avx2-2-cores-16gib")
    shutil.copytree(house, third)
    document = json.loads((third / "results.json").read_text())
    document["environment"] |= {"cpu": "Intel(R) Xeon(R)", "instructions": "avx2", "memory": 2**34 - 2**20}
    (third / "results.json").write_text(json.dumps(document))
    rows = [line for line in index_reports.render().splitlines() if line.startswith("| [")]
    assert [row.split("]")[0] for row in rows] == [
        "| [an AVX-512 AMD server, two cores",
        "| [an AVX2 Intel server, two cores",
    ]


def test_own_reports_lead_an_index_of_their_own(house):
    own = house.with_name(f"own-{house.name}")
    shutil.copytree(house, own)
    committed = index_reports.render()
    assert "this machine" not in committed
    assert committed == (index_reports.HOUSE / "README.md").read_text()
    text = index_reports.render(own=True)
    first = next(line for line in text.splitlines() if line.startswith("| ["))
    assert first.startswith(f"| [this machine: an AVX-512 AMD server, two cores](reports/{own.name}/report.md) |")
    index_reports.main(own=True)
    assert (index_reports.HOUSE / "THIS_MACHINE.md").read_text() == text
    assert (index_reports.HOUSE / "README.md").read_text() == committed
    assert check_reports.check() == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("**a b.**\n" + "x\n" * 260, "lines are unfolded, more than 250"),
        ("**A.**", "the first 40 lines hold no table"),
        ("**A.**\n" + "x\n" * 50 + "![a](figures/a.svg)", "the first 40 lines hold no figure"),
        ("![](figures/a.svg)", "a figure has no alternative text"),
        ("![a](figures/a.svg)\n*a*", "a caption is said twice"),
        ("<details><summary>a</summary>", "a fold is not closed"),
    ],
)
def test_a_report_that_lacks_its_form_is_told_so(text, fault):
    assert any(fault in found for found in check_reports.faults_of_form(text))
