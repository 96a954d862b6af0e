"""The catalogue: every public callable under every mode, without an error, and as predicted."""

from collections.abc import Iterator

import pytest
import torch

from dispatcher_trace import Shims, installed, record
from dispatcher_trace.measure import agreement
from dispatcher_trace.measure.catalogue import CATALOGUE

# The kinds of operators that issue trackers and code reviews are about; the catalogue has at least one of each.
FAMILIES = {
    *("unary", "binary", "reduction", "view", "in-place", "indexing", "linalg"),
    *("conv", "norm", "attention", "loss", "optimizer", "RNG", "factory"),
}


@pytest.fixture(scope="module")
def refused() -> dict[tuple[str, str], str]:
    return agreement.refused("cpu")


@pytest.fixture(scope="module")
def shims(refused: dict[tuple[str, str], str]) -> Iterator[Shims]:
    with installed("all") as shims:
        yield shims


def test_the_catalogue_is_wide() -> None:
    assert len({entry.name for entry in CATALOGUE}) == len(CATALOGUE) >= 50
    assert {entry.family for entry in CATALOGUE} == FAMILIES


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_callables_under_every_mode(step: int, refused: dict[tuple[str, str], str], shims: Shims) -> None:
    catalogue = CATALOGUE[::step]
    measured = list(agreement.measure(shims, "cpu", refused, catalogue))
    assert len(measured) >= 200 / step
    assert len({item.entry for item in measured}) == len(catalogue)
    assert [(item.mode, item.entry, item.error) for item in measured if item.error] == []
    shares = {}
    for mode in agreement.MODES:
        items = [item for item in measured if item.mode == mode]
        shares[mode] = 1 - sum(len(item.disagreements) for item in items) / sum(item.calls for item in items)
    assert min(shares[mode] for mode in agreement.MODES if mode not in agreement.INSIDE_FUNCTORCH) >= 0.98
    assert min(shares[mode] for mode in agreement.INSIDE_FUNCTORCH) >= 0.90
    unexplained = [found for item in measured for found in item.disagreements if not found.cause]
    assert unexplained == []


def test_what_torch_itself_refuses_is_left_out(refused: dict[tuple[str, str], str]) -> None:
    assert ("vmap", "torch.masked_select") in refused  # its size depends on data
    assert ("requires_grad", "torch.argmax") in refused
    assert not [key for key in refused if key[0] in ("plain", "no_grad", "inference_mode", "autocast")]
    assert len(refused) < 0.1 * len(CATALOGUE) * len(agreement.MODES)


def test_known_causes_are_no_findings(shims: Shims) -> None:
    with record(shims, kernels=False) as t:
        torch.func.jvp(torch.sin, (torch.ones(2),), (torch.ones(2),))
    assert {call.operator for call in t.all_calls if not call.agrees} == {"aten::_fw_primal", "aten::_make_dual"}
    assert [finding for finding in t.findings if finding.kind == "prediction"] == []
