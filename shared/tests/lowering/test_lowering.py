"""The choice between an operator's two lowerings: who decides, what is guarded, what tables and this machine say."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import InternalTorchDynamoError

import lowering
from benchkit import UserError
from lowering import Evidence, Row, choice, lower, rows, table, tuned

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


def test_tables_that_are_written_at_once_lose_nothing(tmp_path, monkeypatch):
    both_have_read = threading.Barrier(2)
    read_table = table.read_table

    def slowly(path):
        found = read_table(path)
        with suppress(threading.BrokenBarrierError):
            both_have_read.wait(0.2)
        return found

    path = tmp_path / "table.json"
    lowering.write_table(path, [row()])
    monkeypatch.setattr(table, "read_table", slowly)
    threads = [threading.Thread(target=table.write_table, args=(path, [row(operator=name)])) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {written.operator for written in read_table(path)} == {"square", "a", "b"}
    assert list(tmp_path.iterdir()) == [path]


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


@pytest.mark.parametrize(
    ("field", "value"),
    [("choice", "Kernel"), ("direction", "both"), ("sizes", {"rows": "4"}), ("sizes", [4]), ("speedup", "1.2")],
)
def test_a_row_with_a_value_that_no_row_has_is_one_line(field, value, use):
    path = use(row())
    document = json.loads(path.read_text())
    (plain,) = document["rows"]
    (plain["evidence"] if field == "speedup" else plain)[field] = value
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"expected a table of lowerings .* measure it again"):
        lowering.read_table(path)


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


def test_what_the_variable_asks_for_is_told(monkeypatch):
    monkeypatch.setattr(choice, "_mode", "off")
    assert lowering.describe({"square": SOURCE}, "cpu") == "lowering under torch.compile: the formula (LOWERING=off)"
    monkeypatch.setattr(choice, "_mode", "nope")
    with pytest.raises(UserError, match="LOWERING: expected one of off, replay, got 'nope'"):
        lowering.describe({"square": SOURCE}, "cpu")


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


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """An import package with a kernel, in a checkout with ``csrc`` beside ``src``."""
    root = tmp_path / "checkout"
    for file in ("src/planted_kernels/__init__.py", "csrc/kernel.cpp", "csrc/notes.md"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(f"# {file}")
    monkeypatch.syspath_prepend(str(root / "src"))
    tuned._fingerprint.cache_clear()
    yield root
    sys.modules.pop("planted_kernels", None)
    tuned._fingerprint.cache_clear()


def test_a_row_is_taken_without_being_named_and_a_new_one_compiles_again():
    compiled = Compiled(square)
    compiled(torch.ones(8, 4))
    lowering.keep_rows([row()], SOURCE, "cpu")
    compiled(torch.ones(8, 4))
    lowering.keep_rows([row(choice="formula")], SOURCE, "cpu")
    compiled(torch.ones(8, 4))
    assert compiled.choices == ["formula", "kernel", "formula"]
    assert len(list(tuned.folder(SOURCE, "cpu").glob("*.row.json"))) == 1


@pytest.mark.parametrize("first", [8, 10, 12, 14])
def test_of_several_rows_that_apply_the_nearest_is_taken(first):
    others = [row(choice="formula", sizes={"rows": size, "columns": 4}) for size in (8, 10, 12, 14) if size != first]
    lowering.keep_rows([row(sizes={"rows": first, "columns": 4}), *others], SOURCE, "cpu")
    compiled = Compiled(square, dynamic=False)
    for size in (8, 10, 12, 14):
        compiled(torch.ones(size, 4))
    assert compiled.choices == ["kernel" if size == first else "formula" for size in (8, 10, 12, 14)]


def test_each_row_is_a_file_of_its_own_and_no_other_is_touched():
    place = lowering.keep_rows([row()], SOURCE, "cpu")
    (first,) = place.glob("*.row.json")
    before = first.stat().st_mtime_ns
    lowering.keep_rows([row(sizes={"rows": 100, "columns": 4})], SOURCE, "cpu")
    assert len(list(place.glob("*.row.json"))) == 2
    assert first.stat().st_mtime_ns == before
    assert json.loads((place / "depends_on.json").read_text())["torch"] == torch.__version__


def test_writers_at_once_leave_whole_rows():
    made = [row(sizes={"rows": first, "columns": 4}) for first in range(1, 17)]
    threads = [threading.Thread(target=tuned.write, args=([made[index % 16]], SOURCE, "cpu")) for index in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found.sizes["rows"] for found in tuned.read(SOURCE, "cpu")) == list(range(1, 17))


@pytest.mark.parametrize("what", ["threads", "torch", "instructions", "kernel", "package"])
def test_what_a_measurement_depends_on_is_part_of_its_key(what, package, monkeypatch):
    place = tuned.write([row()], "planted_kernels", "cpu")
    assert tuned.read("planted_kernels", "cpu")
    if what == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    if what == "instructions":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX10")
    if what == "kernel":
        (package / "csrc" / "kernel.cpp").write_text("another")
    if what == "package":
        (package / "src" / "planted_kernels" / "more.py").write_text("")
    tuned._fingerprint.cache_clear()
    assert not tuned.read("planted_kernels", "cpu")
    assert (place / "depends_on.json").exists()  # a miss overwrites nothing: it is found again when all is as before


def test_a_page_beside_the_kernels_is_not_part_of_the_key(package):
    tuned.write([row()], "planted_kernels", "cpu")
    (package / "csrc" / "notes.md").write_text("another")
    tuned._fingerprint.cache_clear()
    assert tuned.read("planted_kernels", "cpu")


def test_a_damaged_file_is_no_row():
    place = lowering.keep_rows([row(), row(sizes={"rows": 100, "columns": 4})], SOURCE, "cpu")
    next(place.glob("*.row.json")).write_text('{"machine": "cpu')
    assert len(tuned.read(SOURCE, "cpu")) == 1


def test_lowering_off_takes_every_formula(monkeypatch):
    lowering.keep_rows([row()], SOURCE, "cpu")
    monkeypatch.setattr(choice, "_mode", "off")
    compiled = Compiled(square)
    compiled(torch.ones(8, 4))
    with lowering.choose("kernel", "square"):  # what the program asks for stays
        compiled(torch.ones(8, 4))
    assert compiled.choices == ["formula", "kernel"]


@pytest.mark.parametrize(("asked", "remedy"), [("on", ""), ("tune", "; compile-bench tune .* measures")])
def test_an_unknown_mode_is_an_error(asked, remedy, monkeypatch):
    monkeypatch.setattr(choice, "_mode", asked)
    message = f"LOWERING: expected one of off, replay, got '{asked}'{remedy}"
    with pytest.raises(ValueError, match=message):
        lowering.mode()
    compiled = Compiled(square)
    with pytest.raises(InternalTorchDynamoError, match=message):  # and not a call that stays uncompiled
        compiled(torch.ones(8, 4))


def test_in_a_process_group_only_the_rows_of_rank_0_count(monkeypatch):
    lowering.keep_rows([row()], SOURCE, "cpu")
    monkeypatch.setattr(rows, "_in_process_group", lambda: True)
    monkeypatch.setattr(rows, "_of_rank_0", {})
    assert not rows.rows_here("square", SOURCE, "cpu")
    of_rank_0 = [row(choice="formula")]

    def receive(objects: list) -> None:
        objects[0] = [of_rank_0]

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", receive)
    lowering.share_rows([SOURCE], "cpu")
    assert [found.choice for _, found in rows.rows_here("square", SOURCE, "cpu")] == ["formula"]


def test_sharing_rows_needs_a_process_group():
    with pytest.raises(ValueError, match="expected an initialised process group"):
        lowering.share_rows(["custom_ops"], "cpu")


def test_an_unwritable_cache_has_no_rows(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("LOWERING_CACHE")
    monkeypatch.setenv("FRAMEWORK_INTERNALS_BUILD_DIR", str(tmp_path / "file" / "folder"))
    assert rows.rows_here("square", SOURCE, "cpu") == []
    with pytest.raises(UserError, match="cannot write into"):
        lowering.keep_rows([row()], SOURCE, "cpu")


def test_the_rows_lie_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("LOWERING_CACHE")
    monkeypatch.setenv("FRAMEWORK_INTERNALS_BUILD_DIR", str(tmp_path))
    assert tuned.write([row()], SOURCE, "cpu").parent == tmp_path / "lowerings"
