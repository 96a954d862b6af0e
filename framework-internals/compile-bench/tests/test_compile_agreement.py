"""The counts of breaks against PyTorch's own tellers."""

from pathlib import Path

import pytest
import torch

from compile_bench.measure.agreement_worker import agreement, places
from compile_bench.targets.case import Case


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("train", [True, False])
def test_all_three_agree_on_planted_breaks(train):
    found = agreement(Case("planted", train=train))
    assert len(found.places) == 3
    assert found.agrees, found.differences


@pytest.mark.slow
def test_a_break_in_a_library_is_at_the_same_line_in_the_log():
    pytest.importorskip("transformers")
    found = agreement(Case("gpt2"))
    assert found.agrees, found.differences
    assert [Path(place).name.split(":")[0] for place in found.places] == ["modeling_utils.py"]


def test_all_three_agree_where_nothing_breaks():
    found = agreement(Case("mlp"))
    assert (found.graphs, found.places, found.differences) == (1, (), ())


def test_the_log_names_the_innermost_line_of_the_users():
    message = """Graph break in user code at /user/outer.py:3
Graph Break Reason: x
User code traceback:
  File "/user/outer.py", line 3, in forward
    return inner(x)
  File "/user/inner.py", line 9, in inner
    print(x)
"""
    assert places([message, "Graph break in user code at /user/alone.py:4\n"]) == {
        "/user/inner.py:9",
        "/user/alone.py:4",
    }
