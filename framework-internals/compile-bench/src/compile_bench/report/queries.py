"""Finding one's way in the records of a report: what belongs to a case, and what a case is called."""

from __future__ import annotations

from collections.abc import Sequence

from benchkit.results import Record, Results
from compile_bench.capture.phases import PHASES
from compile_bench.targets.case import MODES

CaseKey = tuple[str, str, str]

# Parts of the first steps, in the order they happen: key of the value, name in the figure.
PARTS = (
    ("import", "import of the compiler"),
    ("toolchain", "toolchain check"),
    *((f"phase {name}", name) for name in PHASES),
    ("rest", "running the steps"),
    ("artifact", "loading artifacts"),
)

_CACHES = {
    "none": "eager",
    "cold": "empty caches",
    "warm": "warm caches",
    "artifact": "cache artifacts",
    "tuned": "choices of autotuning",
}


def same_case(results: Results, name: str, other: Record) -> Record:
    """The record of that name of the same target, kind and mode."""
    return results.one(name, target=other.labels["target"], kind=other.labels["kind"], mode=other.labels["mode"])


def compiled_first(results: Results, verdict: Record) -> list[Record]:
    """The first compiled steps of a case, for every state of the caches that was measured."""
    labels = {key: verdict.labels[key] for key in ("target", "kind", "mode")}
    return results.select("first steps", **labels)


def eager_first(results: Results, verdict: Record) -> Record:
    """The first eager steps of a case's target and kind."""
    labels = {key: verdict.labels[key] for key in ("target", "kind")}
    return results.one("first steps", mode="eager", **labels)


def side_by_side(record: Record) -> int:
    """How many processes compiled at the same time as the one of a record of first steps."""
    return int((record.data or {}).get("side by side", 1))


def alone(results: Results, records: Sequence[Record]) -> list[Record]:
    """Those of ``records`` whose case was compiled alone on the machine, with the eager starts that belong to them."""
    swept = swept_cases(results)
    cases = {
        case_key(record)
        for record in results.select("first steps", cache="cold")
        if side_by_side(record) == 1 and case_key(record) not in swept
    }
    models = {key[:2] for key in cases}
    return [
        record
        for record in records
        if case_key(record) in cases or (record.labels["mode"] == "eager" and case_key(record)[:2] in models)
    ]


def swept_cases(results: Results) -> set[CaseKey]:
    """The cells that ``run.py --sweep`` measured or failed to."""
    return {case_key(record) for record in results.select("cell")}


def unswept(results: Results, records: Sequence[Record]) -> list[Record]:
    """Those of ``records`` that are of the main job."""
    swept = swept_cases(results)
    return [record for record in records if case_key(record) not in swept]


def case_key(record: Record) -> CaseKey:
    """What tells the cases of a report apart: target, kind, and mode with scope."""
    return str(record.labels["target"]), str(record.labels["kind"]), str(record.labels["mode"])


def models(results: Results, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Target and kind of records: in the order of the sweep's groups, or of the records where there was no sweep."""
    found = dict.fromkeys(case_key(record)[:2] for record in records)
    if not results.select("sweep call"):
        return list(found)
    order = [target for group in results.configuration["sweep"]["groups"] for target in group]
    return sorted(found, key=lambda key: (order.index(key[0]) if key[0] in order else len(order), key))


def in_order(results: Results, records: Sequence[Record]) -> list[Record]:
    """Records of cases by model and kind, and within these by mode; a sweep adds them as they end."""
    order = models(results, records)

    def place(record: Record) -> tuple[int, int]:
        target, kind, mode = case_key(record)
        return order.index((target, kind)), MODES.index(mode) if mode in MODES else len(MODES)

    return sorted(records, key=place)


def verdict_of(results: Results, other: Record, mode: str) -> Record | None:
    """The verdict on another mode of a record's target and kind; None where that was not measured."""
    found = results.select("verdict", target=other.labels["target"], kind=other.labels["kind"], mode=mode)
    return found[0] if found else None


def cache_name(record: Record) -> str:
    """What the process of a record of first steps found, in words."""
    return _CACHES[str(record.labels["cache"])]


def value_of(record: Record, key: str) -> float:
    """A figure of a record, 0 where it has none of that name."""
    return record.values[key].value if key in record.values else 0.0
