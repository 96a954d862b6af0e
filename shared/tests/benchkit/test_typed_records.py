"""Kinds of records: what a writer makes is what a report reads, also through a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from benchkit import Quantity, Record, UserError
from benchkit.environment import capture
from benchkit.results import Recorder, load
from benchkit.typed_records import TypedRecord, from_plain

SECOND = Quantity(1.5, "s", 1.0, 2.0, 9, "p20-p80")


@dataclass(frozen=True)
class Kernel:
    name: str
    seconds: float


class Call(NamedTuple):
    name: str
    times: int


@dataclass(frozen=True)
class Profile:
    operators: Quantity
    busy: Quantity | None = None
    costliest: tuple[Kernel, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Profiled(TypedRecord, name="profile", labels=("target", "train")):
    target: str
    train: bool
    eager: Profile
    compiled: Profile | None = None
    phases: Mapping[str, Quantity] = field(default_factory=dict)
    by_kernel: Mapping[str, Profile] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    shape: tuple[int, str] = (0, "")
    exact: int = 0
    calls: tuple[Call, ...] = ()


FULL = Profiled(
    "gpt",
    True,
    Profile(Quantity(3, ""), SECOND, (Kernel("gemm<a.b>", 0.25), Kernel("copy", 0.5)), "there"),
    Profile(Quantity(1, "")),
    {"inductor": SECOND, "code generation 2.0": Quantity(0.0, "s")},
    {"one": Profile(SECOND), "two": Profile(Quantity(2, ""), where="here")},
    ("a", "b"),
    (3, "x"),
    7,
    (Call("gemm", 3), Call("copy", 1)),
)
SMALL = Profiled("gpt", False, Profile(Quantity(0, "")))


@pytest.mark.parametrize("made", [FULL, SMALL])
def test_what_is_written_is_what_is_read(made, tmp_path):
    assert Profiled.of(made.record()) == made
    recorder = Recorder(tmp_path, lens="a", environment=capture("cpu", root=Path(__file__).parent), configuration={})
    recorder.add(made.record())
    results = load(recorder.finish())
    assert Profiled.select(results) == [made]
    assert Profiled.one(results, target="gpt") == made
    assert Profiled.select(results, target="other") == []


def test_figures_are_named_by_the_path_to_them_and_the_rest_is_data():
    record = FULL.record()
    assert record.labels == {"target": "gpt", "train": True}
    assert record["eager.operators"].value == 3
    assert record["phases.code generation 2.0"].unit == "s"
    assert record["by_kernel.two.operators"].value == 2
    assert record.data["eager"]["costliest"][0] == {"name": "gemm<a.b>", "seconds": 0.25}
    assert "phases" in record.data
    assert record.data["calls"] == [["gemm", 3], ["copy", 1]]
    assert all(isinstance(each, Quantity) for each in record.values.values())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Record("other"), "expected a record 'profile', got 'other'"),
        (Record("profile", {"target": "gpt"}), r"record 'profile' .* does not fit Profiled .*train is missing"),
        (Record("profile", {"target": "gpt", "train": True}), r"eager is missing.* run the lens again"),
        (Record("profile", {"target": "gpt", "train": True}, {"eager.busy": SECOND}), "operators is missing"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_by_name(record, message):
    with pytest.raises(UserError, match=message):
        Profiled.of(record)


def test_an_absent_field_takes_its_default():
    record = Record("profile", {"target": "gpt", "train": True}, {"eager.operators": Quantity(4, "")})
    assert Profiled.of(record) == Profiled("gpt", True, Profile(Quantity(4, "")))


def test_a_default_is_not_written_not_even_inside_a_sequence():
    @dataclass(frozen=True)
    class Row:
        name: str
        figure: Quantity | None = None
        kernels: tuple[Kernel, ...] = ()

    @dataclass(frozen=True)
    class Table(TypedRecord, name="table"):
        rows: tuple[Row, ...]
        note: str = ""
        profile: Profile | None = None

    plain = Row("a"), Row("b", Quantity(2.0, "s"), (Kernel("copy", 0.5),))
    record = Table(plain).record()
    second = {"name": "b", "figure": {"value": 2.0, "unit": "s"}, "kernels": [{"name": "copy", "seconds": 0.5}]}
    assert record.data == {"rows": [{"name": "a"}, second]}


def test_plain_json_becomes_the_dataclass_again():
    profile = Profile(SECOND, None, (Kernel("gemm", 0.25),), "there")
    plain = json.loads(json.dumps(dataclasses.asdict(profile)))
    assert from_plain(Profile, plain) == profile
    for damaged, error in (({}, KeyError), ([], AttributeError), (plain | {"costliest": 3}, TypeError)):
        with pytest.raises(error):
            from_plain(Profile, damaged)
