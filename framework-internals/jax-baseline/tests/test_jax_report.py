"""The first screen of the report: what each engine is, what slows it, and what the finding says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchkit import Quantity, numbers
from benchkit.report import Chart, Section, render
from benchkit.report.rendering import block_text
from benchkit.results import Results, load_report
from engines.measure import EngineFigures
from jax_baseline.diff.records import DiffRecord
from jax_baseline.parity.records import ParityRecord
from jax_baseline.report import engine_sections, sections, training_sections
from jax_baseline.timing.engines import ENGINES
from jax_baseline.timing.records import EngineRecord

GOLDEN = Path(__file__).parent / "golden" / "reports"
BENCH = {"preset": "tiny", "batch_size": 2, "dtype": "float32", "reference": "torch-compile"}


def _engine(name: str, rate: float, ratio: float, *, half_width: float = 0.01) -> EngineRecord:
    speedup = Quantity(ratio, "×", ratio - half_width, ratio + half_width, 8, "bootstrap 95%")
    figures = EngineFigures(
        rate=Quantity(rate, "tokens/s", rate * 0.99, rate * 1.01, 8, "p20-p80"),
        step=Quantity(256 / rate, "s"),
        first_step=Quantity(2.0, "s"),
        loss=Quantity(5.0, "nats"),
        speedup=speedup,
    )
    return EngineRecord(name, ENGINES[name].framework, ENGINES[name], figures)


def _results(*engines: EngineRecord) -> Results:
    configuration = {"bench": BENCH, "parity": {"preset": "tiny"}}
    records = tuple(engine.record() for engine in engines)
    return Results("jax-baseline", SimpleNamespace(gpu=None), configuration, records)


REFERENCE = _engine("torch-compile", 1000, 1.0, half_width=0.0)
ENGINE_SET = (REFERENCE, _engine("cudnn", 1010, 1.01), _engine("jit-donated", 430, 0.43))


@pytest.fixture(params=["cpu", "gpu"])
def golden(request) -> Results:
    return load_report(GOLDEN / request.param)


def answer(results: Results) -> str:
    return "\n".join(map(block_text, engine_sections.answer(results)))


def charts(blocks) -> list[Chart]:
    inner = [chart for block in blocks if isinstance(block, Section) for chart in charts(block.blocks)]
    return [*(block for block in blocks if isinstance(block, Chart) and block), *inner]


def test_a_slow_engine_has_its_cause_beside_its_ratio_and_a_remedy_below():
    text = answer(_results(*ENGINE_SET))
    first, cause = (line for line in text.splitlines() if line.startswith("| `jit-donated`"))
    assert "| **JAX, XLA's attention** | **0.430× (0.420–0.440)** |" in first
    assert cause.startswith("| `jit-donated` | `cudnn` | `attention` |")
    assert "train with `--attention cudnn` | 0.430× → 1.01× |" in cause


def test_an_engine_that_differs_in_two_settings_has_no_single_cause():
    slow = _engine("jit-scan", 430, 0.43)  # from cudnn: attention and scan
    assert "by the setting" not in answer(_results(*ENGINE_SET[:2], slow))


def test_an_engine_that_is_slower_the_other_way_round_has_no_known_cause():
    scan, plain = _engine("jit-scan", 900, 0.9), _engine("jit-donated", 430, 0.43)
    assert "| `jit-donated` | `jit-scan` | `scan` | not known;" in answer(_results(REFERENCE, scan, plain))


def test_rates_that_order_engines_otherwise_than_the_ratios_are_noted():
    turned = (*ENGINE_SET, _engine("cudnn-4-steps", 1005, 1.02))
    assert "`cudnn` is faster than `cudnn-4-steps` by the medians" in answer(_results(*turned))
    assert "disagree" not in answer(_results(*ENGINE_SET))
    same = (*ENGINE_SET, _engine("cudnn-4-steps", 1005, 1.01 + 1e-7))  # the figures shown would be equal
    assert "disagree" not in answer(_results(*same))


def test_an_engine_without_a_reference_beside_it_is_left_out_of_the_ratios():
    alone = replace(ENGINE_SET[1], figures=replace(ENGINE_SET[1].figures, speedup=None))
    assert "cudnn" not in answer(_results(REFERENCE, alone))


def test_the_first_lines_name_scope_strongest_peer_and_worst_result():
    results = _results(*ENGINE_SET)
    assert sections.headline(results) == (
        "its best `tiny` step is not distinguishable from torch's best (JAX 1.01×, torch 1.00× of `torch-compile`)."
    )
    assert "To train (2 sequences, float32), the fastest are `cudnn` " in engine_sections.use(results)
    assert "loses to `torch-compile`: `jit-donated` (0.430×)" in engine_sections.avoid(results)
    assert engine_sections.worst(results).startswith("0.430×")
    slower = (REFERENCE, _engine("cudnn", 900, 0.9))
    assert "is slower than torch's best (JAX 0.900×" in sections.headline(_results(*slower))
    assert sections.headline(_results()) == "This run was interrupted before it measured anything."


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_worst_is_that_of_all_engines_and_of_both_compilers(device):
    results = load_report(GOLDEN / device)
    ratios = [
        r.figures.speedup.value for r in EngineRecord.select(results) if r.framework == "jax" and r.figures.speedup
    ]
    for record in DiffRecord.select(results):
        xla, inductor = (record.compilers[name].time for name in ("XLA", "Inductor"))
        ratios += [inductor.value / xla.value] if xla and inductor else []
    assert engine_sections.worst(results).startswith(numbers.with_unit(min(ratios), "×"))


def test_the_losses_are_drawn_as_differences_with_a_panel_for_each_dtype(golden):
    (chart,) = [chart for chart in charts(training_sections.sections(golden)) if chart.name == "losses"]
    parities = ParityRecord.select(golden)
    assert [panel.title for panel in chart.panels] == [record.dtype for record in parities]
    largest = max(abs(a - b) for a, b in zip(parities[0].jax, parities[0].torch, strict=True))
    (jax,) = (series for series in chart.panels[0].series if series.name == "JAX")
    assert max(point.value for point in jax.points) == pytest.approx(largest)


def test_every_chart_says_its_direction_and_is_in_the_page(golden):
    report = sections.report(golden)
    text = render(golden, sections.report)
    for chart in charts([*report.answer, *report.findings]):
        labels = [chart.values.label, *(panel.values.label for panel in chart.panels if panel.values)]
        assert all("lower is" in label or "higher is" in label for label in labels if label), chart.name
        assert f"figures/{chart.name}.svg" in text


def test_an_engine_without_an_interval_is_shown_by_its_value():
    bare = replace(ENGINE_SET[2], figures=replace(ENGINE_SET[2].figures, speedup=Quantity(0.43, "×")))
    assert "| **0.430×** |" in answer(_results(REFERENCE, ENGINE_SET[1], bare))
