"""The migration of results to the words of version 0.2 changes no number."""

from typing import Any

from dispatcher_trace.report.migration import migrate_results

_OLD = {
    "lens": "dispatcher-trace",
    "records": [
        {
            "name": "walk",
            "labels": {"mode": "plain"},
            "values": {"hops": {"value": 2}},
            "data": {
                "spine": [["aten::mm", "CPU"]],
                "hops": [
                    {
                        "number": 2,
                        "key_line": "keys {CPU} handed on; as predicted; $2 was made on the memory of $0 (s0)",
                        "why": "Conjugate handed on, and of what is left CPU is highest; its kernel handed on to CPU",
                    }
                ],
            },
        },
        {"name": "fold", "labels": {}, "values": {}, "data": [{"calls": 3}]},
        {
            "name": "agreement",
            "labels": {},
            "values": {},
            "data": {
                "disagreements": [
                    {"cause": "its kernel at CPU is written by hand (a.cpp:3) and ends the call instead of handing on"},
                    {"cause": "the kernel raised before it could hand on"},
                    {"cause": "torch's dispatcher in Python chose the kernel"},
                ]
            },
        },
    ],
}


def _numbers(value: Any) -> list[float]:
    """All numbers of a JSON value, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, (int, float)) else []


def test_names_and_sentences_change_and_numbers_stay() -> None:
    new = migrate_results(_OLD)
    trace, lines, agreement = new["records"]
    assert (trace["name"], lines["name"]) == ("trace", "source_lines")
    assert trace["data"]["main_path"] == [["aten::mm", "CPU"]]
    (hop,) = trace["data"]["hops"]
    assert hop["key_line"] == "keys {CPU} from the redispatch; as predicted; $2 aliases the memory of $0 (s0)"
    assert hop["why"] == "Conjugate redispatched, and CPU is the highest key left; its kernel redispatched to CPU"
    assert [item["cause"] for item in agreement["data"]["disagreements"]] == [
        "the hand-written kernel at CPU (a.cpp:3) ends the call instead of redispatching",
        "the kernel raised before it could redispatch",
        "torch's Python dispatcher chose the kernel",
    ]
    assert _numbers(new) == _numbers(_OLD)
    assert migrate_results(new) == new
