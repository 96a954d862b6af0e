"""The catalogue: every public callable under every mode, without an error, and as predicted."""

from collections import defaultdict
from collections.abc import Iterator

import pytest

from dispatcher_trace import Shims, agreement, installed
from dispatcher_trace.catalogue import CATALOGUE

# What issue trackers and code reviews name when they say "an operator": one of each at least.
FAMILIES = {
    *("unary", "binary", "reduction", "view", "in-place", "indexing", "linalg"),
    *("conv", "norm", "attention", "loss", "optimizer", "RNG", "factory"),
}


@pytest.fixture(scope="module")
def shims() -> Iterator[Shims]:
    with installed("all") as shims:
        yield shims


def test_the_catalogue_is_wide() -> None:
    assert len({entry.name for entry in CATALOGUE}) == len(CATALOGUE) >= 50
    assert {entry.family for entry in CATALOGUE} == FAMILIES


# torch's own, when forward-mode differentiation first imports its decompositions
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_every_callable_under_every_mode(shims: Shims) -> None:
    measured = list(agreement.measure(shims, "cpu"))
    assert len(measured) >= 200
    assert [(item.mode, item.entry, item.error) for item in measured if item.error] == []
    calls: dict[str, int] = defaultdict(int)
    wrong: dict[str, int] = defaultdict(int)
    for item in measured:
        calls[item.mode] += item.calls
        wrong[item.mode] += len(item.disagreements)
    for mode in agreement.MODES:
        expected = 0.90 if mode in agreement.INSIDE_FUNCTORCH else 0.98
        assert 1 - wrong[mode] / calls[mode] >= expected, mode
    unexplained = [found for item in measured for found in item.disagreements if not found.cause]
    assert unexplained == []


def test_modes_that_an_entry_has_not() -> None:
    by_name = {entry.name: entry for entry in CATALOGUE}
    assert agreement.prepare(by_name["torch.masked_select"], "vmap", "cpu") is None  # its size depends on data
    assert agreement.prepare(by_name["torch.argmax"], "func.grad", "cpu") is None
    assert agreement.prepare(by_name["torch.exp"], "func.jvp", "cpu") is not None
