"""Rows that this machine measured: found without being named, missed when anything they depend on changes."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import InternalTorchDynamoError

import lowering
from benchkit import UserError
from lowering import Evidence, Row, choice, rows, tuned

EVIDENCE = Evidence("planted", 1.2, 1.1, 1.3, 0.99, 1.01, "a processor, 2 threads", "2.13.0", "abc", "2026-11-26")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LOWERING_CACHE", str(folder))
    monkeypatch.setattr(choice, "_added", "")
    monkeypatch.setattr(choice, "_mode", "replay")
    torch.compiler.reset()
    return folder


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


def row(taken: str = "kernel", first: int = 8) -> Row:
    machine = lowering.machine_class("cpu")
    return Row(machine, "square", "float32", "inference", {"rows": first}, taken, EVIDENCE)  # type: ignore[arg-type]


def square(x: torch.Tensor) -> torch.Tensor:
    def plain(x):
        return x * x

    return lowering.lower("square", None, plain, plain, x, sizes=(("rows", x.shape[0]),), source="")


class Choices:
    """A compiled function that keeps the lowering of each program."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.call = torch.compile(square, fullgraph=True, backend=self._backend)

    def _backend(self, graph: torch.fx.GraphModule, inputs: object) -> object:
        self.taken += lowering.in_graph(graph)["square"]
        return graph


def test_a_row_is_taken_without_being_named_and_a_new_one_compiles_again():
    compiled = Choices()
    compiled.call(torch.ones(8))
    lowering.keep_rows([row()], "", "cpu")
    compiled.call(torch.ones(8))
    lowering.keep_rows([row("formula")], "", "cpu")
    compiled.call(torch.ones(8))
    assert compiled.taken == ["formula", "kernel", "formula"]
    assert len(list(tuned.folder("", "cpu").glob("*.row.json"))) == 1


def test_each_row_is_a_file_of_its_own_and_no_other_is_touched():
    place = lowering.keep_rows([row()], "", "cpu")
    (first,) = place.glob("*.row.json")
    before = first.stat().st_mtime_ns
    lowering.keep_rows([row(first=100)], "", "cpu")
    assert len(list(place.glob("*.row.json"))) == 2
    assert first.stat().st_mtime_ns == before
    assert json.loads((place / "depends_on.json").read_text())["torch"] == torch.__version__


def test_writers_at_once_leave_whole_rows():
    made = [row(first=first) for first in range(1, 17)]
    threads = [threading.Thread(target=tuned.write, args=([made[index % 16]], "", "cpu")) for index in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found.sizes["rows"] for found in tuned.read("", "cpu")) == list(range(1, 17))


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
    place = lowering.keep_rows([row(), row(first=100)], "", "cpu")
    next(place.glob("*.row.json")).write_text('{"machine": "cpu')
    assert len(tuned.read("", "cpu")) == 1


def test_lowering_off_takes_every_formula(monkeypatch):
    lowering.keep_rows([row()], "", "cpu")
    monkeypatch.setattr(choice, "_mode", "off")
    compiled = Choices()
    compiled.call(torch.ones(8))
    with lowering.choose("kernel", "square"):  # what the program asks for stays
        compiled.call(torch.ones(8))
    assert compiled.taken == ["formula", "kernel"]


@pytest.mark.parametrize(("asked", "remedy"), [("on", ""), ("tune", "; compile-bench tune .* measures")])
def test_an_unknown_mode_is_an_error(asked, remedy, monkeypatch):
    monkeypatch.setattr(choice, "_mode", asked)
    message = f"LOWERING: expected one of off, replay, got '{asked}'{remedy}"
    with pytest.raises(ValueError, match=message):
        lowering.mode()
    compiled = Choices()
    with pytest.raises(InternalTorchDynamoError, match=message):  # and not a call that stays uncompiled
        compiled.call(torch.ones(8))


def test_in_a_process_group_only_the_rows_of_rank_0_count(monkeypatch):
    lowering.keep_rows([row()], "", "cpu")
    monkeypatch.setattr(rows, "_in_process_group", lambda: True)
    monkeypatch.setattr(rows, "_of_rank_0", {})
    assert not rows.rows_here("square", "", "cpu")
    of_rank_0 = [row("formula")]

    def receive(objects: list) -> None:
        objects[0] = [of_rank_0]

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", receive)
    lowering.share_rows([""], "cpu")
    assert [found.choice for _, found in rows.rows_here("square", "", "cpu")] == ["formula"]


def test_sharing_rows_needs_a_process_group():
    with pytest.raises(ValueError, match="expected an initialised process group"):
        lowering.share_rows(["custom_ops"], "cpu")


def test_an_unwritable_cache_has_no_rows(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("LOWERING_CACHE")
    monkeypatch.setenv("FRAMEWORK_INTERNALS_BUILD_DIR", str(tmp_path / "file" / "folder"))
    assert rows.rows_here("square", "", "cpu") == []
    with pytest.raises(UserError, match="cannot write into"):
        lowering.keep_rows([row()], "", "cpu")


def test_the_rows_lie_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("LOWERING_CACHE")
    monkeypatch.setenv("FRAMEWORK_INTERNALS_BUILD_DIR", str(tmp_path))
    assert tuned.write([row()], "", "cpu").parent == tmp_path / "lowerings"
