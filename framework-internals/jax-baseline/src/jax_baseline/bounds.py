"""How far rounding may move a number: the bound by which ``parity`` and ``diff`` judge what they compare."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

# Part of the correct implementations that a whole comparison may call wrong, see :func:`margin`.
FALSE_ALARMS = 1e-5

# A bound above this part of the quantity itself is never a pass: what it lets through is no longer rounding. A port
# with another activation moves a gradient by about as much.
LARGEST_BOUND = 0.1


def multiple(distance: float, bound: float) -> float:
    """Return a distance in multiples of its bound; infinite for one that is not finite, or over a bound of zero."""
    if distance <= bound:
        return distance / bound if bound else 0.0
    return distance / bound if bound and math.isfinite(distance) else math.inf


@cache
def margin(draws: int, rate: float) -> float:
    """Return c so that a normal number is over c times the largest of n others in a share ``rate`` of cases.

    P(|Z₀| > c · max |Zᵢ|) = ∫ 2 φ(z) erf(z / (c √2))ⁿ dz for independent Z of the same variance. An array's deviation
    is a sum of many squares and varies less than one number.

    Args:
        draws: Number n of the other numbers.
        rate: Wanted probability, between 0 and 1/2.
    """
    z = np.linspace(0, 30, 3001)
    density = np.sqrt(2 / np.pi) * np.exp(-(z**2) / 2) * z[1]

    def tail(times: float) -> float:
        return float(density @ (np.array([math.erf(x / (times * math.sqrt(2))) for x in z]) ** draws))

    low, high = 1.0, 2.0
    while tail(high) > rate:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) > rate else (low, middle)
    return high
