"""The measurements and the report end to end on a small shape, and the report of a GPU's results."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from math import inf, isnan, nan
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import benchkit
from benchkit import Quantity, Record
from benchkit.environment import Gpu, capture
from benchkit.processes import budget
from benchkit.report import figures, render
from benchkit.report.drawing import draw_chart
from benchkit.results import Absence, Recorder
from benchkit.run import Run
from benchkit.timing.limits import memory_limits
from benchkit.timing.statistics import worst
from rmsnorm_fused import lens
from rmsnorm_fused.bench import candidates, measure, training
from rmsnorm_fused.bench.accuracy import expected
from rmsnorm_fused.bench.candidates import COPY, EAGER, QUACK, SEPARATE, TORCH, Candidate
from rmsnorm_fused.bench.measure import Case, measure_calls, measure_case
from rmsnorm_fused.report import finding
from rmsnorm_fused.report.queries import comparisons
from rmsnorm_fused.report.sections import report
from rmsnorm_fused.report.targets import reached
from torch_baseline.config import GPTConfig

TINY = {
    "dtype": "float32",  # in bfloat16 the formula's dx of a sum is rounded twice, where a kernel's may not be
    "other_dtypes": ["bfloat16"],
    "elements": 8192,
    "headline": [64, 128],
    "operator_rows": [64, 96],
    "widths": [32, 256],
    "batches": [1, 4],
    "batch_columns": [64],
    "determinism_columns": [128],
    "compile_modes": {},
    "training": {"preset": "tiny", "batch_size": 1, "modes": ["eager"], "seconds": 0.01},
    "seconds": 0.01,
    "call_seconds": 0.01,
    "shape_seconds": 4.0,
}
FORMULA = candidates._of_this_package("pytorch")


def recorder(folder, configuration):
    environment = capture("cpu", root=Path(lens.__file__).parent)
    return Recorder(folder, lens="rmsnorm-fused", environment=environment, configuration=configuration)


@pytest.fixture
def run(tmp_path):
    return Run("cpu", TINY, recorder(tmp_path, TINY))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A run in which the formula replaces the C++ kernel, and aot_eager Inductor; other tests cover what they make."""
    run = Run("cpu", TINY, recorder(tmp_path_factory.mktemp("report"), TINY))
    found, absent = {EAGER: FORMULA, TORCH: candidates.Candidate(candidates._torch_rms_norm)}, {"`cuda`": "no GPU"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lens, "usable", lambda device: ({**found, "cpp": FORMULA}, absent))
        patch.setattr(
            lens, "memory_limits", lambda device, seconds: memory_limits(device, bytes_per_tensor=1 << 20, seconds=0.01)
        )
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        patch.setattr(lens, "product_limits", lambda device, seconds: lens_product_limits())
        patch.setattr(training.GPTConfig, "preset", lambda name: GPTConfig(n_layer=1, n_embd=32, block_size=16))
        lens.collect(run)
    run.recorder.finish()
    return run.recorder.results


def lens_product_limits():
    yield Record("product limit", {"dtype": "float32", "size": 64}, {"rate": Quantity(1e11, "FLOP/s")})


def test_every_implementation_is_checked_and_timed(results):
    for which, error in (("forward", "error_y"), ("backward", "error_dweight")):
        for name in (EAGER, TORCH, "cpp"):
            record = results.one(which, group="headline", implementation=name)
            assert record["time"].value > 0
            assert error in record.values
        own = results.one(which, group="headline", implementation="cpp")
        assert own["share_of_bound"].value <= 1
        copy = results.one(which, group="headline", implementation=COPY)
        moved = {"forward": 2, "backward": 3}[which] * 64 * 128 * 4
        assert copy["bandwidth"].value == pytest.approx(moved / copy["time"].value)
        assert "fraction" not in results.one(which, group="add", implementation="cpp").values
        assert results.select(which, group="dtypes", dtype="bfloat16", implementation="cpp")
    assert {"error_y", "error_s"} <= results.one("forward", group="add", implementation="cpp").values.keys()
    assert not results.select("forward", group="add", implementation=TORCH)  # the stand-in has no such form
    assert {absence.what for absence in results.absences} == {"`cuda`", "The compiled training step"}


def test_calls_determinism_quantisation_and_training_are_measured(results):
    assert len(results.select("call", implementation="cpp")) == 4  # two batches, with and without a gradient
    repeated = results.one("determinism", implementation="cpp")
    assert repeated.data["default repeats"]
    assert repeated.data["deterministic repeats"]
    quantised = results.one("quantised", implementation="cpp")
    assert quantised["share_of_bound"].value <= 1
    assert quantised["bandwidth"].value == pytest.approx(
        64 * 128 * 5 / quantised["time"].value
    )  # four bytes in, one out
    formula = results.one("quantised", implementation=EAGER)
    shares = quantised["fraction"].value / formula["fraction"].value
    assert shares == pytest.approx(formula["time"].value / quantised["time"].value)
    losses = [record["loss"].value for record in results.select("training")]
    assert len(losses) == 3
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_the_report_renders(results):
    text = render(results, report)
    assert f"**{finding.headline(results)}**" in text
    assert "64 × 128 float32" in text
    assert "The calls of all these shapes" in text
    before = {key: value for key, value in results.configuration.items() if key != "call_seconds"}
    assert "The calls of all these shapes" not in render(replace(results, configuration=before), report)
    kept = results.one("freed memory").data["kept"]
    assert ("Freed memory is kept" in text) == kept
    for title in ("Deterministic gradients", "A quantised result", "In a training step", "The same in bfloat16"):
        assert f"## {title}" in text
    drawn = figures(results, report)
    names = {"headline", "roofline", "widths-forward", "widths-backward", "batches-calls", "training"}
    assert {chart.name for chart in drawn} == names
    for chart in drawn:
        draw_chart(chart)


def test_what_an_interrupted_run_has_renders(results):
    for count in range(len(results.records)):
        cut = replace(results, records=results.records[:count], complete=False)
        text = render(cut, report)
        assert "This run was interrupted" in text
    render(replace(results, records=()), report)


def test_steps_beyond_the_budget_are_left_out_and_named(tmp_path, monkeypatch):
    run = Run("cpu", TINY, recorder(tmp_path, TINY))
    monkeypatch.setattr(lens, "usable", lambda device: ({EAGER: FORMULA}, {}))
    with budget.within(0.0):
        lens.collect(run)
    assert not run.recorder.results.select("forward")
    left_out = run.recorder.results.absences[0]
    assert "64 × 128 float32; 64 × 128 float32 with a residual" in left_out.what
    assert "Calls from Python; Calls from Python, with a weight that requires a gradient" in left_out.what
    assert "--budget" in left_out.why


# ---- what a GPU adds: records as an H200 would give them


def seconds(value):
    return Quantity(value, "s", value, value, 9, "p20-p80")


def timed(which, group, name, time, *, rows=32768, columns=4096, fraction=None, speedup=None):
    values = {"time": seconds(time), "bandwidth": Quantity(1e12, "B/s")}
    values |= {} if fraction is None else {"fraction": Quantity(fraction, "×", fraction, fraction, 9, "bootstrap 95%")}
    values |= {} if speedup is None else {"speedup": Quantity(speedup, "×", speedup, speedup, 9, "bootstrap 95%")}
    labels = {"group": group, "rows": rows, "columns": columns, "dtype": "bfloat16", "implementation": name}
    return Record(which, labels, values, {"clock": "cuda-graph", "note": ""})


def called(name, time, gradient, rows=1):
    labels = {"group": "batches", "rows": rows, "columns": 4096, "dtype": "bfloat16", "implementation": name}
    return Record("call", {**labels, "gradient": gradient}, {"time": seconds(time)})


def trained(norm, speedup):
    values = {"time": seconds(0.06), "rate": Quantity(5e5, "tokens/s"), "loss": Quantity(11.0, "nats")}
    values |= {} if speedup is None else {"speedup": Quantity(speedup, "×", speedup, speedup, 9, "bootstrap 95%")}
    return Record("training", {"mode": "compiled", "norm": norm}, values)


@pytest.fixture(scope="module")
def on_h200(results):
    gpu = Gpu("NVIDIA H200", "9.0", 132, 1 << 37, 60 << 20, "13.0")
    environment = replace(results.environment, gpu=gpu, device="cuda")
    limits = [
        Record("memory limit", {"traffic": traffic}, {"bandwidth": Quantity(4e12, "B/s"), "tensor": Quantity(1, "B")})
        for traffic in ("1 read 1 write", "2 reads 1 write", "2 reads 2 writes")
    ]
    records = [
        *limits,
        *lens_product_limits(),
        timed("forward", "headline", COPY, 1.27e-4),
        timed("forward", "headline", EAGER, 1.6e-3, fraction=0.08),
        timed("forward", "headline", QUACK, 1.31e-4, fraction=0.968, speedup=12.2),
        timed("forward", "headline", "cuda", 1.28e-4, fraction=0.9696, speedup=12.5),
        timed("forward", "add", COPY, 2.6e-4),
        timed("forward", "add", EAGER, 1.8e-3, fraction=0.14),
        timed("forward", "add", QUACK, 2.6e-4, fraction=1.01),
        timed("forward", "widths", QUACK, 1.4e-4, rows=512, columns=262144, fraction=0.9),
        timed("forward", "widths", "triton", 1.4e-4, rows=512, columns=262144, fraction=0.91),
        timed("forward", "widths", "cuda", 1.3e-4, rows=512, columns=262144, fraction=0.957),
        timed("forward", "widths", "cuda", 1.3e-4, rows=2048, columns=65536, fraction=0.952),
        timed("forward", "batches", COPY, 1.0e-6, rows=1),
        timed("forward", "batches", "cuda", 1.5e-6, rows=1),
        timed("forward", "batches", QUACK, 1.8e-6, rows=1),
        timed("forward", "batches", "cuda", 2.0e-6, rows=8),
        timed("forward", "batches", QUACK, 1.9e-6, rows=8),
        called("cuda", 6.2e-6, gradient=False),
        called("cuda", 8e-6, gradient=True),
        called("cuda", 6.4e-6, gradient=False, rows=8),
        called(QUACK, 1.3e-5, gradient=False),
        called(QUACK, 1.4e-5, gradient=True),
        Record("memory", {"implementation": "cuda"}, {"peak": Quantity(3 * (1 << 28), "B")}),
        timed("quantised", "headline", EAGER, 2.7e-3, fraction=0.04),
        timed("quantised", "headline", "triton", 1.6e-4, fraction=0.59),
        trained("nn.RMSNorm", None),
        trained("cuda", 0.94),
    ]
    return replace(
        results, environment=environment, configuration=lens.configure("cuda", False), records=tuple(records)
    )


def test_the_targets_are_computed_from_the_records(on_h200):
    text = render(on_h200, report)
    for line in (
        # 96.96 % reads 97.0 %, and so it counts
        "| forward, CUDA | 97.0 % | 97.0 % (cuda) | yes | 96.8 % (quack) |",
        "| forward, Triton | 97.0 % | – | not measured | 96.8 % (quack) |",
        # the best of each width, then the worst width
        "| forward, every width | 95.0 % | 95.2 % (cuda at 2048 × 65536) | yes | 90.0 % (quack at 512 × 262144) |",
        "| forward with a residual | 100.0 % | – | not measured | 101.0 % (quack) |",
        "| small batches, kernel, against the fastest of the others | 1.00× | 0.950× (cuda at 8 × 4096) | **no** |",
        "| small batches, call from Python | ≤ 10.0 µs | 6.40 µs (cuda at 8 × 4096) | yes | 13.0 µs (quack at 1 ×",
        "| forward, against the eager formula | 12.0× | 12.5× (cuda) | yes | 12.2× (quack) |",
        "| a float8 result | 90.0 % | 59.0 % (triton) | **no** |",
        "| the compiled training step, against nn.RMSNorm | 1.00× | 0.940× (cuda) | **no** |",
        "4 of the 19 targets",
    ):
        assert line in text


def test_a_cpu_has_targets_for_each_shape_and_dtype(results):
    """A copy of 50 GB/s, of which the operator reaches 97 % forward in float32 and less in bfloat16."""
    limit = {"bandwidth": Quantity(4e10, "B/s"), "tensor": Quantity(1, "B")}
    records = [Record("memory limit", {"traffic": "1 read 1 write"}, limit)]
    for rows, dtype, share in ((3, "float32", 0.97), (3, "bfloat16", 0.5), (9, "bfloat16", 0.85)):
        for name, rate in ((COPY, 5e10), ("cpp", 5e10 * share)):
            record = timed("operator", "operators", name, 1e-3, fraction=None if name == COPY else share)
            values = {**record.values, "bandwidth": Quantity(rate, "B/s")}
            labels = {**record.labels, "pass": "forward", "dtype": dtype, "rows": rows, "columns": 4}
            records.append(replace(record, labels=labels, values=values))
    good, bad, large = reached(replace(results, records=tuple(records)))
    assert (good.target.what, good.value, good.verdict) == (
        "rms_norm, forward, float32, 3 × 4",
        0.97,
        "yes, and the aim",
    )
    assert (bad.target.what, bad.value, bad.missed) == ("rms_norm, forward, bfloat16, 3 × 4", 0.5, True)
    assert (large.target.what, large.value, large.verdict) == ("rms_norm, forward, bfloat16, 9 × 4", 0.85, "yes")
    assert bad.why == (
        "the operator moves 25.0 GB/s (62 % of the memory limit), the copy 50.0 GB/s (125 % of the memory limit)."
    )
    text = render(results, report)
    for rows in (64, 96):
        assert f"| rms_norm, backward, bfloat16, {rows} × 128 | 75 % | 90 % |" in text


def test_a_cpu_times_a_call_on_one_element_beside_torchs():
    assert 1 in lens.configure("cpu", False)["batch_columns"]
    assert 1 in lens.configure("cpu", False)["batches"]


def test_the_first_lines_name_the_strongest_peer_and_the_worst_of_all_ratios(on_h200):
    assert "1.02× the speed of quack" in finding.use(on_h200)
    assert EAGER not in finding.use(on_h200)
    lowest = min(comparisons(on_h200), key=lambda entry: entry.speed)
    assert finding.worst(on_h200).startswith(f"{lowest}; 59 % of the limit (a float8 result)")
    assert str(lowest) in finding.avoid(on_h200)
    assert "(the compiled training step, `gpt2-124m`)" in finding.avoid(on_h200)


def test_kernels_that_no_time_was_left_for_are_not_said_to_be_unable_to_run(on_h200):
    ended_early = replace(on_h200, records=())
    assert finding.headline(ended_early).endswith("none of this package's kernels was measured.")
    assert not finding.avoid(ended_early)
    refused = replace(ended_early, absences=tuple(Absence(f"`{name}`", "no compiler") for name in candidates.OWN))
    assert finding.headline(refused).endswith("none of this package's kernels can run here.")
    assert finding.avoid(refused) == "none of its kernels can run, as here."


def test_targets_are_for_one_machine_and_shape(on_h200):
    assert len(reached(on_h200)) == 19
    quick = replace(on_h200, configuration=lens.configure("cuda", True))
    assert not reached(quick)
    other = replace(on_h200.environment.gpu, name="NVIDIA A100-SXM4-80GB")
    elsewhere = replace(on_h200, environment=replace(on_h200.environment, gpu=other))
    assert not reached(elsewhere)
    assert "Must, aim and reached" not in render(elsewhere, report)


def test_the_report_of_a_gpu_has_kernels_calls_and_memory(on_h200):
    text = render(on_h200, report)
    assert "replayed from CUDA graphs" in text
    assert "until it returns, while the kernel may still run" in text
    assert "fastest of all at 1 of 2 shapes; at its worst 0.950× the speed of quack (8 × 4096)" in text
    assert "| `cuda` | 768 MiB | 3.00 |" in text
    drawn = {chart.name: chart for chart in figures(on_h200, report)}
    names = {"headline", "add", "roofline", "widths-forward", "batches-kernels", "batches-calls", "training"}
    assert drawn.keys() == names
    for chart in drawn.values():
        draw_chart(chart)


def test_a_gpu_is_measured_at_every_power_of_two():
    configuration = lens.configure("cuda", False)
    measured = list(lens.cases(configuration, "cuda"))
    widths = {case.columns for case in measured if case.group in ("headline", "widths")}
    assert widths == {2**power for power in range(9, 19)}
    assert all(c.rows * c.columns == 2**27 for c in measured if c.group in ("headline", "widths", "add"))
    assert {(case.rows, case.columns) for case in measured if case.group == "batches"} == {
        (rows, columns) for rows in (1, 8, 64, 256) for columns in (4096, 8192)
    }


# ---- who takes part


def test_a_wrong_kernel_is_not_timed(run):
    wrong = replace(FORMULA, plain=lambda x, weight: FORMULA.plain(x, weight) * 1.01)
    with pytest.raises(RuntimeError, match=r"cpp at 8 × 16, torch\.float32: error over its bound"):
        measure_case(run, Case("headline", 8, 16, torch.float32), {EAGER: FORMULA, "cpp": wrong})
    assert not run.recorder.results.records


def test_a_wrong_sum_is_not_timed(run):
    def add(x, residual, weight):
        y, s = FORMULA.add(x, residual, weight)
        return y, s + 1e-3

    with pytest.raises(RuntimeError, match="with a residual"):
        measure_case(run, Case("add", 8, 16, torch.float32), {EAGER: FORMULA, "cpp": replace(FORMULA, add=add)})


def test_a_library_that_rounds_twice_is_reported_and_one_that_fails_is_absent(run):
    def llama(x, weight):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + candidates.EPS)).to(x.dtype) * weight

    def broken(x, weight):
        raise NotImplementedError("no such width.\nTry another.")

    timed = {EAGER: FORMULA, QUACK: Candidate(llama), "Liger (Triton)": Candidate(broken)}
    timed["Liger (CuTe)"] = replace(FORMULA, widest=128)
    timed[TORCH] = Candidate(lambda x, weight: FORMULA.plain(x, weight) + weight * torch.nan)
    measure_case(run, Case("headline", 64, 256, torch.bfloat16), timed)
    found = run.recorder.results
    assert found.one("forward", implementation=QUACK)["share_of_bound"].value > 1.2
    assert [(absence.what, absence.why) for absence in found.absences] == [
        ("Liger (Triton) at 64 × 256", "it raised NotImplementedError: no such width"),
        ("Liger (CuTe) at 64 × 256", "it takes at most 128 columns"),
        (f"{TORCH} at 64 × 256", "its results are not finite"),
    ]


def test_without_time_this_packages_implementations_are_timed_and_the_others_named(run):
    timed = {EAGER: FORMULA, "cpp": FORMULA, QUACK: FORMULA}
    with budget.within(0.0):
        measure_case(run, Case("headline", 64, 128, torch.float32), timed)
    found = run.recorder.results
    assert {record.labels["implementation"] for record in found.select("backward")} == {COPY, EAGER, "cpp"}
    (absence,) = found.absences
    assert (absence.what, absence.why.partition(";")[0]) == (f"{QUACK} at 64 × 128", "no time was left for it")


def lacking(at):
    """An implementation that has not enough memory from its call of that number on."""
    calls = []

    def plain(x, weight):
        calls.append(None)
        if len(calls) >= at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")
        return FORMULA.plain(x, weight)

    return Candidate(plain)


# The first call checks it, the third times it.
@pytest.mark.parametrize(("name", "at"), [("cpp", 1), (TORCH, 3), (EAGER, 3)])
def test_an_implementation_that_does_not_fit_is_absent_and_the_others_are_timed(run, name, at):
    timed = {EAGER: FORMULA, TORCH: FORMULA, "cpp": FORMULA, name: lacking(at)}
    measure_case(run, Case("headline", 64, 128, torch.float32), timed)
    found = run.recorder.results
    others = {COPY, EAGER, TORCH, "cpp"} - {name}
    assert {record.labels["implementation"] for record in found.select("backward")} == others
    assert {absence.why for absence in found.absences} == {"there was not enough memory for 2.00 GiB more"}
    assert all(name in absence.what for absence in found.absences)
    assert render(found, report)


def test_a_norm_whose_model_does_not_fit_leaves_the_step_with_the_others(run, monkeypatch):
    def too_large(width, eps):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")

    monkeypatch.setattr(training.GPTConfig, "preset", lambda name: GPTConfig(n_layer=1, n_embd=32, block_size=16))
    training.measure_training(run, "eager", {"cpp": replace(FORMULA, norm=too_large), EAGER: FORMULA})
    found = run.recorder.results
    assert [record.labels["norm"] for record in found.select("training")] == [training.BASELINE, EAGER]
    assert [absence.what for absence in found.absences] == ["The eager training step with cpp"]


def batch(rows, *compile_modes):
    return Case("batches", rows, 64, torch.float32, passes=(), compile_modes=compile_modes)


def test_the_calls_of_all_shapes_are_timed_in_the_same_rounds(run, monkeypatch):
    compared = []

    def compare(functions, **options):
        compared.append((list(functions), torch.is_grad_enabled()))
        return benchkit.compare(functions, **options)

    monkeypatch.setattr(measure, "compare", compare)
    cpp = replace(FORMULA, plain=lambda x, weight: FORMULA.plain(x, weight))
    for gradient in (False, True):
        taking_part = {batch(1): (EAGER, "cpp"), batch(4): ("cpp",)}
        measure_calls(run, taking_part, {EAGER: FORMULA, "cpp": cpp}, gradient=gradient)
    names = [f"{EAGER} at 1 × 64", "cpp at 1 × 64", "cpp at 4 × 64"]
    assert compared == [(names, False), (names, True)]
    kind = {"group": "batches", "columns": 64, "dtype": "float32"}
    assert [record.labels for record in run.recorder.results.select("call")] == [
        {**kind, "rows": rows, "implementation": name, "gradient": gradient}
        for gradient in (False, True)
        for rows, name in ((1, EAGER), (1, "cpp"), (4, "cpp"))
    ]
    assert len({record["time"].samples for record in run.recorder.results.select("call", gradient=False)}) == 1


def test_a_call_wants_a_gradient_where_its_record_says_so(run):
    seen = set()

    def plain(x, weight):
        y = FORMULA.plain(x, weight)
        seen.add(y.requires_grad)
        return y

    for gradient in (False, True):
        seen.clear()
        measure_calls(run, {batch(1): ("cpp",)}, {"cpp": replace(FORMULA, plain=plain)}, gradient=gradient)
        assert seen == {gradient}


def test_what_did_not_do_a_shape_is_not_called_there(run):
    def broken(x, weight):
        if len(x) == 4:
            raise NotImplementedError
        return FORMULA.plain(x, weight)

    timed = {EAGER: FORMULA, QUACK: Candidate(broken), "Liger (CuTe)": replace(FORMULA, widest=32)}
    assert {rows: measure_case(run, batch(rows), timed) for rows in (1, 4)} == {1: (EAGER, QUACK), 4: (EAGER,)}


def test_shapes_are_compiled_apart_and_called_together(run, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # no code is compared here
    shapes = [batch(1, "default"), batch(4, "default")]
    with torch.compiler.config.patch(recompile_limit=1):
        taking_part = {shape: measure_case(run, shape, {EAGER: FORMULA}) for shape in shapes}
        for gradient in (False, True):
            measure_calls(run, taking_part, {EAGER: FORMULA}, gradient=gradient)
    results = run.recorder.results
    found = [record.labels["rows"] for record in results.select("call", implementation=candidates.COMPILED)]
    assert found == [1, 4]
    assert not results.select("call", implementation=candidates.COMPILED, gradient=True)
    assert len(results.select("call", implementation=EAGER)) == 4


@pytest.fixture
def libraries(monkeypatch):
    """Replacements for quack and Liger that record how they are called."""
    calls = []

    def note(name, results):
        def function(*arguments, **options):
            calls.append((name, len(arguments), arguments[-4:], options))
            return results

        return function

    x = torch.ones(2, 8)
    modules = {
        "quack.rmsnorm": {"rmsnorm": note("quack", x)},
        "liger_kernel.ops.rms_norm": {"LigerRMSNormFunction": SimpleNamespace(apply=note("liger", x))},
        "liger_kernel.ops.fused_add_rms_norm": {
            "LigerFusedAddRMSNormFunction": SimpleNamespace(apply=note("liger add", (x, x)))
        },
        "liger_kernel.ops.backends._cutedsl.rms_norm": {"rms_norm_cutedsl": note("cute", x)},
        "liger_kernel.ops.backends._cutedsl.fused_add_rms_norm": {
            "fused_add_rms_norm_cutedsl": note("cute add", (x, x))
        },
    }
    for path, contents in modules.items():
        parts = path.split(".")
        for depth in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
        module = ModuleType(path)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, path, module)
    return calls


def test_the_libraries_are_called_as_a_model_calls_them(libraries):
    found, absent = candidates.installed_peers()
    assert not absent
    x, weight = torch.ones(2, 8), torch.ones(8)
    for candidate in found.values():
        candidate.plain(x, weight)
        candidate.add(x, x, weight)
    options = [options for *_, options in libraries if options]
    assert options[0] == {"eps": 1e-6}
    assert options[1]["prenorm"] is True  # or the sum is not returned
    liger = [(name, count, last) for name, count, last, options in libraries if not options]
    assert [name for name, _, _ in liger] == ["liger", "liger add", "cute", "cute add"]
    assert [count for _, count, _ in liger] == [6, 7, 6, 7]
    # in_place=False: Liger otherwise writes dx over dy, which is the next round's input
    assert all(last == (1e-6, 0.0, "llama", False) for _, _, last in liger)


def test_a_library_that_is_not_there_is_absent_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", None)
    found, absent = candidates.installed_peers()
    assert QUACK not in found
    assert "the extra `peers` installs it" in absent[QUACK]


def test_every_peer_has_its_line_without_which_no_table_shows_it():
    assert candidates._PEERS.keys() <= candidates.ABOUT.keys()


def test_on_a_cpu_every_back_end_takes_part_or_says_why():
    found, absent = candidates.usable("cpu")
    assert {EAGER, TORCH} <= found.keys()
    assert ("cpp" in found) != ("`cpp`" in absent)
    assert {"`cuda`", "`triton`", QUACK} <= absent.keys()


# ---- how


def test_the_bound_catches_a_second_rounding():
    x = torch.randn(64, 256).bfloat16()
    weight = torch.randn(256).bfloat16()
    reference = expected(x, weight, torch.ones_like(x), 1e-6)["y"]
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    assert reference.share_of_bound((normalised * weight.float()).bfloat16()) <= 1
    assert reference.share_of_bound(normalised.bfloat16() * weight) > 1.2


def test_deterministic_mode_is_put_back_as_it_was():
    def state():
        return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory

    before = state()
    for on in (True, False):
        with measure._deterministic_algorithms(on):
            assert state() == (on, False)
    assert state() == before == (False, True)


def test_what_torch_compile_makes_of_a_quantised_result_is_right():
    x, weight = torch.randn(16, 64), torch.randn(64)
    found = candidates.compiled_quantisers()
    assert SEPARATE in found
    for quantise in found.values():
        assert measure._float8_share_of_bound(quantise, x, weight) <= 1


def test_a_wrong_scale_or_a_wrong_float8_is_beyond_the_bound():
    x, weight = torch.randn(64, 256), torch.ones(256)
    y, scales = FORMULA.quantise(x, weight)
    assert measure._float8_share_of_bound(lambda *_: (y, scales * 1.01), x, weight) > 1
    low = (FORMULA.plain(x, weight) / scales * (1 - 2**-5)).to(torch.float8_e4m3fn)
    assert measure._float8_share_of_bound(lambda *_: (low, scales), x, weight) > 1


@pytest.mark.parametrize("shares", [(nan, 0.5), (0.5, nan), (nan, inf), (inf, nan)])
def test_the_worst_share_is_the_one_that_is_no_number(shares):
    assert isnan(worst(shares))


def test_the_worst_share_is_the_largest():
    assert worst((0.5, inf)) == inf
    assert worst(iter((0.5, 0.75, 0.25))) == 0.75


@pytest.mark.gpu
def test_one_shape_on_a_gpu_with_every_group(tmp_path):
    configuration = {**TINY, "seconds": 0.05}
    run = Run("cuda", configuration, recorder(tmp_path, configuration))
    found, _ = candidates.usable("cuda")
    for group in ("headline", "add"):
        measure_case(run, Case(group, 64, 512, torch.bfloat16, compile_modes=("default",)), found)
    batches = [Case("batches", rows, 512, torch.bfloat16, ("forward",), ("default",)) for rows in (1, 64)]
    taking_part = {case: measure_case(run, case, found) for case in batches}
    for gradient in (False, True):
        measure_calls(run, taking_part, found, gradient=gradient)
    measure.measure_determinism(run, Case("determinism", 64, 512, torch.bfloat16), found)
    results = run.recorder.results
    for which in ("forward", "backward"):
        for group in ("headline", "add"):
            records = results.select(which, group=group)
            assert COPY in {record.labels["implementation"] for record in records}
            assert all("fraction" in r.values for r in records if r.labels["implementation"] != COPY)
    assert results.one("forward", group="headline", implementation="triton").data["clock"] == "cuda-graph"
    tensor = 64 * 512 * 2
    for record in results.select("memory"):
        assert record["peak"].value >= 2 * tensor  # y and dx
    assert all(record.data["deterministic repeats"] for record in results.select("determinism"))
    assert len(results.select("call", gradient=False, implementation=candidates.COMPILED)) == 2
    assert len(results.select("call", gradient=True, implementation="triton")) == 2
