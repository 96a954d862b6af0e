"""The answer of the report: its finding, its first table, and where this package is slowest beside the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchkit import Record, Results, numbers
from rmsnorm_fused.bench.candidates import COPY, EAGER, OWN
from rmsnorm_fused.bench.training import BASELINE
from rmsnorm_fused.report.figures import PASSES, implementations, shape, shown
from rmsnorm_fused.report.targets import fastest, others


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


def finding(results: Results) -> str:
    """The headline beside the strongest other implementation, and the worst results of the run; two sentences."""
    found = {which: fastest(results.select(which, group="headline"), OWN) for which in PASSES}
    best = {which: record for which, record in found.items() if record is not None and "fraction" in record.values}
    if not best:
        return f"RMSNorm at {shape(results)}: none of this package's kernels can run here."
    shares = " and ".join(f"{numbers.percent(record['fraction'].value, 0)} {which}" for which, record in best.items())
    peers = {
        which: entry for which in best if (entry := _beside(results.select(which, group="headline"), which)) is not None
    }
    speeds = " and ".join(f"{numbers.with_unit(entry.speed, '×')}" for entry in peers.values())
    names = " and ".join(dict.fromkeys(entry.peer for entry in peers.values()))
    beside = f", {speeds} the speed of the fastest other implementation ({names})" if peers else ""
    return f"RMSNorm at {shape(results)} reaches {shares} of the copy limit{beside}.{_worst(results)}"


def headline(results: Results) -> str:
    """The shares of the limit, and the worst speed beside another implementation: the line of the index."""
    shares = [
        f"{numbers.percent(record['fraction'].value, 0)} {which}"
        for which in PASSES
        if (record := fastest(results.select(which, group="headline"), OWN)) and "fraction" in record.values
    ]
    slowest = min(comparisons(results), key=lambda entry: entry.speed, default=None)
    if not shares or slowest is None:
        return finding(results)
    return f"{shape(results)}: {' and '.join(shares)} of the copy limit; at its worst {slowest}."


def _worst(results: Results) -> str:
    share = min(_shares(results), key=lambda entry: entry[0], default=None)
    slowest = min(comparisons(results), key=lambda entry: entry.speed, default=None)
    parts = [f"{numbers.percent(share[0], 0)} of the limit ({share[1]})"] if share else []
    parts += [str(slowest)] if slowest else []
    return f" Its worst: {' and '.join(parts)}." if parts else ""


def comparisons(results: Results) -> Iterator[Against]:
    """Every case in which this package's implementations were timed in the same rounds as others."""
    for where, records in _cases(results):
        if (entry := _beside(records, where)) is not None:
            yield entry
    for mode in dict.fromkeys(str(record.labels["mode"]) for record in results.select("training")):
        own = [record for record in results.select("training", mode=mode) if record.labels["norm"] in OWN]
        if own:
            speed = max(record["speedup"].value for record in own)
            yield Against(speed, BASELINE, f"the {mode} training step, `{results.configuration['training']['preset']}`")


def _beside(records: Sequence[Record], where: str) -> Against | None:
    own, peer = fastest(records, OWN), fastest(records, others(records))
    if own is None or peer is None:
        return None
    return Against(peer["time"].value / own["time"].value, str(peer.labels["implementation"]), where)


def _cases(results: Results) -> Iterator[tuple[str, list[Record]]]:
    """The records that were timed in the same rounds, with the name of their case."""
    for name in (*PASSES, "call", "quantised"):
        cases: dict[tuple[object, ...], list[Record]] = {}
        for record in results.select(name):
            key = tuple(record.labels.get(label) for label in ("group", "rows", "columns", "dtype", "gradient"))
            cases.setdefault(key, []).append(record)
        for (group, rows, columns, dtype, gradient), records in cases.items():
            place = f"{rows} × {columns}"
            yield (
                {
                    "call": f"a call at {place}{', with a gradient' if gradient else ''}",
                    "quantised": "a float8 result",
                }.get(name)
                or {
                    "headline": name,
                    "add": f"{name} with a residual",
                    "dtypes": f"{name} in {dtype}",
                    "batches": f"the kernel at {place}",
                }.get(str(group), f"{name}, {place}"),
                records,
            )


def _shares(results: Results) -> Iterator[tuple[float, str]]:
    """The best share of the limit in each case that is large enough to have one."""
    for where, records in _cases(results):
        own = [r["fraction"].value for r in records if r.labels["implementation"] in OWN and "fraction" in r.values]
        if own and records[0].labels.get("group") != "batches":
            yield max(own), where


def headline_rows(results: Results) -> list[tuple[str, ...]]:
    """One row per implementation: both passes at the headline's shape."""
    records = {which: results.select(which, group="headline") for which in PASSES}

    def cells(which: str, name: str) -> tuple[str, ...]:
        found = [record for record in records[which] if record.labels["implementation"] == name]
        if not found:
            return "–", "–"
        share = "100 %" if name == COPY else numbers.percent(found[0]["fraction"].value)
        return numbers.with_unit(found[0]["time"].value, "s"), share

    def against(which: str, name: str) -> str:
        own, here = fastest(records[which], OWN), [r for r in records[which] if r.labels["implementation"] == name]
        if own is None or not here or name == COPY:
            return ""
        return numbers.with_unit(own["time"].value / here[0]["time"].value, "×")

    every = [record for which in PASSES for record in records[which]]
    return [
        (shown(name), *(cell for which in PASSES for cell in (*cells(which, name), against(which, name))))
        for name in implementations(every, copy=True)
    ]


def above_the_limit(results: Results) -> str:
    """Which implementation exceeds the copy that is called the limit by the most; empty if none does."""
    over = [
        (record["fraction"].value, record, where)
        for where, records in _cases(results)
        for record in records
        if "fraction" in record.values and record["fraction"].value > 1 and record.labels["group"] != "batches"
    ]
    if not over:
        return ""
    share, record, where = max(over, key=lambda entry: entry[0])
    return f"{shown(record.labels['implementation'])} reaches {numbers.percent(share)} ({where})"


def determinism_notes(results: Results) -> list[str]:
    """Where the same backward pass has another time in another table, with the reason."""
    reason = (
        "both rotate through more operands than the last-level cache holds, and differ by what else ran in the rounds"
    )
    notes = []
    for record in results.select("determinism"):
        labels = {key: record.labels[key] for key in ("implementation", "rows", "columns", "dtype")}
        for other in (r for group in ("headline", "widths") for r in results.select("backward", group=group, **labels)):
            here, there = record["default"].value, other["time"].value
            if abs(here - there) > 0.1 * max(here, there):
                where = f"{shown(labels['implementation'])} at {labels['rows']} × {labels['columns']}"
                times = f"{numbers.with_unit(here, 's')} here and {numbers.with_unit(there, 's')} beside the others"
                notes.append(f"{where} takes {times}: {reason}.")
    return notes


def eager_speedups(results: Results) -> str:
    """How much faster than the eager formula the fastest implementation of this package is, pass by pass."""
    found = [(which, fastest(results.select(which, group="headline"), OWN)) for which in PASSES]
    parts = [f"{numbers.quantity(record['speedup'])} {which}" for which, record in found if record is not None]
    return f"Beside the {EAGER}: {' and '.join(parts)}." if parts else ""
