"""Random programs: what a run counts, when it ends, what it keeps, and the page of all runs."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import random_programs
from hypothesis import assume
from hypothesis import strategies as st
from random_programs import Fuzz, Record

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = {"programs": "numbers", "oracle": "arithmetic"}


def test_all_wanted_programs_are_run_and_their_outcomes_are_counted(fuzz):
    record = fuzz.run(st.integers(), lambda n: "even" if n % 2 == 0 else "odd", **NUMBERS, wanted=50)
    assert (record.lens, record.run, record.differences) == ("scripts", 50, 0)
    assert sum(record.outcomes.values()) == 50


def test_the_seed_decides_the_programs():
    def drawn(seed: int) -> list[int]:
        seen: list[int] = []
        Fuzz("lens", seed).run(st.integers(), seen.append, **NUMBERS, wanted=20)
        return seen

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_difference_is_shrunk_and_ends_the_run():
    records: list[Record] = []

    def check(n: int) -> None:
        assert n < 1000

    with pytest.raises(AssertionError) as raised:
        Fuzz("lens", write=records.append).run(st.integers(0), check, **NUMBERS, wanted=1000)
    assert any("program=1000" in note for note in raised.value.__notes__)
    assert records[0].differences == 1
    assert 1 <= records[0].run < 1000


def test_a_run_ends_when_its_time_is_up():
    records: list[Record] = []
    Fuzz("lens", seconds=0.0, write=records.append).run(st.integers(), lambda n: None, **NUMBERS, wanted=10**6)
    assert records[0].run < 10**6
    assert records[0].differences == 0


def test_a_program_that_does_not_count_is_not_counted(fuzz):
    seen: list[int] = []

    def check(n: int) -> None:
        assume(n % 3)
        seen.append(n)

    assert fuzz.run(st.integers(), check, **NUMBERS, wanted=30).run == len(seen) == 30


def test_a_record_takes_the_place_of_the_earlier_one(tmp_path):
    path = tmp_path / "random_programs.json"
    path.write_text('{"runs": [], "faults": []}')
    for seed in (1, 2):
        Fuzz("lens", seed, write=lambda run: random_programs.keep(run, path)).run(
            st.integers(), lambda n: "a|b", **NUMBERS, wanted=5
        )
    (kept,), faults = random_programs.load(path)
    assert (kept.seeds, kept.run, faults) == ((2,), 5, [])
    assert path.with_suffix(".md").read_text() == random_programs.render(path)
    assert r"| lens | numbers | arithmetic | 5 | 0 | a\|b: 5 | 2 |" in random_programs.render(path)


def test_a_record_is_added_to_one_of_the_same_commit_that_ended_early(tmp_path):
    path = tmp_path / "random_programs.json"
    path.write_text('{"runs": [], "faults": []}')
    base = Record("lens", *NUMBERS.values(), 10, 4, 0, {"a": 3, "b": 1}, (1,), 2.0, "`abc`", "2026-11-24T00:00:00Z")
    other = replace(base, seeds=(2,), outcomes={"a": 4})
    for record, run, seeds in (
        (base, 4, (1,)),
        (base, 4, (1,)),  # the same seed draws the same programs
        (other, 8, (1, 2)),
        (replace(other, seeds=(3,)), 12, (1, 2, 3)),
        (replace(other, seeds=(4,)), 4, (4,)),  # the earlier runs have all programs that were wanted
        (replace(base, commit="`def`"), 4, (1,)),
    ):
        random_programs.keep(record, path)
        (kept,), _ = random_programs.load(path)
        assert (kept.run, kept.seeds) == (run, seeds)
    both = base + other
    assert (both.seconds, both.outcomes) == (4.0, {"a": 7, "b": 1})


def test_every_fault_has_its_test():
    for fault in random_programs.load()[1]:
        path, _, name = fault.test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), fault.test


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no-such-lens"], "expected a lens with random programs, received 'no-such-lens'; there are: "),
        (["--seconds", "soon"], "--seconds takes a whole number, not 'soon'"),
    ],
)
def test_the_script_says_what_it_expects(arguments, told):
    done = subprocess.run([ROOT / "scripts" / "fuzz.sh", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
