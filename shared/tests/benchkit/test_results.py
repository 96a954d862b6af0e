"""Results on disk: versioned, atomic, and kept when a run is interrupted."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from benchkit import Quantity, Record, UserError
from benchkit.environment import capture
from benchkit.results import SCHEMA_VERSION, Recorder, Results, dump, load, only_writer, write_text_atomically

HERE = Path(__file__).parent


@pytest.fixture
def recorder(tmp_path):
    return Recorder(
        tmp_path, lens="a-lens", environment=capture("cpu", root=HERE), configuration={"sizes": [1, 2], "dtype": "x"}
    )


def test_what_is_written_is_what_is_read(recorder):
    record = Record("forward", {"n": 4, "kind": "a"}, {"time": Quantity(1.5, "s", 1.0, 2.0, 9, "p20-p80")}, {"k": [1]})
    recorder.add(record)
    recorder.absent("the GPU", "there is none")
    path = recorder.finish()
    found = load(path)
    assert found == recorder.results
    assert found.one("forward", kind="a")["time"].high == 2.0
    assert found.complete
    assert dump(found) == path.read_text()


def test_selecting_and_asking_for_exactly_one(recorder):
    recorder.add_all(Record("forward", {"n": n}) for n in (1, 2))
    assert [record.labels["n"] for record in recorder.results.select("forward")] == [1, 2]
    with pytest.raises(LookupError, match="found 2"):
        recorder.results.one("forward")
    with pytest.raises(LookupError, match="found 0"):
        recorder.results.one("backward")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a JSON document"),
        ("[" * 100_000, "is not a JSON document"),
        ('{"schema_version": NaN}', "NaN is no number"),
        ("[]", "expected schema_version 2, got None"),
        (json.dumps({"schema_version": SCHEMA_VERSION + 1}), f"got {SCHEMA_VERSION + 1}; a newer state of this repo"),
        (json.dumps({"schema_version": 0}), "got 0; run the lens again"),
        (json.dumps({"schema_version": 1}), "expected schema_version 2, got 1"),
        (json.dumps({"schema_version": SCHEMA_VERSION}), "does not fit schema version"),
        (json.dumps({"schema_version": SCHEMA_VERSION, "lens": "a", "environment": {"gpu": None, "odd": 1}}), "odd"),
    ],
)
def test_a_file_that_is_no_such_document_is_refused_with_a_remedy(tmp_path, text, message):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "run the lens again" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("value", value) for value in (None, "1", [1])),
        *(("unit", 3), ("low", "1"), ("high", []), ("samples", "many"), ("interval", None)),
        *(("labels", None), ("name", 3), ("complete", None), ("lens", 5), ("configuration", None)),
    ],
)
def test_a_field_of_another_type_is_refused_and_named(tmp_path, field, value):
    document = json.loads(dump(Results("a", capture("cpu", root=HERE), {})))
    figure = {"value": 1.0, "unit": "s", "low": 1.0, "high": 2.0, "samples": 3, "interval": "range"}
    record = {"name": "sum", "labels": {}, "values": {"time": figure}}
    document["records"] = [record]
    next(part for part in (figure, record, document) if field in part)[field] = value
    (tmp_path / "results.json").write_text(json.dumps(document))
    with pytest.raises(
        UserError, match=re.escape(f"does not fit schema version 2 ({field} is {value!r}); run the lens")
    ):
        load(tmp_path / "results.json")


@pytest.mark.parametrize("part", [{"value": None}, {"value": "1"}, {"unit": None}, {"samples": 2.0}])
def test_what_could_not_be_read_is_not_written(part):
    figure = Quantity(**{"value": 1.0, "unit": "s", **part})
    (name, value), *_ = part.items()
    with pytest.raises(TypeError, match=rf"record 'sum' \{{\}}: {name} of time is {value!r}"):
        dump(Results("a", capture("cpu", root=HERE), {}, (Record("sum", {}, {"time": figure}),)))


def test_a_number_too_large_for_a_float_is_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"schema_version": 1e999}')
    with pytest.raises(UserError, match="1e999 is no number"):
        load(tmp_path / "results.json")


def test_the_page_for_contributors_names_every_field_of_the_document():
    page = (HERE.parents[2] / "CONTRIBUTING.md").read_text().partition("## The results document")[2]
    named = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert named == {field.name for field in dataclasses.fields(Results)}
    assert f"`SCHEMA_VERSION`, now {SCHEMA_VERSION}," in page


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*results\.json: No such file"):
        load(tmp_path / "results.json")


def test_the_file_is_the_plain_json_of_the_results_however_it_grew(recorder):
    recorder.begin()
    for value in ({"lines": ["a", 'b\n "records": []']}, None, [[], {}, "µ"]):
        recorder.add(Record("forward", {"n": 4}, {"time": Quantity(0.5, "s")}, value))
        recorder.absent("something", "a reason")
        plain = dataclasses.asdict(recorder.results)
        for record in plain["records"]:
            record["values"] = {"time": {"value": 0.5, "unit": "s"}}  # what has its default is left out
            if record["data"] is None:
                del record["data"]
        text = recorder.path.read_text()
        assert json.loads(text) == json.loads(json.dumps(plain))
        assert text == dump(recorder.results)
        assert load(recorder.path) == recorder.results


def test_a_figure_that_is_not_finite_is_refused_by_name(recorder):
    with pytest.raises(ValueError, match=r"record 'forward' \{'n': 4\}: time is nan"):
        recorder.add(Record("forward", {"n": 4}, {"time": Quantity(float("nan"), "s")}))
    with pytest.raises(ValueError, match=r"record 'forward' \{'n': 4\}: time is inf"):
        recorder.add(Record("forward", {"n": 4}, {"time": Quantity(1.0, "s", 0.5, float("inf"))}))


@pytest.mark.parametrize(
    ("labels", "data", "kind"),
    [
        ({"n": float("inf")}, 1, ValueError),
        ({"n": 1}, [float("nan")], ValueError),
        ({"n": 1}, {"a": Path()}, TypeError),
    ],
)
def test_what_is_no_plain_json_is_refused_with_the_record(recorder, labels, data, kind):
    with pytest.raises(kind, match=r"record 'forward' \{'n': (inf|1)\}: "):
        recorder.add(Record("forward", labels, data=data))


def test_a_name_that_is_not_utf8_comes_back(recorder):
    name = os.fsdecode(b"caf\xe9")
    recorder.add(Record("file", {"name": name}))
    assert load(recorder.path).one("file").labels["name"] == name


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    write_text_atomically(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=r"report\.md cannot be written: No space left on device; make room there"):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_another_run_is_writing_below_a_folder_is_left_alone(tmp_path):
    own, others = tmp_path / ".report.md.0123abcd.writing", tmp_path / "run" / ".last.pt.0123abcd.writing"
    others.parent.mkdir()
    own.touch()
    others.touch()
    with only_writer(tmp_path):
        assert not own.exists()
        assert others.exists()
