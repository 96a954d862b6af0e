"""The main job at its smallest, and sentences that follow the data."""

from pathlib import Path
from typing import Any

import pytest

from benchkit.environment import capture
from benchkit.report import render
from benchkit.results import Quantity, Record, Results, load
from benchkit.run import measure_and_write
from dispatcher_trace import story
from dispatcher_trace.lens import build_lens


def _row(number: int, key: str, *, operator: str = "aten::mm", predicted: str | None = None) -> dict[str, Any]:
    return {
        "number": number,
        "depth": 0,
        "operator": operator,
        "key": key,
        "how": "call",
        "predicted": key if predicted is None else predicted,
        "thread": "main",
        "node": "",
        "why": "",
        "dtypes": [],
        "kind": "",
        "where": "",
        "native": "",
    }


def _walk(rows: list[dict[str, Any]], *, mode: str = "autocast", bit_equal: bool = True) -> Record:
    agreed = sum(row["predicted"] == row["key"] for row in rows)
    counts = {"hops": len(rows), "positions": len(rows), "agreed": agreed, "calls": 1, "profiled": 1, "tied": 1}
    data = {
        "bit_equal": bit_equal,
        "same_operators": True,
        "lines": ["x"],
        "spine": [["aten::mm", row["key"]] for row in rows],
        "hops": rows,
        "kernels": [],
        "notes": [],
    }
    values = {name: Quantity(count, "") for name, count in counts.items()}
    return Record("walk", {"expression": "a @ b", "dtype": "f32", "mode": mode}, values, data)


def _results(*records: Record) -> Results:
    environment = capture("cpu", root=Path(__file__).parent)
    return Results("dispatcher-trace", environment, {"size": 4, "seconds": 0.1}, records, (), True)


def test_the_order_of_autocast_and_autograd_is_read_from_the_walk() -> None:
    usual = _results(_walk([_row(1, "AutocastCPU"), _row(2, "AutogradCPU"), _row(3, "CPU")]))
    assert "AutocastCPU comes before AutogradCPU" in story.finding(usual)
    turned = _results(_walk([_row(1, "AutogradCPU"), _row(2, "AutocastCPU"), _row(3, "CPU")]))
    assert "AutogradCPU comes before AutocastCPU" in story.finding(turned)
    neither = _results(_walk([_row(1, "CPU")]))
    assert "comes before" not in story.finding(neither)


def test_disagreement_and_inequality_are_said() -> None:
    results = _results(_walk([_row(1, "AutocastCPU", predicted="AutogradCPU")], bit_equal=False))
    assert "names the key of 0 of 1 hops; 0 of 1 traced results are bit-equal" in story.finding(results)
    assert "hop 1, `aten::mm` at AutocastCPU; predicted AutogradCPU" in story.disagreements(results)[0]
    assert "| no |" in story.conditions_table(results)


def test_kernels_appear_where_there_are_any() -> None:
    walk = _walk([_row(1, "CUDA")])
    assert story.kernel_table(_results(walk)) == ""
    kernel = {"operator": "aten::mm", "node": "", "name": "k" * 200, "grid": [2, 1, 1], "block": [128, 1, 1]}
    walk.data["kernels"].append({**kernel, "registers": 8, "seconds": 2e-6})
    table = story.kernel_table(_results(walk))
    assert "2×1×1" in table
    assert "2.00 µs" in table
    assert "k" * 110 not in table


@pytest.mark.slow
def test_the_main_job(tmp_path: Path) -> None:
    lens = build_lens(Path(__file__).resolve().parents[1])
    path = measure_and_write(lens, device="cpu", quick=True, out=tmp_path)
    results = load(tmp_path / "results.json")
    assert render(results, lens.report) == path.read_text(encoding="utf-8")
    assert len(results.select("walk")) == 16
    counted = story.totals(results)
    assert counted["bit_equal"] == counted["same_operators"] == 16
    assert counted["profiled"] == counted["calls"]
    assert results.one("overhead")["hops"].value == 2
    assert {figure.name for figure in lens.report.figures(results)} == {"walk_autocast_f32", "walk_requires_grad_bf16"}
