"""The measurements of attention: what they compare with, and what the report concludes from them."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchkit import Quantity, Record, Results
from benchkit.environment import Gpu
from benchkit.results import load
from custom_ops.bench import attention
from custom_ops.bench.cases import OURS
from custom_ops.operators.flash_attention import reference
from custom_ops.report import attention as attention_report
from custom_ops.report import targets


@pytest.mark.parametrize("causal", [False, True])
def test_exact_head_in_blocks_is_attention_in_one_piece(causal: bool) -> None:
    q, k, v, grad = torch.randn(4, 1, 1, 70, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = reference(*leaves, causal, None)[0]
    whole = (out, *torch.autograd.grad(out, leaves, grad))
    blocks = attention.exact_head(*(x[0, 0] for x in (q, k, v, grad)), causal=causal, rows=32)
    for part, right in zip(blocks, whole, strict=True):
        torch.testing.assert_close(part, right[0, 0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("wrong", range(3))
def test_an_error_that_is_no_number_is_the_largest(wrong: int) -> None:
    exact = [torch.ones(2, dtype=torch.float64)] * 3
    found = [torch.full((2,), 1.5), torch.full((2,), 2.0), torch.full((2,), 1.25)]
    assert attention.largest_error(found, exact) == 1.0
    found[wrong] = torch.tensor([1.0, float("nan")])
    assert math.isnan(attention.largest_error(found, exact))


def test_speeds_name_the_best_of_torch() -> None:
    records = list(attention.speeds("cpu", [32], [16], [torch.float32], tokens=64, width=32, seconds=0.01))
    for causal in (False, True):
        for direction in ("forward", "backward"):
            chosen = [r for r in records if (r.labels["causal"], r.labels["direction"]) == (causal, direction)]
            assert {r.labels["form"]: r.labels["best"] for r in chosen} == {OURS: False, "flash": True}
            assert all(r["error"].value < 1e-6 for r in chosen)
            time, rate = chosen[0]["time"].value, chosen[0]["rate"].value
            # Two sequences of two heads: 4·S²·D each, half under a mask, five products backward for two forward.
            flops = 2 * 2 * 4 * 32**2 * 16 * (0.5 if causal else 1) * (2.5 if direction == "backward" else 1)
            assert rate * time == pytest.approx(flops)


def test_features_are_measured_beside_a_mask_in_memory() -> None:
    records = list(attention.features("cpu", 64, 16, torch.float32, width=32, seconds=0.01))
    assert [(r.labels["feature"], r.labels["form"]) for r in records] == [
        (feature, form)
        for feature in ("window of 8 keys", "8 packed sequences", "a bias of each head")
        for form in (OURS, attention.MASKED)
    ]
    own = records[0]
    seen = 64 * 9 - 36  # 8 keys and its own of each query, fewer of the first eight
    assert own["rate"].value * own["time"].value == pytest.approx(4 * seen * 2 * 16)


def test_accuracy_covers_all_results() -> None:
    records = list(attention.accuracy("cpu", [48], [torch.float32], head_size=16))
    assert {(r.labels["form"], r.labels["causal"]) for r in records} == {
        (form, causal) for form in (OURS, "torch") for causal in (False, True)
    }
    for record in records:
        assert set(record.values) == {"out", "dq", "dk", "dv"}
        assert all(0 < error.value < 1e-6 for error in record.values.values())


@pytest.mark.gpu
def test_measurements_on_a_gpu() -> None:
    speeds = partial(attention.speeds, "cuda", [256], [64], tokens=512, width=128, seconds=0.01)
    forms = {str(r.labels["form"]) for r in speeds([torch.bfloat16])}
    assert OURS in forms
    assert "flash" in forms
    records = list(speeds([torch.float32]))
    assert {r.labels["clock"] for r in records} == {"cuda-graph"}
    assert all(r["error"].value < 2e-6 for r in records)
    kernels = attention.kernels("cuda", 128, [64], [torch.float32], width=128, seconds=0.01)
    assert {"chosen", "naive", "mma.sync", attention.MATH} <= {str(r.labels["kernel"]) for r in kernels}
    memory = {
        str(r.labels["form"]): r["peak"].value
        for form in attention.MEMORY_FORMS
        for r in attention.memory("cuda", 1024, torch.float32, form, head_size=64, width=128)
    }
    assert memory[OURS] < memory[attention.MATH]


def as_measured(speed: float, error: float, length: int = 4096) -> Results:
    """Results with one float32 forward measurement: ours ``speed`` times as fast as efficient, flash slower still."""
    base = load(Path(__file__).parent / "golden" / "reports" / "cpu" / "results.json")
    shape = {"dtype": "float32", "head_size": 64, "length": length, "causal": False, "batch": 1, "heads": 32}

    def record(form: str, time: float, found: float, best: bool) -> Record:
        values = {"time": Quantity(time, "s"), "rate": Quantity(1e12 / time, "FLOP/s"), "error": Quantity(found, "")}
        if form == OURS:
            values["speedup"] = Quantity(speed, "×")
        labels = {**shape, "direction": "forward", "form": form, "best": best, "clock": "cuda-graph"}
        return Record("attention", labels, values)

    records = (
        record(OURS, 1 / speed, error, False), record("efficient", 1.0, 1e-6, True), record("flash", 2.0, 9e-7, False)
    )  # fmt: skip
    others = tuple(record for record in base.records if record.name != "attention")
    gpu = Gpu("NVIDIA H200", "9.0", 132, 1 << 37, 60 << 20, "13.0")
    return replace(base, environment=replace(base.environment, gpu=gpu), records=(*others, *records))


@pytest.mark.parametrize(
    ("speed", "error", "met"),
    [(3.2, 9e-7, "yes"), (2.9, 9e-7, "**no**"), (9.0, 2e-6, "**no**, the error is larger")],
)
def test_a_target_weighs_speed_and_error(speed: float, error: float, met: str) -> None:
    (line,) = [line for line in targets.reached(as_measured(speed, error)) if line.target.what.startswith("attention")]
    assert line.target.what == "attention, forward, float32, head size 64, 4,096 tokens and more"
    assert (line.target.must, line.value, line.verdict) == (3.0, speed, met)


def test_short_sequences_have_no_target_in_float32() -> None:
    results = as_measured(3.2, 9e-7, length=1024)
    assert not [line for line in targets.reached(results) if line.target.what.startswith("attention")]
    assert len(attention_report.attended(results, direction="forward")) == 1
