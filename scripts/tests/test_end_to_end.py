"""The end-to-end step: how it is taken apart, what the report says of it, and one whole small run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchkit import Quantity, Timing
from benchkit.environment import capture
from benchkit.report import render
from benchkit.results import Recorder, load
from benchkit.run import Run, measure_and_write, report_directories
from jax_baseline.timing.bench import MeasuredEngine
from jax_baseline.timing.engines import Preparation
from whole_step import measure
from whole_step.dissection import covered, dispatch_seconds, per_step
from whole_step.report import REPORT, parts_of_steps, steps_before
from whole_step.variants import every_operator, norm, variants

HOUSE = Path(__file__).resolve().parents[2] / "framework-internals"
COMMITTED = [path for path in report_directories(HOUSE) if not path.name.endswith("-quick")]


@pytest.mark.parametrize("directory", COMMITTED, ids=[directory.name for directory in COMMITTED])
def test_a_committed_report_is_a_pure_function_of_its_results(directory):
    results = load(directory / "results.json")
    assert results.complete
    assert results.environment.machine == directory.name
    assert render(results, REPORT) == (directory / "report.md").read_text()
    for figure in REPORT.figures(results):
        assert (directory / "figures" / f"{figure.name}.svg").stat().st_size > 0


@pytest.mark.parametrize("known", [1, 2])
def test_a_loss_that_could_not_be_read_leaves_the_rest_of_the_report(known):
    results = load(COMMITTED[0] / "results.json")
    variants_seen = 0

    def without(record):
        nonlocal variants_seen
        variants_seen += record.name == "variant"
        if record.name != "variant" or variants_seen <= known:
            return record
        return replace(record, values={key: value for key, value in record.values.items() if key != "last loss"})

    text = render(replace(results, records=tuple(map(without, results.records))), REPORT)
    assert ("the losses of the 2 variants of which they are known lie within" in text) == (known == 2)
    assert "the losses of" in text or known == 1
    assert re.search(r"^\| .* \| – \|$", text, re.MULTILINE)


def test_a_loss_that_could_not_be_read_is_an_absence(tmp_path, monkeypatch):
    missing = {"inspection": "JaxEngine.next_loss ended with status -11: no message."}
    preparation, timing = Preparation(1.0, 5.0, {}), Timing((0.5, 0.5), 1, "wall-clock", 0.5)
    engine = MeasuredEngine(preparation, timing, Quantity(1.0, "×"), None, missing)
    monkeypatch.setattr(measure, "measure_engines", lambda engines, *_, **__: dict.fromkeys(engines, engine))
    configuration = measure.configure("cpu", True)
    recorder = Recorder.going_on(
        tmp_path, lens=measure.NAME, environment=capture("cpu", root=HOUSE), configuration=configuration
    )
    measure.collect(Run("cpu", configuration, recorder))
    records = recorder.results.select("variant")
    assert len(records) == len(configuration["variants"])
    assert not any("last loss" in record.values for record in records)
    told = {absence.what: absence.why for absence in recorder.results.absences}
    title = configuration["variants"]["eager"]["title"]
    assert told[f"The last loss of {title}"] == f"asking for it failed: {missing['inspection'][:-1]}"


def test_intervals_that_overlap_count_once():
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5


def span(name: str, start: float, duration: float, category: str = "cpu_op") -> dict:
    return {"name": name, "ts": start, "dur": duration, "cat": category}


class Own:
    """An operator with its own seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


def test_on_a_cpu_a_compiled_program_counts_without_the_operators_inside_it():
    events = [
        span("aten::add", 0, 10),
        span("## Call CompiledFxGraph abc", 20, 100),
        span("aten::mm", 30, 40),
        span("Optimizer.step", 130, 50, "user_annotation"),
    ]
    found = per_step(events, [Own(10e-6), Own(40e-6)], steps=2)
    assert found == pytest.approx({"operators": 1, "operator_seconds": 25e-6, "compiled_seconds": 30e-6})


def test_on_a_gpu_what_counts_is_the_kernels():
    events = [span("gemm", 0, 10, "kernel"), span("copy", 5, 10, "gpu_memcpy"), span("aten::mm", 0, 99)]
    found = per_step(events, [Own(0)], steps=1)
    assert found == pytest.approx({"operators": 1, "kernels": 2, "kernel_seconds": 15e-6})


def test_a_hop_that_measured_as_nothing_takes_nothing():
    assert dispatch_seconds({"a": 3, "b": 2}, {"a": 1e-6, "b": -1e-9}) == pytest.approx(3e-6)


@pytest.mark.parametrize("parts", [norm, every_operator])
def test_the_parts_compute_what_the_model_does(parts):
    from torch_baseline.config import GPTConfig
    from torch_baseline.model import GPT

    shape = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    plain, own = GPT(shape).double(), GPT(shape, **parts()).double()
    # A few hundred roundings of numbers near 5, in float64.
    assert own(tokens, tokens).item() == pytest.approx(plain(tokens, tokens).item(), abs=1e-13)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_variant_differs_from_one_before_it_in_what_it_says(device):
    seen: list[str] = []
    for name, variant in variants(device).items():
        assert variant.over in seen if seen else not variant.over
        assert bool(variant.change) == bool(variant.lens) == bool(variant.over)
        seen.append(name)
    assert next(iter(seen)) == "eager"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_quick_run_has_fewer_ways_each_beside_one_that_it_has_too(device):
    full, quick = measure.configure(device, False), measure.configure(device, True)
    assert full.keys() == quick.keys()
    assert quick["variants"].items() < full["variants"].items()
    assert all(variant["over"] in ("", *quick["variants"]) for variant in quick["variants"].values())
    assert {variant["lens"] for variant in quick["variants"].values()} >= {
        "compile-bench",
        "custom-ops",
        "jax-baseline",
    }


@pytest.mark.slow
def test_a_small_run_measures_every_part_and_renders(tmp_path, monkeypatch):
    few = {name: variant for name, variant in variants("cpu").items() if name in ("eager", "operators", "jax", "norm")}
    monkeypatch.setattr(measure, "variants", lambda device: few)
    lens = measure.build_lens(HOUSE)
    small = {**lens.configure("cpu", False), "layers": 1, "rounds": 2, "steps": 1, "batch_size": 1}
    monkeypatch.setattr(measure, "configure", lambda device, quick: small)
    report = measure_and_write(measure.build_lens(HOUSE), device="cpu", quick=True, out=tmp_path)
    results = load(tmp_path / "results.json")
    assert steps_before(results) == 5
    records = {record.labels["variant"]: record for record in results.select("variant")}
    assert records.keys() == few.keys()
    losses = [record["last loss"].value for record in records.values()]
    assert max(losses) - min(losses) < 1e-4
    eager, own = (results.one("dissection", variant=name) for name in ("eager", "norm"))
    assert own["operators"].value > 0
    assert 0 < eager["operator_seconds"].value < eager["profiled_seconds"].value
    for variant, parts in parts_of_steps(results).items():  # of the step as it was timed, whatever profiling it took
        assert sum(part.seconds for part in parts) == pytest.approx(records[variant]["step"].value)
    assert sum(eager.data["hops"].values()) > 500
    text = report.read_text()
    assert "rmsnorm-fused" in text
    assert "figures/time.svg" in text
