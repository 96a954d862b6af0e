"""What the sections of the report ask of the records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchkit import Quantity, Record, Results, numbers
from rmsnorm_fused.bench.candidates import ABOUT, COPY, OWN
from rmsnorm_fused.bench.training import BASELINE

PASSES = ("forward", "backward")
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def name_of(record: Record) -> str:
    """The implementation, or in the training step the norm."""
    return str(record.labels.get("implementation", record.labels.get("norm")))


def shown(record: Record) -> str:
    """The implementation's name in text: this package's as code."""
    return as_text(name_of(record))


def as_text(name: str) -> str:
    """An implementation's name in text: this package's as code."""
    return f"`{name}`" if name in OWN else name


def implementations(records: Iterable[Record], *, copy: bool = False) -> list[str]:
    """The implementations' names in the order of the report, with the copy first if requested."""
    present = {name_of(record) for record in records}
    return [name for name in ABOUT if name in present and (copy or name != COPY)]


def in_order(records: Sequence[Record], *, copy: bool = True) -> list[Record]:
    """The records in the order of the report."""
    names = implementations(records, copy=copy)
    return sorted((record for record in records if name_of(record) in names), key=lambda r: names.index(name_of(r)))


def records_of(records: Iterable[Record], names: Sequence[str]) -> list[Record]:
    """The records of some implementations."""
    return [record for record in records if name_of(record) in names]


def others(records: Iterable[Record]) -> list[str]:
    """The names of the implementations outside this package."""
    return [name for name in dict.fromkeys(map(name_of, records)) if name not in (COPY, *OWN)]


def fastest(records: Iterable[Record], names: Sequence[str]) -> Record | None:
    """The record with the shortest time among those of some implementations; None if there is none."""
    return min(records_of(records, names), key=lambda record: record["time"].value, default=None)


def shape_of(record: Record) -> str:
    """Rows and columns as text."""
    return f"{record.labels['rows']} × {record.labels['columns']}"


def by_shape(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each shape, in order."""
    shapes: dict[str, list[Record]] = {}
    for record in records:
        shapes.setdefault(shape_of(record), []).append(record)
    return shapes


def headline_shape(results: Results) -> str:
    """The shape and dtype of the headline, as text."""
    rows, columns = results.configuration["headline"]
    return f"{rows} × {columns} {results.configuration['dtype']}"


def over_widths(results: Results, which: str) -> list[Record]:
    """The records over widths, narrow first, including the headline if it has the same number of elements."""
    records = results.select(which, group="widths")
    rows, columns = results.configuration["headline"]
    if records and rows * columns == results.configuration["elements"]:
        measured = {record.labels["columns"] for record in records}
        records += [] if columns in measured else results.select(which, group="headline")
    return sorted(records, key=lambda record: int(record.labels["columns"]))


def percentage(share: Quantity) -> Quantity:
    """A share with its interval, in percent."""
    low, high = (None if end is None else 100 * end for end in (share.low, share.high))
    return Quantity(100 * share.value, "%", low, high, share.samples, share.interval)


@dataclass(frozen=True)
class Against:
    """This package's fastest implementation beside the fastest other one, in one case.

    Attributes:
        speed: Time of the other divided by the time of this package's.
        peer: Name of the other.
        where: Name of the case, within a sentence.
    """

    speed: float
    peer: str
    where: str

    def __str__(self) -> str:
        return f"{numbers.with_unit(self.speed, '×')} the speed of {self.peer} ({self.where})"


def compared_with_peer(records: Sequence[Record], where: str) -> Against | None:
    """The comparison of one case; None if one of the two is missing."""
    own, peer = fastest(records, OWN), fastest(records, others(records))
    if own is None or peer is None:
        return None
    return Against(peer["time"].value / own["time"].value, name_of(peer), where)


def comparisons(results: Results) -> Iterator[Against]:
    """Every case in which this package's implementations were timed in the same rounds as others."""
    yield from filter(None, (compared_with_peer(records, where) for where, records in cases(results)))
    for mode in dict.fromkeys(str(record.labels["mode"]) for record in results.select("training")):
        steps = records_of(results.select("training", mode=mode), OWN)
        if speeds := [record["speedup"].value for record in steps if "speedup" in record.values]:
            speed = max(speeds)
            yield Against(speed, BASELINE, f"the {mode} training step, `{results.configuration['training']['preset']}`")


def cases(results: Results) -> Iterator[tuple[str, list[Record]]]:
    """The records that were timed in the same rounds, with the name of their case."""
    timed: dict[str, list[Record]] = {}
    for name in (*PASSES, "call", "quantised"):
        for record in results.select(name):
            timed.setdefault(_case(record), []).append(record)
    yield from timed.items()


def _case(record: Record) -> str:
    if record.name == "quantised":
        return "a float8 result"
    if record.name == "call":
        return f"a call at {shape_of(record)}{', with a gradient' if record.labels['gradient'] else ''}"
    return {
        "headline": record.name,
        "add": f"{record.name} with a residual",
        "dtypes": f"{record.name} in {record.labels['dtype']}",
        "batches": f"the kernel at {shape_of(record)}",
    }.get(str(record.labels["group"]), f"{record.name}, {shape_of(record)}")
