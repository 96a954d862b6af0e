"""Results of version 0.1 get the words of version 0.2, and keep every number."""

from pathlib import Path
from typing import Any

from benchkit.environment import capture
from benchkit.results import Quantity, Record, Results
from dispatcher_trace.report.migrate import migrate

_HOP = {
    "number": 2,
    "key_line": "keys {CPU} handed on; as predicted; $2 was made on the memory of $0 (s0)",
    "why": "Conjugate handed on, and of what is left CPU is highest; its kernel handed on to CPU",
}
_CAUSES = (
    "its kernel at CPU is written by hand (a.cpp:3) and ends the call instead of handing on",
    "the kernel raised before it could hand on",
    "torch's dispatcher in Python chose the kernel",
)
_RECORDS = (
    Record("walk", {"mode": "plain"}, {"hops": Quantity(2, "")}, {"spine": [["aten::mm", "CPU"]], "hops": [_HOP]}),
    Record("fold", {}, {}, [{"calls": 3}]),
    Record("agreement", {}, {}, {"disagreements": [{"cause": cause, "calls": 7} for cause in _CAUSES]}),
)


def _numbers(value: Any) -> list[float]:
    """All numbers of a JSON value, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, (int, float)) else []


def test_names_and_sentences_change_and_numbers_stay() -> None:
    old = Results("dispatcher-trace", capture("cpu", root=Path(__file__).parent), {}, _RECORDS, (), True)
    new = migrate(old)
    trace, lines, agreement = new.records
    assert (trace.name, lines.name) == ("trace", "source_lines")
    assert trace.data["main_path"] == [["aten::mm", "CPU"]]
    (hop,) = trace.data["hops"]
    assert hop["key_line"] == "keys {CPU} from the redispatch; as predicted; $2 aliases the memory of $0 (s0)"
    assert hop["why"] == "Conjugate redispatched, and CPU is the highest key left; its kernel redispatched to CPU"
    assert [item["cause"] for item in agreement.data["disagreements"]] == [
        "the hand-written kernel at CPU (a.cpp:3) ends the call instead of redispatching",
        "the kernel raised before it could redispatch",
        "torch's Python dispatcher chose the kernel",
    ]
    assert [record.values for record in new.records] == [record.values for record in old.records]
    assert [_numbers(record.data) for record in new.records] == [_numbers(record.data) for record in old.records]
    assert migrate(new) == new
