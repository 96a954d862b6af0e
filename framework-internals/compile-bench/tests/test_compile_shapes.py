"""Shapes that change: schedules, padding, what varies, and which strategy is recommended."""

import re
from pathlib import Path

import pytest
import torch

from benchkit import Quantity, UserError
from benchkit.report import render
from benchkit.results import load_report
from compile_bench.capture.trace import Recompile
from compile_bench.cli.measuring import describe_shapes
from compile_bench.measure.records import ShapeStudy
from compile_bench.measure.shape_schedule import _prepare, make_calls, shapes, varying_sizes
from compile_bench.measure.shapes import Passes, cheapest, ranking, tied
from compile_bench.report.sections import report
from compile_bench.targets.case import Case
from compile_bench.targets.target import Target

from .printed import printed_text


def target(*args, **kwargs):
    return Target(torch.nn.Identity(), args, kwargs)


def sizes_of(calls):
    return [tuple(call.args[0].shape) for call in calls]


def test_schedules_are_cut_from_the_arguments():
    whole = target(torch.ones(8, 12), labels=torch.ones(8))
    assert sizes_of(make_calls(whole, "last-batch")) == [(8, 12), (8, 12), (5, 12)]
    assert sizes_of(make_calls(target(torch.ones(2, 12)), "last-batch")) == [(2, 12), (2, 12), (1, 12)]
    assert sizes_of(make_calls(whole, "batch-1")) == [(8, 12), (1, 12), (8, 12)]
    assert sizes_of(make_calls(whole, "growing-sequence")) == [(8, 3), (8, 6), (8, 9), (8, 12)]
    assert make_calls(whole, "last-batch")[2].kwargs["labels"].shape == (5,)
    assert make_calls(whole, "growing-sequence")[0].kwargs["labels"].shape == (8,)


def test_schedules_that_cannot_be_cut_are_one_line():
    with pytest.raises(UserError, match="--schedule takes last-batch, batch-1, growing-sequence, got 'random'"):
        make_calls(target(torch.ones(2)), "random")
    with pytest.raises(UserError, match="cuts dimension 1 of the first tensor argument: there is none"):
        make_calls(target(torch.ones(2)), "growing-sequence")


def test_what_varies_is_found():
    calls = [target(torch.ones(n, 3), torch.ones(4)) for n in (8, 8, 5)]
    assert varying_sizes(calls) == {(0, 0): [8, 8, 5]}
    with pytest.raises(UserError, match="all calls of the schedule have the same shapes"):
        varying_sizes(calls[:2])
    with pytest.raises(UserError, match="number of tensors or in their ranks"):
        varying_sizes([target(torch.ones(2)), target(torch.ones(2, 2))])


def test_buckets_and_padding_only_grow_what_varies():
    calls = [target(torch.full((n, 3), 7.0)) for n in (3, 5, 6)]
    sizes = varying_sizes(calls)
    assert sizes_of(_prepare(calls, "padding", sizes)) == [(6, 3)] * 3
    bucketed = _prepare(calls, "buckets", sizes)
    assert sizes_of(bucketed) == [(4, 3), (6, 3), (6, 3)]  # a power of two, but no more than the largest
    assert bucketed[0].args[0].sum() == 63  # what is padded is zero
    assert sizes_of(calls) == [(3, 3), (5, 3), (6, 3)]


def passes(strategy, first, later, spread=0.0):
    return Passes(strategy, first, Quantity(later, "s", later - spread, later + spread, 9, "p20-p80"), 1)


def test_the_recommendation_is_the_cheapest_total_and_changes_with_the_passes():
    study = ShapeStudy.of_case(
        Case("x"),
        ("[8]", "[5]"),
        ("args[0] dimension 0",),
        (passes("eager", 0.1, 0.1), passes("automatic", 5.0, 0.05), passes("static", 9.0, 0.01)),
    )
    assert [study.ranking(count)[0].strategy for count in (1, 100, 120, 10_000)] == [
        "eager",
        "automatic",
        "static",
        "static",
    ]
    assert study.ranking(10_000)[0].total(10_000)[0] == pytest.approx(9.0 + 9_999 * 0.01)
    assert "cheapest for 1 pass: eager" in printed_text(describe_shapes, study, 1)


def test_the_lowest_total_is_named_first_and_a_tie_names_the_simpler():
    level = (passes("padding", 5.0, 0.050, 0.01), passes("automatic", 5.0, 0.051, 0.01), passes("eager", 0.0, 9.0))
    assert [each.strategy for each in ranking(level, 100)] == ["padding", "automatic", "eager"]
    assert cheapest(level, 100) == (
        "padding (pad everything to the largest shape, one code; only where the model masks what is added), 9.95 s; "
        "automatic takes as long within p20–p80, and automatic is simpler"
    )
    assert [each.strategy for each in tied(level[1:], 1)] == ["eager"]


def test_not_compiling_is_the_simplest_of_all():
    level = (passes("padding", 1.0, 0.1), passes("eager", 1.0, 0.1), passes("automatic", 1.0, 0.1))
    assert cheapest(level, 10).endswith("eager and automatic take as long within p20–p80, and eager is the simplest")


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_report_names_the_lowest_total_of_its_own_table(device):
    text = render(load_report(Path(__file__).parent / "golden" / "reports" / device), report)
    (header, rows) = re.search(r"^\| strategy \| first pass (.+) \|\n.+\n((?:\|.+\n)+)", text, re.MULTILINE).groups()
    totals = {
        row.split(" | ")[0].removeprefix("| "): row.removesuffix(" |").split(" | ")[-3:] for row in rows.splitlines()
    }
    for index, column in enumerate(header.split(" | ")[-3:]):
        lowest = min(totals, key=lambda strategy: seconds(totals[strategy][index]))
        assert f"- Cheapest for {column}: {lowest} (" in text


def seconds(text):
    value, unit = text.split()
    return float(value.replace(",", "")) * {"s": 1.0, "ms": 1e-3}[unit]


def test_a_strategy_that_fails_is_shown_and_never_recommended():
    study = ShapeStudy.of_case(
        Case("x"), ("[8]",), ("d",), (Passes("padding", failed="ValueError: no"), passes("eager", 1.0, 1.0))
    )
    assert [each.strategy for each in study.ranking(5)] == ["eager"]
    assert "| padding | fails: ValueError: no |" in printed_text(describe_shapes, study, 5)


FILE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from compile_bench.targets.target import Target

class Collate:
    def __iter__(self):
        return iter(DataLoader(torch.arange(10.0).reshape(10, 1), batch_size=4))

def loader():
    return Target(torch.nn.Linear(1, 1), (torch.ones(4, 1),), schedule=Collate())

def real_loader():
    data = TensorDataset(torch.ones(10, 1))
    return Target(torch.nn.Linear(1, 1), (torch.ones(4, 1),), schedule=DataLoader(data, batch_size=4))

def sparse():
    return Target(torch.nn.Identity(), (torch.eye(4).to_sparse(),))

def compiles_itself():
    return Target(torch.compile(torch.nn.Linear(1, 1)), (torch.ones(4, 1),), schedule=[(torch.ones(3, 1),)])

def breaks_off():
    return Target(torch.nn.Linear(1, 1), (torch.ones(4, 1),), schedule=[(torch.ones(4, 2),)])
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "schedules.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("name", ["loader", "real_loader"])
def test_a_data_loader_is_a_schedule(file, name):
    answer = shapes(Case(f"{file}:{name}", train=False), strategy="eager", schedule="", seconds=0.0)
    assert answer.schedule == ("[4, 1]", "[4, 1]", "[4, 1]", "[2, 1]")
    assert answer.varying == ("args[0] dimension 0",)
    assert answer.passes[0].later.samples >= 3


def test_a_call_that_fails_eagerly_is_the_users(file):
    with pytest.raises(UserError, match="a call of the schedule raised RuntimeError"):
        shapes(Case(f"{file}:breaks_off", train=False), strategy="eager", schedule="", seconds=0.0)
    with pytest.raises(UserError, match="has no schedule of shapes"):
        shapes(Case("mlp"), strategy="eager", schedule="", seconds=0.0)


def test_what_has_no_strategies_is_told_before_any_is_measured(file):
    with pytest.raises(UserError, match="compiles Linear itself: return the model uncompiled"):
        shapes(Case(f"{file}:compiles_itself", train=False), strategy="eager", schedule="", seconds=0.0)
    with pytest.raises(UserError, match="--schedule batch-1 cannot cut the arguments: "):
        shapes(Case(f"{file}:sparse", train=False), strategy="eager", schedule="batch-1", seconds=0.0)


def test_without_a_recompilation_there_is_none_to_tell():
    three = tuple(passes(name, 1.0, 1.0) for name in ("eager", "dynamic", "padding"))
    study = ShapeStudy.of_case(Case("x"), ("[8]", "[5]"), ("kwargs['x'] dimension 0",), three)
    assert "recompiled, since" not in printed_text(describe_shapes, study, 5)


def test_a_tensor_that_occurs_twice_is_padded_once():
    x, y = torch.ones(3, 2), torch.ones(5, 2)
    calls = [Target(torch.nn.Identity(), (x, x, y[:2])), Target(torch.nn.Identity(), (y, y, y[:4]))]
    short, long = _prepare(calls, "padding", varying_sizes(calls))
    assert short.args[0] is short.args[1]
    assert [[*map(len, call.args)] for call in (short, long)] == [[5, 5, 4], [5, 5, 4]]


def test_recompilations_are_told_with_what_changed():
    again = Recompile(
        "m.py", 3, "tensor 'x' size mismatch at index 0. expected 8, actual 5", compile_id="0/1", function="forward"
    )
    one = Passes("automatic", 1.0, Quantity(0.1, "s", 0.1, 0.1, 3, "p20-p80"), 2, (again,))
    text = printed_text(
        describe_shapes, ShapeStudy.of_case(Case("x"), ("[8]", "[5]"), ("args[0] dimension 0",), (one,)), 10
    )
    assert " | x has size 5 in dimension 0, compiled for 8 |" in text
