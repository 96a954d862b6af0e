"""Where the medians in a table and the paired ratios beside them disagree, a note says so."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from benchkit import numbers

# A median of ratios is not the ratio of medians; up to this they are taken for the same.
TOLERANCE = 0.03
_NAMED = 2  # comparisons that the note spells out


def paired_ratio_note(rates: Mapping[str, float], ratios: Mapping[str, float], reference: str) -> str:
    """Say where the medians of the rates and the medians of the paired ratios disagree.

    They disagree over a variant if one is above 1 and the other below, or if they are over :data:`TOLERANCE` apart.
    They disagree over two variants if each orders them otherwise.

    Args:
        rates: Median rate of each variant (higher is better), by the name that the text uses. For times, their inverse.
        ratios: Median of the paired ratios of each variant over the reference, by the same names; above 1 is faster.
            The reference may be missing.
        reference: Name of the variant that the ratios are over.

    Returns:
        One paragraph for below the table, which names the largest disagreements and counts the others; an empty text if
        they agree everywhere.
    """
    others = [name for name in rates if name != reference]
    disagreements: list[tuple[float, str]] = []
    for name in others:
        implied, paired = rates[name] / rates[reference], ratios[name]
        if (implied - 1) * (paired - 1) < 0 or abs(implied / paired - 1) > TOLERANCE:
            text = (
                f"{name} is {numbers.significant(implied)}× {reference} by the medians and "
                f"{numbers.significant(paired)}× by the paired ratio"
            )
            disagreements.append((max(implied / paired, paired / implied), text))
    for pair in combinations(others, 2):
        first, second = sorted(pair, key=lambda name: -rates[name])
        if ratios[first] < ratios[second] and rates[first] > rates[second]:
            digits = 3 if ratios[first] < 0.99 * ratios[second] else 4
            paired_ratios = [f"{numbers.significant(ratios[name], digits)}×" for name in (first, second)]
            if paired_ratios[0] == paired_ratios[1]:
                continue
            shown = " and ".join(paired_ratios)
            text = f"{first} is faster than {second} by the medians and slower by the paired ratios ({shown})"
            disagreements.append((ratios[second] / ratios[first], text))
    if not disagreements:
        return ""
    disagreements.sort(key=lambda disagreement: -disagreement[0])
    named = "; ".join(text for _, text in disagreements[:_NAMED])
    others_too = f"; {len(disagreements) - _NAMED} more" if len(disagreements) > _NAMED else ""
    return (
        f"**The medians and the paired ratios disagree:** {named}{others_too}. A paired ratio is taken within one "
        "round, so a machine that changes its speed between rounds changes it less. Compare by the ratio."
    )
