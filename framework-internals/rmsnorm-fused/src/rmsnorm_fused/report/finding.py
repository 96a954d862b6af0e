"""The finding of a run in two sentences, and in one for the index of reports."""

from __future__ import annotations

from benchkit import Record, Results, numbers
from rmsnorm_fused.bench.candidates import OWN
from rmsnorm_fused.report.queries import PASSES, beside, cases, comparisons, fastest, headline_shape, of


def finding(results: Results) -> str:
    """The headline beside the strongest other implementation, and the worst results of the run; two sentences."""
    best = _headline_shares(results)
    if not best:
        return f"RMSNorm at {headline_shape(results)}: none of this package's kernels can run here."
    peers = [entry for which in best if (entry := beside(results.select(which, group="headline"), which)) is not None]
    speeds = " and ".join(numbers.with_unit(entry.speed, "×") for entry in peers)
    names = " and ".join(dict.fromkeys(entry.peer for entry in peers))
    compared = f", {speeds} the speed of the fastest other implementation ({names})" if peers else ""
    return (
        f"RMSNorm at {headline_shape(results)} reaches {' and '.join(best.values())} of the copy limit{compared}."
        f"{_worst(results)}"
    )


def headline(results: Results) -> str:
    """The shares of the limit, and the worst speed beside another implementation: the line of the index."""
    shares = _headline_shares(results)
    slowest = min(comparisons(results), key=lambda entry: entry.speed, default=None)
    if not shares or slowest is None:
        return finding(results)
    return f"{headline_shape(results)}: {' and '.join(shares.values())} of the copy limit; at its worst {slowest}."


def _headline_shares(results: Results) -> dict[str, str]:
    best = {which: fastest(results.select(which, group="headline"), OWN) for which in PASSES}
    return {
        which: f"{numbers.percent(record['fraction'].value, 0)} {which}"
        for which, record in best.items()
        if record is not None and "fraction" in record.values
    }


def _worst(results: Results) -> str:
    """The smallest share of the limit, and the slowest case beside another implementation, as a sentence."""
    shares = [
        (max(record["fraction"].value for record in limited), where)
        for where, records in cases(results)
        if records[0].labels.get("group") != "batches" and (limited := _limited(records))
    ]
    worst = [f"{numbers.percent(share, 0)} of the limit ({where})" for share, where in sorted(shares)[:1]]
    worst += [str(entry) for entry in sorted(comparisons(results), key=lambda entry: entry.speed)[:1]]
    return f" Its worst: {' and '.join(worst)}." if worst else ""


def _limited(records: list[Record]) -> list[Record]:
    return [record for record in of(records, OWN) if "fraction" in record.values]
