"""The end-to-end step: how it is taken apart, what the report says of it, and one whole small run."""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import custom_ops
from benchkit import Quantity, Record, Timing, UserError, numbers
from benchkit.environment import capture
from benchkit.processes import ChildCrashed, budget
from benchkit.report import figures, render
from benchkit.results import Recorder, Results, load, load_report
from benchkit.run import Run, measure_and_write, sweep_and_write
from compile_bench.measure.lowerings.greedy import LoweringStudy, Trial
from engines.kernel_times import covered
from engines.measure import MeasuredEngine
from engines.spec import EngineSpec, Preparation
from lowering import Call, table, write_table
from rmsnorm_fused.impl import native
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.model import GPT, flops_per_token
from whole_step import measure, nanogpt, tuning
from whole_step.causes import changes, parts_of_steps
from whole_step.dissection import DissectedEngine, dispatch_seconds, make_dissected_engine, per_step
from whole_step.floor import floors, work_of_step
from whole_step.kernel_groups import GROUPS, group_of, operator_calls
from whole_step.report import PEER, avoid, headline, least_times, losses, ratio_over, report, steps_before, use, worst
from whole_step.variants import by_importance, every_kernel, every_operator, every_operator_and_loss, norm, variants

HOUSE = Path(__file__).resolve().parents[2] / "framework-internals"
GOLDEN = Path(__file__).parent / "golden" / "reports"
ENGINE = MeasuredEngine(Preparation(1.0, 5.0, {}), Timing((0.5, 0.5), 1, "wall-clock", 0.5), Quantity(1.0, "×"), None)


def collected(folder: Path, configuration) -> Results:
    """The results of a run into a folder."""
    recorder = Recorder.going_on(
        folder, lens=measure.NAME, environment=capture("cpu", root=HOUSE), configuration=configuration
    )
    measure.collect(Run("cpu", configuration, recorder))
    return recorder.results


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_headline_has_its_scope_and_the_fastest_of_the_table(device):
    results = load_report(GOLDEN / device)
    said, asked = headline(results), results.configuration
    assert f"`{asked['preset']}`, batch {asked['batch_size']}, {asked['dtype']}" in said
    best = max(results.select("variant"), key=lambda record: record["rate"].value)
    assert f"{numbers.count(best['rate'].value)} tokens/s" in said
    rates = re.findall(r"\| ([\d,]+) \([\d,]+–[\d,]+\) \|", render(results, report).partition("## ")[0])
    assert numbers.count(best["rate"].value) == max(rates, key=lambda rate: int(rate.replace(",", "")))


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_worst_is_that_of_all_ratios_of_our_kernels(device):
    results = load_report(GOLDEN / device)
    named = results.configuration["variants"]
    own = [r for r in results.select("variant") if named[r.labels["variant"]]["engine"]["parts"]]
    ratios = [ratio_over(results, record, over) for record in own for over in (PEER, "eager")]
    lowest = min((ratio for ratio in ratios if ratio is not None), key=lambda ratio: ratio.value)
    assert numbers.quantity(lowest) in worst(results).partition(". Of")[0]


def test_advice_names_what_gains_and_what_does_not():
    results = load_report(GOLDEN / "cpu")
    faster = Quantity(5.0, "×", 4.8, 5.2)

    def won(record):
        if record.labels.get("variant") != "operators compiled":
            return record
        return replace(record, values={**record.values, "rate": Quantity(1e6, "tokens/s", 9e5, 2e6), "change": faster})

    changed = replace(results, records=tuple(map(won, results.records)))
    assert "custom-ops”: 1,000,000 tokens/s, 5.00× torch.compile." in headline(changed)
    assert "custom-ops” runs at 5.00× (4.80–5.20) of torch.compile" in use(changed)
    idle = [change for change in changes(results) if change.own and change.verdict.startswith("no difference")]
    assert idle
    assert all(f"“{change.over}” to “{change.title}”" in avoid(results) for change in idle)


def test_a_few_rounds_are_told_and_give_no_verdict():
    results = load_report(GOLDEN / "cpu")

    def short(figure):
        if figure.low is None:
            return figure
        return replace(figure, samples=3, interval="range" if figure.interval.startswith("bootstrap") else "p20-p80")

    def of_few(record):
        return replace(record, values={name: short(figure) for name, figure in record.values.items()})

    few = replace(results, records=tuple(map(of_few, results.records)))
    assert {change.verdict for change in changes(few)} <= {
        "not known: 3 rounds are too few",
        "not compared: timed in other rounds",
    }
    assert "all that you would do" not in avoid(few)
    asked = results.configuration["rounds"]
    assert f"3 rounds ({asked} with more time), in a new random order" in render(few, report)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_no_step_beats_the_least_time_of_a_group(device):
    results = load_report(GOLDEN / device)
    steps = parts_of_steps(results)
    for floor in least_times(results):
        for name in ("eager", "compiled"):
            seconds = sum(part.seconds for part in steps[name] if part.name in floor.groups)
            assert not seconds or floor.seconds <= seconds * (1 + 1e-9), (floor, name)
    section = render(results, report).partition("## What is left to the least time")[2].partition("<details>")[0]
    shares = [float(share) for share in re.findall(r"\(([\d.]+) %\)", section)]
    assert shares
    assert max(shares) <= 100


def test_the_figure_has_at_most_six_bars_sorted_and_the_fastest_first():
    for device in ("cpu", "gpu"):
        results = load_report(GOLDEN / device)
        chart = next(figure for figure in figures(results, report) if figure.name == "throughput")
        rates = {point.place: point.value.value for panel in chart.panels for s in panel.series for point in s.points}
        assert len(rates) <= 6
        assert [rates[place] for place in chart.categories()] == sorted(rates.values(), reverse=True)
        assert max(rates.values()) == max(record["rate"].value for record in results.select("variant"))


def test_the_causes_are_by_kernel_group():
    results = load_report(GOLDEN / "gpu")
    busy = {"eager": 0.030, "compiled": 0.017}  # seconds of kernels in a step
    idle = {"eager": 0.002, "compiled": 0.0005}
    seconds = {"eager": (1, 9, 20), "compiled": (1, 4, 5)}

    def known(record):
        name = record.labels.get("variant")
        if record.name != "dissection" or name not in busy:
            return record
        parts = zip(("matmul", "norm", "loss"), seconds[name], strict=True)
        groups = {group: {"seconds": s, "calls": 1} for group, s in parts}
        times = {"kernel_seconds": busy[name], "profiled_seconds": busy[name] + idle[name]}
        values = {key: replace(value, value=times.get(key, value.value)) for key, value in record.values.items()}
        return replace(record, values=values, data={**record.data, "groups": groups})

    changed = replace(results, records=tuple(map(known, results.records)))
    (change,) = [change for change in changes(changed) if change.title == "torch.compile"]
    # 30 ms in parts of 30 and 17 ms in parts of 10.
    deltas = {name: round(seconds, 6) for name, seconds in change.deltas.items()}
    assert deltas == {"matmul": 7e-4, "norm": -2.2e-3, "loss": -1.15e-2, "GPU idle": deltas["GPU idle"]}


def test_a_variant_of_other_rounds_than_its_base_is_listed_without_a_ratio():
    results = load_report(GOLDEN / "gpu")

    def apart(record):
        if record.labels.get("variant") != "all":
            return record
        return replace(record, values={name: value for name, value in record.values.items() if name != "change"})

    records = tuple(map(apart, reversed(results.records)))  # dissections are in the order in which they were made
    changed = replace(results, records=records)
    (change,) = [change for change in changes(changed) if "all kernels" in change.title]
    assert change.speedup is None
    assert "not compared: timed in other rounds" in render(changed, report)
    assert list(parts_of_steps(changed)) == [
        name for r in changed.select("variant") if (name := r.labels["variant"]) in parts_of_steps(results)
    ]


def test_the_losses_of_other_seeds_stand_beside_those_of_the_variants():
    results = load_report(GOLDEN / "cpu")
    peer = next(r["last loss"].value for r in results.select("variant") if r.labels["variant"] == "compiled")
    seeds = tuple(
        Record("seed", {"seed": seed}, {"last loss": Quantity(peer + offset, "nats")})
        for seed, offset in ((1, 0.25), (2, -0.125))
    )
    others = tuple(record for record in results.records if record.name != "seed")
    text = losses(replace(results, records=(*others, *seeds)))
    assert f"From 3 seeds of the initial weights, those of torch.compile lie within {numbers.error_size(0.375)}" in text
    assert "seeds of the initial weights" not in losses(replace(results, records=others))


def test_a_step_that_rounds_its_residual_stream_leads_but_its_price_is_said():
    results = load_report(GOLDEN / "gpu")
    named = results.configuration["variants"]
    exact = max(
        (r for r in results.select("variant") if not named[r.labels["variant"]]["engine"]["low_precision_residual"]),
        key=lambda record: record["rate"].value,
    )
    assert "bfloat16 residual stream" in headline(results)
    ratio = ratio_over(results, exact, PEER)
    assert f"must stay in float32, which leaves {numbers.with_unit(ratio.value, '×')}" in avoid(results)
    assert "residual stream" not in use(results)


@pytest.mark.parametrize("known", [1, 2])
def test_a_loss_that_could_not_be_read_leaves_the_rest_of_the_report(known):
    results = load_report(GOLDEN / "cpu")
    variants_seen = 0

    def without(record):
        nonlocal variants_seen
        variants_seen += record.name == "variant"
        if record.name != "variant" or variants_seen <= known:
            return record
        return replace(record, values={key: value for key, value in record.values.items() if key != "last loss"})

    changed = replace(results, records=tuple(map(without, results.records)))
    text = render(changed, report)
    assert bool(losses(changed)) == (known == 2)
    assert re.search(r"^\| .* \| – \|$", text, re.MULTILINE)


def test_a_loss_that_could_not_be_read_is_an_absence(tmp_path, monkeypatch):
    missing = {"inspection": "JaxEngine.next_loss ended with status -11: no message."}
    engine = replace(ENGINE, missing=missing)
    monkeypatch.setattr(measure, "measure_engines", lambda engines, *_, **__: dict.fromkeys(engines, engine))
    configuration = measure.configure("cpu", True)
    results = collected(tmp_path, configuration)
    records = results.select("variant")
    assert len(records) == len(configuration["variants"])
    assert not any("last loss" in record.values for record in records)
    told = {absence.what: absence.why for absence in results.absences}
    title = configuration["variants"]["eager"]["title"]
    assert told[f"The last loss of {title}"] == f"asking for it failed: {missing['inspection'][:-1]}"


def test_the_first_build_of_the_operators_takes_nothing_from_the_time_of_a_run(tmp_path, monkeypatch):
    left = []

    def build(device=None):
        time.sleep(0.05)

    def measured(engines, *_, **__):
        left.append(budget.left())
        return dict.fromkeys(engines, ENGINE)

    monkeypatch.setattr(custom_ops, "load", build)
    monkeypatch.setattr(native, "load", build)
    monkeypatch.setattr(measure, "measure_engines", measured)
    configuration = measure.configure("cpu", True)
    with budget.within(1000):
        clock, before = time.monotonic(), budget.left()
        collected(tmp_path, configuration)
        passed = time.monotonic() - clock
    assert before - left[0] <= passed - 2 * 0.05


def test_a_reference_that_fails_leaves_a_report_with_the_reason(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ChildCrashed("eager raised torch.OutOfMemoryError: CUDA out of memory.")

    monkeypatch.setattr(measure, "measure_engines", fail)
    text = measure_and_write(measure.build_lens(HOUSE), device="cpu", quick=True, out=tmp_path).read_text()
    (absence,) = [a for a in load(tmp_path / "results.json").absences if a.what == "One training step, every variant"]
    assert "there was not enough memory" in absence.why
    assert "**Nothing was measured.**" in text


def test_a_profile_that_fails_leaves_the_times_and_the_profiles_of_the_others(tmp_path, monkeypatch):
    class Worker:
        def __init__(self, name):
            self.name = name

        def call(self, method, **_):
            if method == "dissect" and self.name == "eager":
                raise RuntimeError("the profiler has no events")
            groups = {"matmul": {"seconds": 0.1, "calls": 1}}
            dissection = {"operators": 5, "kernels": 3, "kernel_seconds": 0.1, "groups": groups}
            return {"dissect": dissection, "losses_from": [1.0, 2.0, 3.0]}.get(method, 5.0)

    def measured(engines, *_, inspect, **__):
        for name in engines:
            inspect(name, Worker(name))
        return dict.fromkeys(engines, ENGINE)

    monkeypatch.setattr(measure, "measure_engines", measured)
    monkeypatch.setattr(measure, "_hop_costs", list)
    configuration = {**measure.configure("cpu", True), "dissect": True}
    results = collected(tmp_path, configuration)
    profiled = {record.labels["variant"] for record in results.select("dissection")}
    assert profiled == set(configuration["variants"]) - {"eager"}
    assert len(results.select("variant")) == len(configuration["variants"])
    assert len(results.select("seed")) == 3
    told = {absence.what: absence.why for absence in results.absences}
    assert told["Where the time of eager goes"] == "it ended with RuntimeError: the profiler has no events"
    render(results, report)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("kept", [1, 2])
def test_the_report_of_measurements_that_all_ended_early_renders(device, kept):
    """Of each kind of record only the first ones: each measurement failed in the middle."""
    results = load_report(GOLDEN / device)
    names = dict.fromkeys(record.name for record in results.records)
    first = tuple(record for name in names for record in results.select(name)[:kept])
    assert render(replace(results, records=first), report).startswith("# One training step")
    for name in names:
        others = tuple(record for record in results.records if record.name != name)
        assert render(replace(results, records=others), report).startswith("# One training step")


def test_the_sweep_measures_the_sizes_that_are_missing_and_keeps_each(tmp_path, monkeypatch):
    results = load_report(GOLDEN / "cpu")
    name, known = next(iter(results.configuration["sweep"].items()))
    sizes = {name: known, "more": {**known, "variants": [*known["variants"], "unknown to this run"]}}
    asked: list[set[str]] = []

    def measured(engines, *_, **__):
        asked.append(set(engines))
        return dict.fromkeys(engines, ENGINE)

    monkeypatch.setattr(measure, "measure_engines", measured)

    def write(directory, declare):  # without figures
        path = directory / "report.md"
        path.write_text(render(load_report(directory), declare))
        return path

    monkeypatch.setattr("benchkit.run.write", write)

    def sweep(wanted):
        monkeypatch.setattr(measure, "configure", lambda device, quick: {**results.configuration, "sweep": wanted})
        lens = measure.build_lens(HOUSE)
        return sweep_and_write(lens, device="cpu", quick=False, out=tmp_path).read_text()

    alone = sweep({name: known})  # no main run is needed
    assert f"| {name} | PyTorch, eager |" in alone
    assert "**Nothing was measured.**" in alone
    for _ in range(2):  # the second call finds nothing to do
        text = sweep(sizes)
        assert asked == [set(known["variants"])] * 2
    sized = load(tmp_path / "sweep.json").select("size")
    assert {record.labels["size"] for record in sized} == set(sizes)
    assert "| more | PyTorch, eager |" in text
    assert f"`scripts/end_to_end.py --sweep` (on {sized[0].data['date']}" in text


def test_a_variant_that_only_the_sweep_has_is_shown_by_its_name():
    results = load_report(GOLDEN / "cpu")
    older = Record("size", {"size": "wide", "variant": "renamed since"}, {"rate": Quantity(1e4, "tokens/s")})
    asked = {**results.configuration, "sweep": {"wide": {}}}
    text = render(replace(results, configuration=asked, records=(older,)), report)
    assert "| wide | renamed since | 10,000 |" in text


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (None, "this run did not record"),
        ([], "each its formula"),
        (["custom_ops::linear"], "kernels of `custom_ops::linear`"),
    ],
)
def test_the_report_says_which_operators_took_their_kernel(own, said):
    results = load_report(GOLDEN / "cpu")

    def changed(record):
        of_lowerings = record.name == "dissection" and record.labels["variant"] == "lowerings"
        return replace(record, data={**record.data, "own": own}) if of_lowerings and own is not None else record

    assert said in render(replace(results, records=tuple(map(changed, results.records))), report)


def test_the_report_shows_what_tuning_chose_and_why():
    results = load_report(GOLDEN / "cpu")
    control = Quantity(1.001, "×", 0.995, 1.007)
    tuned = (
        Record("tuning", {"operator": "linear"}, {"control": control, "speedup": Quantity(1.1, "×", 1.08, 1.12)},
               {"choice": "kernel", "why": "", "together": ["bias_gelu", "rms_norm"]}),
        Record("tuning", {"operator": "rotary"}, {"control": control}, {"choice": "formula", "why": "it failed"}),
    )  # fmt: skip
    text = render(replace(results, records=(*results.records, *tuned)), report)
    rows = [line for line in text.splitlines() if line.startswith(("| `linear`", "| `rotary`"))]
    assert "kernel" in rows[0]
    assert "1.10" in rows[0]
    assert "`bias_gelu`, `rms_norm`" in rows[0]
    assert "formula | – | it failed | –" in rows[1]
    assert "Which lowering each operator takes here" not in render(results, report)


def test_intervals_that_overlap_count_once():
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5


def span(name: str, start: float, duration: float, category: str = "cpu_op") -> dict:
    return {"name": name, "ts": start, "dur": duration, "cat": category, "tid": 1, "args": {}}


def test_on_a_cpu_a_compiled_program_counts_without_the_operators_inside_it():
    events = [
        span("aten::add", 0, 10),
        span("## Call CompiledFxGraph abc", 20, 100),
        span("aten::mm", 30, 40),
        span("Optimizer.step", 130, 50, "user_annotation"),
        span("custom_ops::flash_attention", 50, 5),
        span("custom_ops::flash_attention_backward", 60, 5),
    ]
    found = per_step(events, steps=2)
    groups = found.pop("groups")
    assert found.pop("own") == ["custom_ops::flash_attention"]
    assert found == pytest.approx({"operators": 2, "operator_seconds": 25e-6, "compiled_seconds": 30e-6})
    assert groups["matmul"] == pytest.approx({"seconds": 15e-6, "calls": 0.5})
    assert groups["elementwise"] == pytest.approx({"seconds": 5e-6, "calls": 0.5})


def test_on_a_gpu_what_counts_is_the_kernels_and_overlapping_time_counts_once():
    events = [span("gemm", 0, 10, "kernel"), span("Memcpy DtoD", 5, 10, "gpu_memcpy"), span("aten::mm", 0, 99)]
    found = per_step(events, steps=1)
    groups = found.pop("groups")
    assert found.pop("own") == []
    assert found == pytest.approx({"operators": 1, "kernels": 2, "kernel_seconds": 15e-6})
    assert groups["matmul"] == pytest.approx({"seconds": 10e-6, "calls": 1})
    assert groups["elementwise"] == pytest.approx({"seconds": 5e-6, "calls": 1})
    assert groups.keys() == set(GROUPS)


# Names as torch.profiler and XLA have them, of steps of the GPT on an H200 and on a CPU.
@pytest.mark.parametrize(
    ("names", "group"),
    [
        ("aten::mm nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", "matmul"),
        ("triton_tem_fused__to_copy_add_mean_mm_mul_pow_rsqrt_t_view_9", "matmul"),
        ("autograd::engine::evaluate_function: MmBackward0 MmBackward0 aten::mm", "matmul"),
        ("aten::linear aten::addmm", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1", "attention"),
        ("aten::scaled_dot_product_attention aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("custom_ops::flash_attention void custom_ops::(anonymous namespace)::forward_wgmma<128>", "attention"),
        ("custom_ops::bias_gelu void custom_ops::(anonymous namespace)::rows<c10::BFloat16>", "elementwise"),
        ("triton_poi_fused__to_copy__unsafe_view_add_gelu_7", "elementwise"),
        ("triton_per_fused__fused_rms_norm__to_copy__unsafe_view_add_9", "norm"),
        ("rmsnorm_fused::rms_norm void (anonymous namespace)::row_kernel<float>", "norm"),
        ("triton_red_fused__log_softmax__to_copy_prepare_softmax_online_view_0", "loss"),
        ("triton_per_fused__to_copy_amax_clamp_exp_sub_sum_unsqueeze_view_11", "loss"),
        ("Optimizer.step#AdamW.step aten::_fused_adamw_ void at::native::multi_tensor_apply_kernel<T>", "optimizer"),
        ("aten::linalg_vector_norm", "optimizer"),
        ("## Call CompiledFxGraph custom_ops::mm", "matmul"),
        ("dot.23 f32[512,128] transpose(jvp(block0))/mlp/transpose", "matmul"),
        ("dot.16 f32[2,4,128,32] transpose(jvp(block0))/attention/core/bthd,bshd->bhts/dot_general", "attention"),
        ("copy_divide_fusion.2 f32[2,128,1] jvp(head)/norm/div", "norm"),
        ("wrapped_multiply.2 f32[128] optimizer/square", "optimizer"),
        ("wrapped_reduce.2 f32[] jvp(loss)/reduce_sum", "loss"),
        ("gemm_fusion_dot.3 bf16[8192,768] jit(step)/block3/attention/dot_general", "matmul"),
        ("custom-call.4 bf16[8,12,1024,64] jit(step)/block0/attention/core/__cudnn$fmhaSoftmax", "attention"),
        ("loop_multiply_fusion.3 bf16[8192,3072] jit(step)/block0/mlp/activation/tanh", "elementwise"),
    ],
)
def test_a_kernel_belongs_to_the_group_of_its_names(names, group):
    assert group_of(names) == group


def test_what_runs_between_the_last_matmul_forward_and_the_first_backward_is_the_loss():
    backward = "autograd::engine::evaluate_function: "
    events = [
        span("aten::linear", 0, 10),
        span("aten::exp", 20, 1),
        span(f"{backward}ExpBackward0", 30, 5),
        span("aten::mul", 31, 2),
        span(f"{backward}MmBackward0", 40, 9),
        span("aten::mm", 41, 7),
        span(f"{backward}GeluBackward0", 50, 9),
        span("aten::gelu_backward", 51, 3),
        span("Optimizer.step#AdamW.step", 60, 9, "user_annotation"),
        span("aten::mul", 61, 4),
        span("aten::add", 80, 6),
    ]
    groups = per_step(events, steps=1)["groups"]
    microseconds = {group: round(found["seconds"] * 1e6) for group, found in groups.items()}
    expected = {"matmul": 17, "attention": 0, "norm": 0, "elementwise": 9, "loss": 3, "optimizer": 4}
    assert microseconds == expected


def test_an_operator_of_the_backward_pass_belongs_with_its_forward_operator():
    def numbered(event, number):
        return {**event, "args": {"Sequence number": number}}

    events = [
        numbered(span("aten::rms_norm", 0, 10), 4),
        numbered(span("aten::mul", 1, 5), 4),
        numbered(span("autograd::engine::evaluate_function: MulBackward0", 20, 9), 4),
        span("aten::mul", 21, 7),
        numbered(span("autograd::engine::evaluate_function: MulBackward0", 30, 9), 3),
        span("aten::mul", 31, 2),
    ]
    groups = per_step(events, steps=1)["groups"]
    assert groups["norm"] == pytest.approx({"seconds": 17e-6, "calls": 3})
    assert groups["elementwise"] == pytest.approx({"seconds": 2e-6, "calls": 1})


def test_the_operators_of_a_real_step_are_in_their_groups():
    from dispatcher_trace.capture.profile import profiled

    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    with profiled() as profile:
        model(tokens, tokens).backward()
        optimizer.step()
    operators = {work.names.split()[-1]: work for work in operator_calls(profile.events)}
    found = {name: group_of(work.names) for name, work in operators.items()}
    expected = {
        "aten::mm": "matmul",
        "aten::scaled_dot_product_attention": "attention",
        "aten::rms_norm": "norm",
        "aten::pow": "norm",
        "aten::gelu": "elementwise",
        "aten::gelu_backward": "elementwise",
        "aten::_log_softmax_backward_data": "loss",
        "aten::addcdiv_": "optimizer",
    }
    assert {name: found[name] for name in expected} == expected
    groups = per_step(profile.events, steps=1)["groups"]
    assert all(group["calls"] > 0 for group in groups.values())


def test_a_launch_gives_a_kernel_the_names_of_its_operator():
    events = [
        {**span("aten::_fused_rms_norm", 0, 10), "args": {"External id": 7}},
        {**span("cudaLaunchKernel", 5, 1, "cuda_runtime"), "args": {"correlation": 3, "External id": 7}},
        {**span("void vectorized_layer<float>", 20, 4, "kernel"), "args": {"correlation": 3}},
    ]
    assert per_step(events, steps=1)["groups"]["norm"] == pytest.approx({"seconds": 4e-6, "calls": 1})


def test_losses_from_other_seeds_begin_with_other_weights():
    model = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)
    training = TrainConfig(batch_size=2, accumulation=1)
    made = make_dissected_engine(EngineSpec("torch", compiled=False), model, training, "cpu")
    before = made.next_loss()
    made.run(2)
    again, other, same = made.losses_from([training.seed, 5, training.seed], steps=0)
    assert again == same == before
    assert other != before


def test_losses_are_compared_after_equal_steps_however_many_the_timing_took():
    class Counting:
        def __init__(self):
            self.steps, self.peak_memory = 0, None

        def prepare(self):
            self.steps += 1

        def run(self, steps):
            self.steps += steps

        def next_loss(self):
            return self.steps

    for samples in (0, 3, 5):
        engine = DissectedEngine(Counting(), "torch", "cpu")
        engine.prepare()
        for _ in range(samples):
            engine.run(4)
        assert engine.loss_after(total=21, steps=4) == 21
    engine.run(4)
    with pytest.raises(UserError, match="it had taken 25 steps, more than the 21 of the others"):
        engine.loss_after(total=21, steps=4)


def test_a_hop_that_measured_as_nothing_takes_nothing():
    assert dispatch_seconds({"a": 3, "b": 2}, {"a": 1e-6, "b": -1e-9}) == pytest.approx(3e-6)


@pytest.mark.parametrize("parts", [norm, every_operator, every_kernel])
def test_the_parts_compute_what_the_model_does(parts):
    shape = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    plain, own = GPT(shape).double(), GPT(shape, **parts()).double()
    # A few hundred roundings of numbers near 5, in float64.
    assert own(tokens, tokens).item() == pytest.approx(plain(tokens, tokens).item(), abs=1e-13)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("parts", [every_operator, every_kernel, every_operator_and_loss])
def test_the_parts_are_one_graph_in_16_bits(parts, device):
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16), **parts()).to(device)
    tokens = torch.zeros(2, 16, dtype=torch.int64, device=device)

    def loss():
        with torch.autocast(device, torch.bfloat16):
            return model(tokens, tokens)

    torch.compiler.reset()
    torch.compile(loss, fullgraph=True, backend="eager")().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_targets_of_the_table_call_every_operator_with_two_lowerings():
    from compile_bench.measure.lowerings.step import operators
    from compile_bench.targets.case import Case

    found = operators(Case("whole_step.targets:tiny"))
    assert found.names == ["rms_norm", "linear", "rotary", "flash_attention", "rms_norm_add", "bias_gelu"]
    assert {call.direction for call in found.calls} == {"training"}


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
    assert quick["variants"].keys() < full["variants"].keys()
    for name, variant in quick["variants"].items():
        assert full["variants"][name]["change"] in variant["change"]
        assert variant["engine"] == full["variants"][name]["engine"]
    assert quick["variants"]["optimizer"]["over"] == "compiled"
    assert all(variant["over"] in ("", *quick["variants"]) for variant in quick["variants"].values())
    assert {"compile-bench", "custom-ops", "jax-baseline"} <= {v["lens"] for v in quick["variants"].values()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_variants_that_the_headline_needs_are_measured_first(device):
    names = list(variants(device))
    order = by_importance(names)
    assert sorted(order) == sorted(names)
    assert order[:2] == ["eager", "compiled"]
    assert order.index("optimizer") < order.index("norm") < order.index("jax")
    if device == "cuda":
        assert order[2:4] == ["graph", "compiled graph"]


def test_an_untuned_machine_is_tuned_before_the_step_is_timed(tmp_path, monkeypatch):
    done = []
    ratio = Quantity(1.1, "×", 1.05, 1.15)

    def choose(harness, case, *, seconds):
        done.append(case.target)
        assert budget.left() == 50.0  # the rest is for the step, which is worth more untuned than not measured
        trials = (
            Trial("bias_gelu", (), "kernel", ratio, Quantity(1.0, "×", 0.99, 1.01), Quantity(1.0, "s")),
            Trial("linear", (), "formula", None, Quantity(1.0, "×", 0.99, 1.01), None, "it failed"),
        )
        times = (Quantity(1.1, "s"), Quantity(1.0, "s"))
        call = Call("bias_gelu", "cpu", "float32", "training", (("rows", 8),), "custom_ops")
        return LoweringStudy(case, (call,), trials, *times, ratio, ratio, undecided=("rotary",))

    empty = tmp_path / "table.json"
    write_table(empty, [])
    monkeypatch.setattr(table, "COMMITTED", empty)
    monkeypatch.setenv("LOWERING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(tuning, "measure_lowerings", choose)
    monkeypatch.setattr(measure, "measure_engines", lambda engines, *_, **__: done.append("timed") or {})
    configuration = {**measure.configure("cpu", True), "tune": True}
    for _ in range(2):  # the second run finds the rows of the first
        with budget.within(100.0):
            results = collected(tmp_path, configuration)
        assert "The lowering of rotary on this machine" in {a.what for a in results.absences}
    assert done == ["whole_step.targets:tiny", "timed", "timed"]
    choices = {record.labels["operator"]: record.data["choice"] for record in results.select("tuning")}
    assert choices == {"bias_gelu": "kernel", "linear": "formula"}
    assert "Lowerings other than formulas" not in {a.what for a in results.absences}


def test_a_step_without_measured_lowerings_says_so(tmp_path, monkeypatch):
    def no_time(harness, case, *, seconds):
        raise budget.OutOfTime("no time was left to compile a kernel")

    empty = tmp_path / "table.json"
    write_table(empty, [])
    monkeypatch.setattr(table, "COMMITTED", empty)
    monkeypatch.setenv("LOWERING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "measure_lowerings", no_time)
    monkeypatch.setattr(measure, "measure_engines", lambda engines, *_, **__: {})
    with budget.within(1000.0):
        results = collected(tmp_path, {**measure.configure("cpu", True), "tune": True})
    missing = {a.what: a.why for a in results.absences}
    assert missing["Lowerings other than formulas"] == "none was measured on such a machine before these steps"


@pytest.mark.slow
def test_a_small_run_measures_every_part_and_renders(tmp_path, monkeypatch):
    few = {name: variant for name, variant in variants("cpu").items() if name in ("eager", "operators", "jax", "norm")}
    monkeypatch.setattr(measure, "variants", lambda device: few)
    lens = measure.build_lens(HOUSE)
    whole = lens.configure("cpu", False)
    small = {**whole, "model": {**whole["model"], "n_layer": 1}, "layers": 1, "limits": False, "tune": False}
    small |= {"rounds": 2, "steps": 1, "batch_size": 1}
    monkeypatch.setattr(measure, "configure", lambda device, quick: small)
    page = measure_and_write(measure.build_lens(HOUSE), device="cpu", quick=True, out=tmp_path)
    results = load(tmp_path / "results.json")
    assert steps_before(results) == 8
    records = {record.labels["variant"]: record for record in results.select("variant")}
    assert records.keys() == few.keys()
    losses = [record["last loss"].value for record in records.values()]
    assert max(losses) - min(losses) < 1e-4
    eager, own = (results.one("dissection", variant=name) for name in ("eager", "norm"))
    assert own["operators"].value > 0
    assert 0 < eager["operator_seconds"].value < eager["profiled_seconds"].value
    for variant, parts in parts_of_steps(results).items():  # of the step as it was timed, whatever profiling it took
        assert sum(part.seconds for part in parts) == pytest.approx(records[variant]["step"].value)
    made, rest = (
        eager.data["hops"][f"AutogradCPU above `add`, {what}"] for what in ("a node is made", "no gradient asked for")
    )
    assert rest > made > 0
    text = page.read_text()
    assert "rmsnorm-fused" in text
    assert "figures/time.svg" in text


def test_the_least_work_of_a_step():
    model = GPTConfig(vocab_size=256, n_layer=2, n_head=2, n_embd=8, block_size=16)
    tokens = 32
    work = {each.group: each for each in work_of_step(model, tokens, "bfloat16")}
    assert tuple(work) == GROUPS
    weights = sum(p.numel() for p in GPT(model).parameters())
    matrices = sum(p.numel() for p in GPT(model).parameters() if p.ndim == 2)
    assert work["matmul"].flops == 6 * matrices * tokens
    # Both together are what flops_per_token counts, but for the gains and biases, and half of attention.
    assert flops_per_token(model) * tokens == pytest.approx(
        work["matmul"].flops + 2 * work["attention"].flops + 6 * (weights - matrices) * tokens
    )
    assert work["optimizer"].moved == 32 * weights
    assert work["loss"].moved == tokens * 256 * (2 + 2)
    # Forward: x and the branch in, x and y out. Backward: dy, x and dx in, dx and its copy for the branch out.
    assert work["norm"].moved == 5 * tokens * 8 * ((4 + 2 + 4 + 2) + (2 + 4 + 4 + 4 + 2))


NETWORK = """
from dataclasses import dataclass
import torch

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        assert not config.bias and config.dropout == 0.0
        self.embedding = torch.nn.Embedding(config.vocab_size, config.n_embd)

    def forward(self, tokens, targets):
        logits = self.embedding(tokens) @ self.embedding.weight.T
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def test_a_network_from_a_checkout_is_timed_beside_ours_with_a_loss_of_its_own(monkeypatch, tmp_path):
    monkeypatch.delenv("NANOGPT", raising=False)
    assert nanogpt.checkout() is None
    with pytest.raises(UserError, match="NANOGPT: expected the folder of a checkout"):
        nanogpt.network(GPTConfig.preset("tiny"))
    monkeypatch.setenv("NANOGPT", str(tmp_path))
    with pytest.raises(UserError, match=r"expected a checkout of nanoGPT with model.py in it, got"):
        nanogpt.checkout()
    (tmp_path / "model.py").write_text(NETWORK)
    title = f"nanoGPT (model.py {hashlib.sha256(NETWORK.encode()).hexdigest()[:12]})"
    size = measure.configure("cuda", False)["sweep"]["`gpt2-124m`, 32 × 1024 tokens"]
    assert size["peers"]["nanogpt"]["title"] == title
    engine = EngineSpec(**{**size["peers"]["nanogpt"]["engine"], "compiled": False})
    shape = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)
    training = replace(TrainConfig.preset("tiny"), batch_size=2)
    ours, theirs = (
        make_dissected_engine(spec, shape, training, "cpu").next_loss()
        for spec in (EngineSpec("torch", compiled=False), engine)
    )
    assert theirs > ours + 1  # another network


def test_the_floor_and_other_sizes_are_in_the_report_where_they_were_measured():
    results = load_report(GOLDEN / "cpu")
    kept = tuple(r for r in results.records if r.name not in ("size", "memory limit", "product limit"))
    peers = {"nanogpt": {"title": "nanoGPT (model.py 0)", "engine": {}}}
    asked = {**results.configuration, "model": asdict(GPTConfig.preset("tiny")), "sweep": {"wide": {"peers": peers}}}
    bare = replace(results, records=kept, configuration=asked)
    assert "## What is left" not in render(bare, report)
    assert "## At other sizes" not in render(bare, report)
    limits = (
        Record("memory limit", {"traffic": "1 read 1 write"}, {"bandwidth": Quantity(1e10, "B/s")}),
        Record("product limit", {"dtype": "float32", "size": 1024}, {"rate": Quantity(1e11, "FLOP/s")}),
    )
    rate, over = Quantity(1e4, "tokens/s", 9e3, 1.1e4), Quantity(1.5, "×", 1.4, 1.6)
    sizes = (
        Record("size", {"size": "wide", "variant": "lowerings"}, {"rate": rate, "over nanogpt": over}),
        Record("size", {"size": "wide", "variant": "nanogpt"}, {"rate": rate}),
    )
    changed = replace(bare, records=(*kept, *limits, *sizes))
    text = render(changed, report)
    assert "| torch.compile, lowerings measured | 10,000 (9,000–11,000) | 1.50× (1.40–1.60) |" in text
    assert "| nanoGPT (model.py 0) | 10,000 (9,000–11,000) | 1 |" in text
    seconds = sum(
        work.flops / 1e11 + work.moved / 1e10 for work in work_of_step(GPTConfig.preset("tiny"), 512, "float32")
    )
    assert sum(floor.seconds for floor in floors(changed, [])) == pytest.approx(seconds)
    least = sum(floor.seconds for floor in least_times(changed))
    assert least <= seconds
    assert f"{numbers.count(512 / least)} tokens/s; lowerings + loss + AdamW reaches" in text
    emulated = Record("product limit", {"dtype": "bfloat16", "size": 1024}, {"rate": Quantity(1e8, "FLOP/s")})
    in_16_bits = replace(changed, records=(*changed.records, emulated), configuration={**asked, "dtype": "bfloat16"})
    assert "float32 products at 100 GFLOP/s" in render(in_16_bits, report)
