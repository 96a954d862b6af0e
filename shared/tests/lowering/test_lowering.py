"""The choice between an operator's two lowerings: who decides, what is guarded, what the tables say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lowering
from benchkit import UserError
from lowering import Evidence, Row, choice, lower, rows, table

SOURCE = "lowering"  # any package
EVIDENCE = Evidence("planted", 1.2, 1.1, 1.3, 0.99, 1.01, "a processor, 2 threads", "2.13.0", "abc", "2026-11-24")


def row(**changes: Any) -> Row:
    machine = lowering.machine_class("cpu")
    made = Row(machine, "square", "float32", "inference", {"rows": 8, "columns": 4}, "kernel", EVIDENCE)
    return replace(made, **changes)


@torch.library.custom_op("lowering_tests::square", mutates_args=())
def square_kernel(x: torch.Tensor) -> torch.Tensor:
    return x * x


square_kernel.register_fake(torch.empty_like)
square_kernel.register_autograd(
    lambda ctx, gradient: 2 * ctx.saved_tensors[0] * gradient,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def square(x: torch.Tensor, asked: lowering.Lowering | None = None, available: bool = True) -> torch.Tensor:
    rows = ("rows", x.shape[:-1].numel() if x.ndim > 1 else x.numel())
    sizes = () if x.ndim == 0 else (rows, ("columns", x.shape[-1]))[: x.ndim]
    return lower(
        "square", asked, lambda x: x * x, square_kernel, x, sizes=sizes, available=lambda: available, source=SOURCE
    )


class Compiled:
    """A compiled function that keeps what its graphs contain."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.graphs: list[dict[str, set[str]]] = []
        self._call = torch.compile(function, fullgraph=True, backend=self._backend, **options)

    def _backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(lowering.in_graph(graph))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    @property
    def choices(self) -> list[str]:
        return [next(iter(graph["square"])) for graph in self.graphs]


@pytest.fixture(autouse=True)
def no_other_tables(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("LOWERING_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(choice, "_added", "")
    monkeypatch.setattr(choice, "_mode", "replay")
    torch.compiler.reset()


@pytest.fixture
def use(tmp_path, monkeypatch):
    def with_rows(*rows: Row) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        lowering.write_table(path, rows)
        lowering.load_table(path)
        return path

    return with_rows


def test_without_a_measurement_the_formula_is_traced():
    compiled = Compiled(square)
    compiled(torch.ones(8, 4))
    assert compiled.choices == ["formula"]


def test_a_changed_context_compiles_again_and_the_first_program_is_kept():
    compiled, x = Compiled(square), torch.ones(8, 4)
    compiled(x)
    with lowering.choose("kernel"):
        compiled(x)
        with lowering.choose("formula", "square"):
            compiled(x)
    compiled(x)
    with lowering.choose("kernel", "square"):
        compiled(x)
    # The choice for every operator and the one by name are different guards.
    assert compiled.choices == ["formula", "kernel", "formula", "kernel"]
    with lowering.choose("kernel", "another"):
        compiled(x)
    assert len(compiled.graphs) == 4


def test_a_context_inside_of_what_is_compiled():
    def within(x):
        with lowering.choose("kernel", "square"):
            return square(x)

    compiled = Compiled(within)
    compiled(torch.ones(8, 4))
    assert compiled.choices == ["kernel"]
    assert not choice._chosen


@pytest.mark.parametrize("asked", ["formula", "kernel"])
def test_a_call_with_its_own_lowering_is_honoured(asked, use):
    use(row())
    compiled = Compiled(lambda x: square(x, asked))
    with lowering.choose("kernel" if asked == "formula" else "formula"):
        compiled(torch.ones(8, 4))
    assert compiled.choices == [asked]


def test_an_unknown_lowering_is_an_error():
    message = "lowering: expected one of formula, kernel, measured, got 'open'"
    with pytest.raises(ValueError, match=message), lowering.choose("open"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match=message):
        lowering.check_lowering("open")


def test_both_lowerings_have_the_same_gradient_through_aot():
    x = torch.randn(8, 4, requires_grad=True)
    found = []
    for asked in ("formula", "kernel"):
        compiled = Compiled(lambda x, asked=asked: square(x, asked) + 1)
        found += [torch.autograd.grad(compiled(x).sum(), x)]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("changes", "shape", "gradient", "expected"),
    [
        ({}, (8, 4), False, "kernel"),
        ({}, (2, 4, 4), False, "kernel"),
        ({}, (4, 4), False, "kernel"),
        ({}, (16, 4), False, "kernel"),
        ({}, (3, 4), False, "formula"),
        ({}, (17, 4), False, "formula"),
        ({}, (8, 5), False, "formula"),
        ({}, (8, 4), True, "formula"),
        ({"direction": "training"}, (8, 4), True, "kernel"),
        ({"dtype": "bfloat16"}, (8, 4), False, "formula"),
        ({"machine": "sm_90"}, (8, 4), False, "formula"),
        ({"operator": "cube"}, (8, 4), False, "formula"),
        ({"choice": "formula"}, (8, 4), False, "formula"),
        ({"sizes": {}, "dtype": ""}, (1, 1), False, "kernel"),
        ({"sizes": {"rows": 8}}, (16,), False, "kernel"),
        ({"sizes": {"rows": 8}}, (17,), False, "formula"),  # measured for other sizes, as with several
        ({}, (), False, "formula"),
    ],
)
def test_a_row_applies_to_its_machine_dtype_direction_and_sizes(changes, shape, gradient, expected, use):
    use(row(**changes))
    compiled = Compiled(square)
    compiled(torch.ones(shape, requires_grad=gradient))
    assert compiled.choices == [expected]


def test_a_kernel_that_cannot_be_used_here_leaves_the_formula(use):
    use(row())
    compiled = Compiled(lambda x: square(x, None, False))
    compiled(torch.ones(8, 4))
    assert compiled.choices == ["formula"]


def test_with_dynamic_shapes_the_range_is_a_guard(use):
    use(row())
    compiled = Compiled(square, dynamic=True)
    for first in (8, 9, 16, 17, 30, 5):
        compiled(torch.ones(first, 4))
    assert compiled.choices == ["kernel", "formula"]


def test_another_table_compiles_again(use):
    compiled = Compiled(square)
    compiled(torch.ones(8, 4))
    use(row())
    compiled(torch.ones(8, 4))
    assert compiled.choices == ["formula", "kernel"]


def test_an_added_table_and_the_newest_row_have_priority(use, tmp_path, monkeypatch):
    committed = tmp_path / "committed.json"
    lowering.write_table(committed, [row(choice="formula")])
    monkeypatch.setattr(table, "COMMITTED", committed)
    added = use(row(sizes={"rows": 10, "columns": 4}, choice="formula"), row())
    own = row(choice="formula", sizes={})
    lowering.keep_rows([own], SOURCE, "cpu")
    found = rows.rows_here("square", SOURCE, "cpu", str(added))
    origins = [str(added), str(added), rows.TUNED_ORIGIN, rows.COMMITTED_ORIGIN]
    assert [(origin, found_row.choice) for origin, found_row in found] == list(
        zip(origins, ["kernel", "formula", "formula", "formula"], strict=True)
    )


def test_a_row_replaces_the_one_of_the_same_call_only(tmp_path):
    path = tmp_path / "table.json"
    lowering.write_table(path, [row(), row(operator="cube")])
    lowering.write_table(path, [row(choice="formula")])
    assert [(each.operator, each.choice) for each in lowering.read_table(path)] == [
        ("cube", "kernel"),
        ("square", "formula"),
    ]


def test_contexts_of_threads_may_end_in_any_order():
    first, second = lowering.choose("kernel"), lowering.choose("formula", "square")
    compiled, x = Compiled(square), torch.ones(8, 4)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    compiled(x)
    second.__exit__(None, None, None)
    assert choice._chosen == {}
    with lowering.choose("kernel"):
        compiled(x)
    assert compiled.choices == ["formula", "kernel"]


def test_a_table_that_is_written_again_is_taken_anew(use, monkeypatch):
    compiled, x = Compiled(square), torch.ones(8, 4)
    path = use(row())
    compiled(x)
    lowering.write_table(path, [row(choice="formula")])
    monkeypatch.chdir(path.parent)
    lowering.load_table(path.name)
    monkeypatch.chdir("/")
    compiled(x)
    assert compiled.choices == ["kernel", "formula"]


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}', '{"version": 1, "rows": [{"operator": "a"}]}'])
def test_a_file_that_is_no_table_is_one_line(text, tmp_path):
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(UserError, match=r"table\.json: expected a table of lowerings .* measure it again"):
        lowering.load_table(tmp_path / "table.json")


def test_another_version_of_the_table_is_one_line(tmp_path):
    (tmp_path / "table.json").write_text(json.dumps({"version": 9, "rows": []}))
    with pytest.raises(UserError, match="expected version 1 of the table of lowerings, got 9"):
        lowering.read_table(tmp_path / "table.json")


def test_calls_are_recorded_with_their_sizes():
    def twice(x):
        return square(square(x.bfloat16()), "kernel")

    with lowering.recorded_calls() as calls:
        torch.compile(twice, backend="eager", dynamic=False)(torch.ones(2, 3, 4, requires_grad=True))
    expected = lowering.Call("square", "cpu", "bfloat16", "training", (("rows", 6), ("columns", 4)), SOURCE)
    assert calls == [expected, expected]
    torch.compile(twice, backend="eager", dynamic=False)(torch.ones(2, 3, 5))
    assert len(calls) == 2


def test_the_table_is_told_in_words(use):
    path = use(row())
    told = lowering.describe({"square": SOURCE}, "cpu", str(path))
    assert told.startswith(f"lowering under torch.compile on {lowering.machine_class('cpu')}; the formula where no row")
    assert "| square | float32 | 8 rows × 4 columns | inference | kernel |" in told
    assert "1.20× (1.10–1.30)" in told
    assert f"| planted | {path} |" in told
    assert "the formula (no measured row); compile-bench tune" in lowering.describe({"cube": SOURCE}, "cpu")


def test_classes_of_machines(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(table.processor, "vendor", lambda: "amd")
    monkeypatch.setattr(table.processor, "family", lambda: "family 25, model 17")
    assert lowering.machine_class("cpu") == "cpu-avx2-amd-zen-4"
    monkeypatch.setattr(table.processor, "vendor", lambda: "")
    monkeypatch.setattr(table.processor, "family", lambda: "")
    assert lowering.machine_class("cpu") == "cpu-avx2"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert lowering.machine_class("cuda") == "sm_90"
    assert lowering.machine_class("mps") == "mps"


def test_the_annotation_of_torch_reaches_the_graph_of_aot():
    graphs = []

    def compiler(graph, inputs):
        graphs.append(lowering.in_graph(graph))
        return graph

    from torch._dynamo.backends.common import aot_autograd

    torch.compile(square, backend=aot_autograd(fw_compiler=compiler))(torch.ones(8, 4))
    assert graphs == [{"square": {"formula"}}], "torch.fx.traceback.annotate has moved or means something else"
