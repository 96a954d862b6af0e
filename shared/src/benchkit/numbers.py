"""Numbers as text: every figure gets its digits and units here."""

from __future__ import annotations

import math

from benchkit.results import Quantity

_Prefixes = tuple[tuple[float, str], ...]

_TIME: _Prefixes = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BINARY: _Prefixes = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_DECIMAL: _Prefixes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_PREFIXED = ("B/s", "FLOP/s", "FLOP")


def significant(value: float, digits: int = 3) -> str:
    """``value`` with that many significant digits, never in exponent form: 0.01234 → 0.0123, 1234.5 → 1,234."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    rounded = float(f"{value:.{digits - 1}e}")  # rounding moves the first digit of 0.9996 before the point
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{value:,.{max(decimals, 0)}f}"


def error_size(value: float) -> str:
    """A numerical error or bound, in exponent form: 1.2e-06; an exact zero is 0."""
    return "0" if value == 0 else f"{value:.1e}"


def percent(fraction: float, digits: int = 1) -> str:
    """0.953 → 95.3 %."""
    return f"{fraction * 100:.{digits}f} %"


def count(value: float) -> str:
    """1234567 → 1,234,567."""
    return f"{round(value):,}"


def with_unit(value: float, unit: str) -> str:
    """A figure in base units with a suitable prefix: (1.31e-4, "s") → 131 µs; (4.2e12, "B/s") → 4.20 TB/s.

    Args:
        value: The figure.
        unit: A unit that :class:`benchkit.results.Quantity` lists. Any other unit follows the number unchanged.
    """
    if unit == "":
        return count(value) if float(value).is_integer() else significant(value)
    if unit == "×":
        return f"{significant(value)}×"
    scale, name = _scale(abs(value), unit)
    return f"{significant(value / scale)} {name}"


def quantity(figure: Quantity) -> str:
    """A quantity with its interval in the same unit, ``131 µs (130–133)``; without parentheses if it has none."""
    if figure.low is None or figure.high is None:
        return with_unit(figure.value, figure.unit)
    scale, _ = _scale(abs(figure.value), figure.unit)
    return (
        f"{with_unit(figure.value, figure.unit)} ({significant(figure.low / scale)}–{significant(figure.high / scale)})"
    )


def _scale(magnitude: float, unit: str) -> tuple[float, str]:
    """The divisor, and the unit with its prefix."""
    table: _Prefixes
    if unit == "s":
        table = _TIME
    elif unit == "B":
        table = _BINARY
    elif unit in _PREFIXED:
        table = tuple((scale, f"{prefix}{unit}") for scale, prefix in _DECIMAL)
    else:
        return 1.0, unit
    for scale, name in table:
        if magnitude >= scale * 0.9995:  # 0.9996 ms reads 1.00 ms, not 1,000 µs
            return scale, name
    return table[-1]
