"""Every way a number is shown, as a snapshot."""

from __future__ import annotations

import pytest

from benchkit import Quantity, numbers


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.314e-4, "s", "131 µs"),
        (0.9996e-3, "s", "1.00 ms"),
        (0.99e-3, "s", "990 µs"),
        (61.0, "s", "61.0 s"),
        (3e-10, "s", "0.300 ns"),
        (0.0, "s", "0 ns"),
        (1.5 * 2**30, "B", "1.50 GiB"),
        (512, "B", "512 B"),
        (4.235e12, "B/s", "4.24 TB/s"),
        (39.2e9, "B/s", "39.2 GB/s"),
        (788e12, "FLOP/s", "788 TFLOP/s"),
        (506374.0, "tokens/s", "506,374 tokens/s"),
        (1.2345, "×", "1.23×"),
        (12.345, "×", "12.3×"),
        (1234567, "", "1,234,567"),
        (2.5, "", "2.50"),
        (-1.5e-3, "s", "-1.50 ms"),
    ],
)
def test_with_unit(value, unit, text):
    assert numbers.with_unit(value, unit) == text


def test_quantity_has_its_interval_in_the_same_unit():
    assert numbers.quantity(Quantity(1.31e-4, "s", 0.9e-4, 1.2e-3, 9, "p20-p80")) == "131 µs (90.0–1,200)"
    assert numbers.quantity(Quantity(7, "")) == "7"
    assert numbers.quantity(Quantity(1.02, "×", 0.99, 1.051)) == "1.02× (0.990–1.05)"


def test_the_rest():
    assert numbers.percent(0.9534) == "95.3 %"
    assert numbers.percent(1, digits=0) == "100 %"
    assert numbers.error_size(0) == "0"
    assert numbers.error_size(1.26e-6) == "1.3e-06"
    assert numbers.significant(0.012345) == "0.0123"
    assert numbers.significant(float("inf")) == "inf"
    assert numbers.count(1234567.4) == "1,234,567"
