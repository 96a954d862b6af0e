"""Results of version 0.1: no measured number is lost, and what was derived from them is computed again."""

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchkit.report import render
from benchkit.results import Quantity, dump, load
from compile_bench.measure.records import (
    CaseRecord,
    CountedBreaks,
    EagerStart,
    FailedCell,
    ShapesRecord,
    SweepCall,
    Toolchain,
)
from compile_bench.measure.shapes import ranking
from compile_bench.measure.verdict import plan_rows
from compile_bench.report.migrate import migrate
from compile_bench.report.queries import measured_cases
from compile_bench.report.sections import REPORT

OLD = Path(__file__).parent / "golden" / "results-0.1.json"

# Figures of version 0.1 that follow from others, by record; of the counts of breaks see `breaks` and `recompiles`.
DERIVED = {
    "first steps": ("total", "rest"),
    "compilation": ("breaks", "recompiles"),
    "triage": ("breaks", "recompiles"),
}
TRIAGE = ("bill", "finding", "mended")
KINDS = (CaseRecord, CountedBreaks, EagerStart, FailedCell, ShapesRecord, SweepCall, Toolchain)


def numbers_in(plain):
    """All numbers of a JSON document other than 0 and 1, which are defaults and left out."""
    if isinstance(plain, dict):
        return sum(map(numbers_in, plain.values()), Counter())
    if isinstance(plain, (list, tuple)):
        return sum(map(numbers_in, plain), Counter())
    is_number = isinstance(plain, (int, float)) and plain not in (0, 1)
    return Counter([plain]) if is_number else Counter()


def measured_numbers(old):
    """The numbers of version 0.1 that are not derived from others."""
    found = Counter()
    for record in old.records:
        if record.name in ("agreement", *TRIAGE):
            continue
        figures = {name: each for name, each in record.values.items() if name not in DERIVED.get(record.name, ())}
        if record.name == "verdict":
            figures = {name: each for name, each in figures.items() if name == "artifact"}
        found += numbers_in({name: asdict(each) for name, each in figures.items()})
        found += numbers_in(dict(record.labels))
        if record.name == "shapes":
            found += Counter(count for count in map(int, record.data["rankings"]) if count > 1)
        if record.name != "verdict":
            found += numbers_in(record.data)
    return found


def check_numbers(path):
    """Compare every number of a document of version 0.1 with today's records.

    Returns:
        How many numbers were compared.
    """
    old, new = load(path), load(path, migrate=migrate)
    expected = measured_numbers(old)
    records = [asdict(record) for record in new.records if record.name in {kind.record_name for kind in KINDS}]
    assert numbers_in([{**each, "name": None} for each in records]) == expected
    check_derived(old, new)
    return expected.total()


def check_derived(old, new):
    """What version 0.1 stored, and the report computes today."""
    cases = {(*case.model, case.mode): case for case in measured_cases(new)}
    assert len(cases) == len(old.select("verdict"))
    eager = {each.model: each.start for each in EagerStart.select(new)}
    for record in old.records:
        labels = record.labels
        if "mode" not in labels or record.name in ("agreement", "shapes", "triage"):
            continue
        case = cases.get((labels["target"], labels["kind"], labels["mode"]))
        if record.name == "first steps":
            fields = {"cold": "cold", "tuned": "cold", "warm": "warm", "artifact": "mega"}
            model = labels["target"], labels["kind"]
            start = eager[model] if labels["mode"] == "eager" else getattr(case, fields[labels["cache"]])
            assert (start.total, start.rest) == close_to((record["total"].value, record["rest"].value))
        if record.name == "compilation":
            counts = len(case.compilation.breaks), len(case.compilation.recompiles)
            assert counts == (record["breaks"].value, record["recompiles"].value)
        if record.name == "accuracy":
            assert case.accuracy.holds == record.data["holds"]
        if record.name == "verdict":
            check_verdict(record, case)
    for record, study in zip(old.select("shapes"), ShapesRecord.select(new), strict=True):
        for count, names in record.data["rankings"].items():
            # Version 0.1 moved the simplest of those that were tied to the front.
            ranked = [each.strategy for each in ranking(list(study.strategies.values()), int(count))]
            assert [each for each in ranked if each != names[0]] == names[1:]


def close_to(expected):
    """Equal but for the last digit: Python 3.12 and later add floats more exactly than 3.11 does."""
    return pytest.approx(expected, rel=1e-12, abs=1e-12)


def check_verdict(record, case):
    verdict = case.verdict
    assert (verdict.advice, verdict.why) == (record.data["advice"], record.data["why"])
    assert verdict.cost == close_to(record["price"].value)
    for name, even in (("cold", verdict.cold), ("warm", verdict.warm), ("artifact", verdict.mega)):
        if name == "cold" and case.record.tuned:  # version 0.1 left that one out
            continue
        stored = record.data.get(name)
        assert (stored is None) == (even is None)
        if stored is not None:
            never = {name for name, steps in stored.items() if steps is None}
            assert never == {name for name, steps in asdict(even).items() if steps is None}
            steps = {name: value for name, value in stored.items() if name not in never}
            assert {name: getattr(even, name) for name in steps} == close_to(steps)
    plans = [plan for _, _, plans in plan_rows(case) for plan in plans]
    for plan, stored in zip(plans, record.data["plans"], strict=bool(record.data["plans"])):
        ratios = {name: stored[name] for name in ("ratio", "low", "high")}
        assert {name: getattr(plan, name) for name in ratios} == close_to(ratios)
        assert {**asdict(plan), **ratios} == {**stored, "compared": not case.accuracy.skipped}


def test_every_number_is_kept_and_what_was_derived_is_computed_alike():
    assert check_numbers(OLD) > 200


def test_the_migrated_results_are_written_and_read_as_they_are(tmp_path):
    new = load(OLD, migrate=migrate)
    path = tmp_path / "results.json"
    path.write_text(dump(new))
    assert load(path) == new
    assert "agreement" not in new.configuration
    assert new.configuration["sweep"]["processes"] == 1
    assert Toolchain.one(new).forked
    (call,) = SweepCall.select(new)
    assert (call.number, call.commit) == (1, "3cde5d4")
    (failed,) = FailedCell.select(new)
    assert failed.why
    assert failed.seconds > 0


def test_a_migrated_report_shows_its_cases():
    new = load(OLD, migrate=migrate)
    text = render(new, REPORT)
    assert "as fast as the eager one, for 22.8 s of compiling, paid for after 913 (767–938) steps" in text
    assert "| resnet training |" in text
    titles = [case.mode for case in measured_cases(new)]
    assert titles == ["default", "default", "max-autotune"]


def test_a_swept_case_has_its_cell_and_what_it_borrowed():
    swept = next(case for case in measured_cases(load(OLD, migrate=migrate)) if case.mode == "max-autotune")
    assert swept.swept
    assert swept.record.tuned
    assert swept.record.processes == 20
    assert swept.record.sweep_seconds > 10
    assert isinstance(swept.steady.untuned.speedup, Quantity)
    assert swept.record.compiled_profile.costliest[0].seconds > 0


def test_a_derived_number_that_differs_is_noticed():
    old = load(OLD)
    records = [
        replace(each, values={**each.values, "price": Quantity(1.0, "s")}) if each.name == "verdict" else each
        for each in old.records
    ]
    with pytest.raises(AssertionError):
        check_derived(replace(old, records=tuple(records)), migrate(old))
