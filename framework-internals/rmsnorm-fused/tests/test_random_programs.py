"""Random normalisations of every kind against float64, within the bounds of bench/accuracy.py."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from .conftest import Where
from .test_rmsnorm_numerics import DTYPES, NARROW, Case, cases, check, check_quantised

PROGRAMS = {
    "programs": "RMSNorm over shapes × strides × dtypes × residual × weight × rounding × float8, forward and backward",
    "oracle": "float64, within derived bounds; arguments unchanged",
}


@st.composite
def programs(draw: st.DrawFn) -> tuple[str, Case, object]:
    """A back end, a case, and the scale of a float8 result or None."""
    scale = draw(st.sampled_from([None, None, "dynamic", 0.01, 1.0, 30.0]))
    backend = draw(st.sampled_from(["cpp", "cpp", "cpp", "pytorch"]))
    return backend, draw(cases("cpu", DTYPES if scale is None else NARROW)), scale


def agree(program: tuple[str, Case, object]) -> str:
    backend, case, scale = program
    if scale is None:
        check(Where(backend, "cpu"), case)
        return "forward and backward"
    check_quantised(Where(backend, "cpu"), case, scale)
    return "float8"


@pytest.mark.fuzz
def test_every_normalisation_is_within_its_bound(fuzz):
    fuzz.run(programs(), agree, **PROGRAMS, wanted=2500)
