"""Equal arrays of two frameworks, in any order of the axes and with any division into axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

_PROJECTIONS = 8
TIMES = 30.0  # times what the noise does to an array: a few projections estimate a distance to a factor of about two
_NOT_A_NUMBER = 12345.678  # in its place, so that NaN differs from what others compute


class Index:
    """Arrays by their number of elements, to find one that equals another in some order of its axes.

    An array comes with its largest distance in runs with noise. With ``exact`` only the distance of the other side is
    allowed; that of a side in float32 is larger.
    """

    def __init__(self, arrays: Iterable[tuple[NDArray, float]], *, exact: bool = False) -> None:
        self._exact = exact
        self._plain: dict[int, list[NDArray]] = {}
        self._turned: dict[int, list[NDArray]] = {}
        self._strays: dict[int, list[float]] = {}
        self._orders: dict[int, list[int]] = {}
        for value, stray in arrays:
            keys = _keys(value)
            for key in keys:
                self._turned.setdefault(value.size, []).append(key)
            self._plain.setdefault(value.size, []).append(keys[0])
            self._strays.setdefault(value.size, []).append(stray)
            self._orders.setdefault(value.size, []).append(len(keys))

    def meets(self, value: NDArray, stray: float) -> bool:
        """Whether one of the arrays equals this one. An array of one repeated number is no evidence."""
        plain = finite(value)
        if value.size not in self._plain or (value.size > 1 and np.ptp(plain) == 0):
            return False
        least = 64 * np.finfo(np.float64).eps * float(np.linalg.norm(plain))
        strays = np.array(self._strays[value.size])
        allowed = np.maximum(TIMES * (stray if self._exact else np.maximum(stray, strays)), least)
        keys = _keys(value)
        turned = np.repeat(allowed, np.array(self._orders[value.size])) if allowed.ndim else allowed
        pairs = ((np.stack(keys), self._plain, allowed), (keys[0][None], self._turned, turned))
        return any(
            bool((np.linalg.norm(np.stack(table[value.size]) - key, axis=1) <= limit).any())
            for made, table, limit in pairs
            for key in made
        )


def _keys(value: NDArray) -> list[NDArray]:
    """Project an array in each order of its axes; the first is its own order."""
    wide = finite(value).squeeze()
    orders = itertools.permutations(range(wide.ndim)) if wide.ndim <= 4 else [range(wide.ndim)]
    return [_signs(wide.size) @ wide.transpose(order).ravel() for order in orders]


def finite(value: NDArray) -> NDArray:
    """The array in float64, with 0 for what masks hold: infinities and numbers near the largest; NaN is a number."""
    wide = value.astype(np.float64)
    return np.where(np.isnan(wide), _NOT_A_NUMBER, np.where(np.abs(wide) < 1e30, wide, 0.0))


@cache
def _signs(size: int) -> NDArray:
    return np.random.default_rng(size).standard_normal((_PROJECTIONS, size)) / np.sqrt(_PROJECTIONS)
