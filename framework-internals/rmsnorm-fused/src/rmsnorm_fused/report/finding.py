"""What a run found: the share of the limit, when to use the kernels and when not, and the worst of all ratios."""

from __future__ import annotations

from benchkit import Record, Results, numbers
from rmsnorm_fused.bench.candidates import OWN
from rmsnorm_fused.bench.training import BASELINE
from rmsnorm_fused.report.queries import (
    PASSES,
    as_text,
    cases,
    compared_with_peer,
    comparisons,
    fastest,
    headline_shape,
    records_of,
)

_NAMED = 3  # cases that another implementation wins


def headline(results: Results) -> str:
    """The shares of the copy limit: the first sentence."""
    best = _headline_shares(results)
    if not best:
        lost = "can run here" if _none_can_run(results) else "was measured"
        return f"RMSNorm at {headline_shape(results)}: none of this package's kernels {lost}."
    return f"RMSNorm at {headline_shape(results)} reaches {' and '.join(best)}."


def use(results: Results) -> str:
    """The speed beside the strongest other implementation, as the end of a sentence."""
    peers = (compared_with_peer(results.select(which, group="headline"), which) for which in PASSES)
    gains = [str(peer) for peer in peers if peer is not None]
    steps = [entry for entry in comparisons(results) if entry.peer == BASELINE and entry.speed > 1]
    gains += [f"{numbers.with_unit(entry.speed, '×')} in {entry.where}" for entry in steps]
    return f"a norm is large or stands alone: {', '.join(gains)}." if gains else ""


def avoid(results: Results) -> str:
    """The cases in which another implementation is as fast or faster, as the end of a sentence."""
    every = sorted(comparisons(results), key=lambda entry: entry.speed)
    lost = [entry for entry in every if entry.speed < 1]
    if lost:
        more = f" ({len(lost)} of {len(every)} cases)" if len(lost) > 1 else ""
        return f"another is faster: {', '.join(map(str, lost[:_NAMED]))}{more}."
    if every:
        return f"the gain is too small for you: {every[0]}."
    return "none of its kernels can run, as here." if _none_can_run(results) else ""


def worst(results: Results) -> str:
    """The slowest of all cases beside another implementation, and the smallest share of the limit, as a sentence."""
    ratios = sorted(comparisons(results), key=lambda entry: entry.speed)[:1]
    return f"{'; '.join([*map(str, ratios), *_smallest_share(results)])}." if ratios else ""


def _none_can_run(results: Results) -> bool:
    """Whether each kernel is absent for a reason of its own; a run that lacked time measures none either."""
    absent = {absence.what for absence in results.absences}
    return all(as_text(name) in absent for name in OWN)


def _headline_shares(results: Results) -> list[str]:
    best = ((which, fastest(results.select(which, group="headline"), OWN)) for which in PASSES)
    return [
        f"{_of_the_limit(record['fraction'].value)} {which}"
        for which, record in best
        if record is not None and "fraction" in record.values
    ]


def _of_the_limit(share: float) -> str:
    return "the copy limit" if round(share, 2) >= 1 else f"{numbers.percent(share, 0)} of the copy limit"


def _smallest_share(results: Results) -> list[str]:
    shares = [
        (max(record["fraction"].value for record in limited), where)
        for where, records in cases(results)
        if records[0].labels.get("group") != "batches" and (limited := _limited(records))
    ]
    return [f"{numbers.percent(share, 0)} of the limit ({where})" for share, where in sorted(shares)[:1]]


def _limited(records: list[Record]) -> list[Record]:
    return [record for record in records_of(records, OWN) if "fraction" in record.values]
