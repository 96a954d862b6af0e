"""The lens: a small run measures, records and renders."""

import itertools
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import custom_ops
from benchkit import Quantity, Record, numbers
from benchkit.processes import budget
from benchkit.report import Reached, render
from benchkit.results import Absence, Recorder, load
from benchkit.run import Run, measure_and_write
from custom_ops import lens
from custom_ops.bench import attention, avx2, build_costs, loss, measure, resident_memory, speed, training
from custom_ops.bench.cases import COMPILED, OURS, benchmark_cases
from custom_ops.bench.measure import largest_error
from custom_ops.operators.linear import slow_in_torch
from custom_ops.report import targets
from custom_ops.report.finding import avoid, headline, ratios, use, worst
from custom_ops.report.page import report
from native_build import BuildError
from torch_baseline.config import GPTConfig

TENSOR = Quantity(1 << 27, "B")
GOLDEN = Path(__file__).parent / "golden" / "reports"
ON_GPU, ON_CPU = (load(GOLDEN / device / "results.json") for device in ("gpu", "cpu"))

SMALL = {
    "builds": False,
    "call_counts": [1, 64],
    "counts": [256, 1024],
    "columns": 64,
    "dtypes": ["float32", "bfloat16"],
    "large_count": 4096,
    "placements": 16,
    "beyond_cache_bytes": 1 << 16,
    "correctness_count": 2000,
    "linear": {"rows": 16, "depth": 16, "columns": 16},
    "attention": {
        "lengths": [32, 64],
        "causal_lengths": [128],
        "head_sizes": [16, 32],
        "tokens": 64,
        "width": 32,
        "accuracy_lengths": [32, 64],
        "accuracy_dtypes": ["float32", "bfloat16"],
        "feature_length": 64,
        "kernel_length": 32,
        "memory_lengths": [32, 64],
        "seconds": 0.01,
    },
    "loss": {"rows": 32, "width": 16, "classes": 64},
    "preset": "tiny",
    "batch_size": None,
    "seconds": 0.01,
}


@pytest.mark.slow
def test_small_run_renders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lens, "configure", lambda device, quick: SMALL)
    built = lens.build_lens(Path(__file__).resolve().parents[1])
    monkeypatch.setattr(lens, "memory_limits", lambda device, seconds: limits(device))
    monkeypatch.setattr(lens, "product_limits", lambda device, size, seconds: products(device))
    page = measure_and_write(built, device="cpu", quick=True, out=tmp_path)
    text = page.read_text()
    results = load(tmp_path / "results.json")
    assert results.complete
    assert all(record["differing"].value == 0 for record in results.select("correctness", op="vector_add"))
    assert "bit-equal to torch.add" in text
    assert "operators agree with the profiler's counts" in " ".join(text.split())
    assert {record.labels["op"] for record in results.select("one element", form=OURS)} == {
        "vector_add", "bias_gelu", "flash_attention"
    }  # fmt: skip
    assert len(results.select("beyond the cache", form=OURS)) == 4
    assert len(results.select("attention resident memory", form=OURS)) == 2
    avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert len(results.select(avx2.RECORD, form=OURS)) == (48 if avx512 else 0)
    assert len(results.select("linear", form=OURS)) == 2 * len(slow_in_torch())
    assert len(results.select(avx2.LINEAR, form=OURS)) == (4 if avx512 else 0)  # two dtypes, two directions
    for title in ("Must, aim and reached", "Calls on one element", "Memory of attention"):
        assert title in text
    losses = {round(record["loss"].value, 4) for record in results.select("training")}
    assert len(losses) == 1
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"speed.svg", "attention.svg", "calls.svg"}


def test_operands_have_several_placements_and_their_shapes() -> None:
    """Addresses of whole cache lines, different within a page, in memory of their own set."""
    sets = [(torch.full((100, 8), float(value)), torch.full((3,), value)) for value in range(3)]
    found = speed.placed(sets, 16)
    assert len(found) == 18
    lines = [tuple(x.data_ptr() % 4096 for x in operands) for operands in found]
    assert all(place % 64 == 0 for places in lines for place in places)
    assert len(set(lines)) > 12
    for index, operands in enumerate(found):
        assert all(torch.equal(x, expected) for x, expected in zip(operands, sets[index % 3], strict=True))


def run_of(folder: Path, device: str = "cpu") -> Run:
    configuration = lens.configure(device, False)
    recorder = Recorder(folder, lens="custom-ops", environment=ON_CPU.environment, configuration=configuration)
    return Run(device, configuration, recorder)


@pytest.mark.parametrize(("capability", "limited"), [("AVX512", 4), ("AVX2", 0), ("DEFAULT", 0)])
def test_a_process_is_limited_to_avx2_only_where_that_changes_it(
    capability: str, limited: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    names = [step.what for step in lens._measurements(run_of(tmp_path))]
    assert len([name for name in names if "AVX2" in name]) == limited


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_dtype_form_or_length_shares_its_step_with_another_that_may_not_fit(device: str, tmp_path: Path) -> None:
    names = [step.what for step in lens._measurements(run_of(tmp_path, device))]
    assert len(set(names)) == len(names)
    for dtype in ("float32", "bfloat16"):
        assert f"the loss of a language model in {dtype}" in names
        assert f"bias_gelu over sizes in {dtype}" in names
        assert f"attention's speed in {dtype}, head size 64" in names
    lengths = (1024, 4096, 16384) if device == "cuda" else (1024, 8192)
    forms = attention.MEMORY_FORMS if device == "cuda" else resident_memory.FORMS
    memory = [name for name in names if name.startswith("attention's peak memory")]
    assert len(memory) == len(lengths) * len(forms) * (2 if device == "cuda" else 1)


def test_a_build_that_cannot_be_loaded_leaves_a_report_with_the_reason(tmp_path: Path, monkeypatch) -> None:
    def fail() -> None:
        raise BuildError("no compiler: install g++")

    monkeypatch.setattr(lens, "load", fail)
    monkeypatch.setattr(lens, "configure", lambda device, quick: SMALL)
    built = lens.build_lens(Path(__file__).resolve().parents[1])
    page = measure_and_write(built, device="cpu", quick=True, out=tmp_path).read_text()
    reasons = {absence.what: absence.why for absence in load(tmp_path / "results.json").absences}
    assert reasons["The build of the operators"] == "no compiler: install g++"
    assert all(what in page for what in reasons)


def test_builds_from_scratch_come_first_and_with_a_budget_last(tmp_path: Path, monkeypatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(lens, "_collect_builds", lambda run: order.append("builds"))
    monkeypatch.setattr(lens, "_load_operators", lambda: order.append("operators"))
    lens.collect(run_of(tmp_path))
    with budget.within(1000.0):
        lens.collect(run_of(tmp_path))
    assert order == ["builds", "operators", "operators", "builds"]


def test_what_was_built_is_loaded_though_the_builds_took_all_the_time(tmp_path: Path, monkeypatch) -> None:
    def build_all(folder: Path, outcomes: dict[str, object]) -> None:
        time.sleep(max(budget.left(), 0.0))
        outcomes |= dict.fromkeys(build_costs.BUILDERS)

    monkeypatch.setattr(build_costs, "build_all", build_all)
    monkeypatch.setattr(build_costs, "build_at_run_time", lambda: [Record("loaded", {"road": "at run time"})])
    monkeypatch.setattr(lens, "_load_and_use", lambda built: [Record("loaded")])
    monkeypatch.setattr(lens, "_BUILD_SECONDS", 0.0)
    run = run_of(tmp_path)
    with budget.within(0.2):
        lens._collect_builds(run)
    assert len(run.recorder.results.select("loaded")) == len(build_costs.BUILDERS) + 1


def test_a_form_of_the_loss_that_does_not_fit_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*operands):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has …")

    monkeypatch.setitem(loss.__dict__, "_unfused", too_large)
    sizes = {"rows": 4, "width": 8, "classes": 16}
    yielded = list(loss.losses("cpu", dtypes=[torch.float32], compiled=False, seconds=0.001, **sizes))
    absent = [item for item in yielded if isinstance(item, Absence)]
    assert [item.what for item in absent] == [f"the loss in float32 with {loss.TORCH}"]
    assert absent[0].why == "there was not enough memory for 20.00 GiB more"
    assert OURS in {item.labels["form"] for item in yielded if isinstance(item, Record)}
    render(replace(ON_CPU, records=tuple(item for item in yielded if isinstance(item, Record))), report)


@pytest.mark.slow
def test_the_parts_of_a_loss_are_timed_beside_torchs_with_the_same_result() -> None:
    sizes = {"rows": 4, "width": 8, "classes": 16, "dtype": torch.float64}
    records = list(loss.parts("cpu", compiled=False, seconds=0.001, **sizes))
    assert all(isinstance(record, Record) for record in records)
    results = replace(ON_CPU, records=tuple(record for record in records if isinstance(record, Record)))
    values = {}
    for own in results.select(loss.PARTS_RECORD, form=OURS):
        (its,) = results.select(loss.PARTS_RECORD, form=loss.TORCH, part=own.labels["part"])
        values[own.labels["part"]] = own["loss"].value
        assert own["loss"].value == pytest.approx(its["loss"].value, rel=1e-12)
        assert {"speedup", "of_alone"} <= own.values.keys()
    assert len(set(values.values())) == len(values) == 6  # each part does something
    assert "| all four |" in render(results, report)


def _lacking(*operands: object, **options: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has …")


@pytest.mark.parametrize("form", ["torch", OURS])
def test_a_form_of_an_operator_that_does_not_fit_leaves_the_others(form: str) -> None:
    case = benchmark_cases()["scale"]
    forms = {**case.forms, "third": case.forms["torch"], form: _lacking}
    yielded = list(speed._all_forms(case, forms, "cpu", 64, torch.float32, columns=8, seconds=0.001))
    records = [item for item in yielded if isinstance(item, Record)]
    (absence,) = (item for item in yielded if isinstance(item, Absence))
    assert {record.labels["form"] for record in records} == forms.keys() - {form}
    assert absence.what == f"scale with {form} at 64 elements in float32"
    assert all(("speedup" in record.values) == (form != "torch") for record in records)
    render(replace(ON_CPU, records=(*ON_CPU.select("serving"), *records)), report)


@pytest.mark.parametrize("form", ["flash", OURS])
def test_a_form_of_attention_that_does_not_fit_leaves_the_others(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = {"flash": attention.ours, OURS: attention.ours, "math": attention.ours} | {form: _lacking}
    monkeypatch.setattr(attention, "ours", forms[OURS])
    others = {name: partial(attend, causal=False) for name, attend in forms.items() if name != OURS}
    monkeypatch.setattr(attention, "fused", lambda operands, causal: others)
    yielded = list(
        attention.speeds("cpu", [32], [16], [torch.float32], tokens=32, width=16, seconds=0.001, masks=(False,))
    )
    records = [item for item in yielded if isinstance(item, Record)]
    for direction in ("forward", "backward"):
        timed = {record.labels["form"] for record in records if record.labels["direction"] == direction}
        assert timed == forms.keys() - {form}
    (absence,) = (item for item in yielded if isinstance(item, Absence))
    assert absence.why == "there was not enough memory for 20.00 GiB more"
    render(replace(ON_CPU, records=(*ON_CPU.select("serving"), *records)), report)


def test_a_model_that_does_not_fit_leaves_the_step_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "PARTS", {training.BASELINE: {}, "bias_gelu": {"activation": _lacking}})
    monkeypatch.setattr(training.GPTConfig, "preset", lambda name: GPTConfig(n_layer=1, n_embd=32, block_size=16))
    yielded = list(training.training_steps("cpu", "tiny", batch_size=1, seconds=0.01))
    assert [item.labels["part"] for item in yielded if isinstance(item, Record)] == [training.BASELINE]
    assert [item.what for item in yielded if isinstance(item, Absence)] == ["a training step with bias_gelu"]


@pytest.mark.parametrize("name", sorted({record.name for record in ON_CPU.records} - {"serving"}))
def test_report_renders_without(name: str) -> None:
    records = tuple(record for record in ON_CPU.records if record.name != name)
    assert render(replace(ON_CPU, records=records), report).startswith("# custom-ops")


@pytest.mark.parametrize("results", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("kept", [1, 2, 0.5])
def test_the_report_of_measurements_that_all_ended_early_renders(results, kept: float) -> None:
    """Of each kind of record only the first ones: each measurement failed in the middle."""
    by_name: dict[str, list[Record]] = {}
    for record in results.records:
        by_name.setdefault(record.name, []).append(record)
    first = [records[: kept if kept >= 1 else len(records) // 2] for records in by_name.values()]
    text = render(replace(results, records=tuple(itertools.chain.from_iterable(first))), report)
    assert text.startswith("# custom-ops")


def test_report_renders_with_nothing_but_the_build() -> None:
    text = render(replace(ON_CPU, records=tuple(ON_CPU.select("serving"))), report)
    assert "Neither bias_gelu nor attention was measured" in text
    assert "## Attention" not in text


@pytest.mark.parametrize("results", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
def test_the_worst_is_the_worst_of_all_ratios_and_of_all_memories(results) -> None:
    every = [
        record["speedup"].value
        for record in results.records
        if "speedup" in record.values and str(record.labels.get("form", "")).startswith(OURS)
    ]
    assert min(every) >= min(ratios(results)).speed
    assert worst(results).startswith(f"{numbers.with_unit(min(ratios(results)).speed, '×')} of torch's speed")
    assert "Memory at its peak: attention" in worst(results)


def test_a_training_step_that_an_operator_slows_down_is_the_worst() -> None:
    slow = [
        replace(r, values={**r.values, "speedup": Quantity(0.1, "×")}) if r.labels.get("part") == "all" else r
        for r in ON_CPU.records
    ]
    assert worst(replace(ON_CPU, records=tuple(slow))).startswith("0.100× of torch's speed, for the `tiny` training")


def test_advice_names_what_gains_beside_torch_and_what_torch_compile_fuses_too() -> None:
    for results in (ON_CPU, ON_GPU):
        for gain in targets.gains(results):
            assert gain.what in (use(results) if gain.worth_it == "yes" else avoid(results))
    assert "torch.compile makes the same kernel: axpb" in avoid(ON_GPU)
    alike = [gain for gain in targets.gains(ON_GPU) if gain.compiled_alike]
    assert alike
    assert all(f"{gain.what} {gain.dtype} (" in avoid(ON_GPU).partition("torch.compile")[2] for gain in alike)


def test_the_worst_ratio_of_a_call_says_that_it_had_one_element() -> None:
    slow = [
        replace(r, values={**r.values, "speedup": Quantity(0.1, "×")}) if r.name == "one element" else r
        for r in ON_CPU.records
    ]
    assert "(one element)" in worst(replace(ON_CPU, records=tuple(slow)))


@pytest.mark.parametrize("results", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
def test_the_headline_has_both_ends_of_attention(results) -> None:
    speeds = [record["speedup"].value for record in results.select("attention", form=OURS)]
    assert f"{numbers.significant(min(speeds))}–{numbers.significant(max(speeds))}×" in headline(results)


def verdicts(results) -> dict[tuple[str, str], str]:
    return {(gain.what, gain.dtype): gain.worth_it for gain in targets.gains(results)}


def test_an_operator_is_worth_it_where_its_interval_says_so_and_attention_where_every_shape_does() -> None:
    on_gpu = verdicts(ON_GPU)
    assert on_gpu["flash_attention forward", "float32"] == "yes"
    assert on_gpu["flash_attention backward", "bfloat16"] == "**no**"

    def changed(low: float, high: float, **labels: object):
        records = []
        for record in ON_CPU.records:
            if "speedup" in record.values and all(record.labels.get(key) == label for key, label in labels.items()):
                speedup = replace(record["speedup"], value=(low + high) / 2, low=low, high=high)
                record = replace(record, values={**record.values, "speedup": speedup})
            records.append(record)
        return verdicts(replace(ON_CPU, records=tuple(records)))

    forward = {"op": None, "form": OURS, "dtype": "float32", "direction": "forward"}
    assert changed(0.9, 1.2, **forward)["flash_attention forward", "float32"] == "it depends"
    assert changed(0.9, 1.2, op="scale", dtype="float32")["scale", "float32"] == "it depends"
    assert changed(1.1, 1.2, op="scale", dtype="float32")["scale", "float32"] == "yes"
    assert changed(0.9, 1.0, op="scale", dtype="float32")["scale", "float32"] == "**no**"


def test_the_targets_hold_what_is_missed_too() -> None:
    missed = {line.target.what: line.missed for line in targets.reached(ON_GPU)}
    for what in (
        "attention, backward, bfloat16, 4,096 tokens and more",
        "attention, forward, bfloat16, 1,024 tokens",
        "vector_add, misaligned operands, against torch.add",
        "the eager training step with flash_attention, against torch",
    ):
        assert missed[what]
    assert not missed["bias_gelu, of the memory limit"]
    assert "vector_add, misaligned operands, against torch.add" in {
        line.target.what for line in targets.reached(ON_CPU)
    }


def test_an_operator_whose_sizes_ended_early_is_not_judged_by_a_small_one() -> None:
    most = max(record.labels["count"] for record in ON_GPU.select("speed", op="bias_gelu"))
    ended_early = replace(
        ON_GPU,
        records=tuple(
            record
            for record in ON_GPU.records
            if record.labels.get("op") != "bias_gelu" or record.labels.get("count") != most
        ),
    )
    judged = {line.target.what: line.value for line in targets.reached(ended_early)}
    assert judged.get("bias_gelu, of the memory limit") is None
    assert judged["bias_gelu_backward, of the memory limit"] is not None


def limits(device: str) -> list:
    """The full-size measurement of the machine's memory takes longer than the rest of this test."""
    from benchkit.timing.limits import memory_limits

    return list(memory_limits(device, bytes_per_tensor=1 << 20, seconds=0.01))


def test_the_reports_example_of_cancellation_is_one() -> None:
    x, b = torch.tensor([-104.5], dtype=torch.bfloat16), torch.tensor([131.0], dtype=torch.bfloat16)
    assert (1.25 * x).item() == -131
    assert largest_error(1.25 * x + b, x, b, 1.25) == 192
    assert custom_ops.axpb(x, b, 1.25).item() == 0.375


def test_configuration_is_smaller_when_quick() -> None:
    for device in ("cpu", "cuda"):
        full, quick = lens.configure(device, False), lens.configure(device, True)
        assert full.keys() == quick.keys()
        assert max(quick["counts"]) < max(full["counts"])
        assert quick["seconds"] < full["seconds"]


def products(device: str) -> list:
    """Like :func:`limits`, for small matrices."""
    from benchkit.timing.limits import product_limits

    return list(product_limits(device, size=64, seconds=0.01))


def test_torch_compile_is_compiled_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for dynamic sizes, it is twice as slow as torch's own kernels, and the comparison would be unfair."""
    asked = []

    def compile_anew(function, **options):
        sizes = set()
        asked.append((options, sizes))

        def compiled(*operands):
            sizes.add(operands[0].numel())
            return function(*operands)

        return compiled

    axpb = benchmark_cases()["axpb"]
    without_library = replace(axpb, forms=dict.fromkeys(axpb.forms, axpb.forms["torch"]))
    monkeypatch.setattr(speed, "benchmark_cases", lambda: {"axpb": without_library})
    monkeypatch.setattr(torch, "compile", compile_anew)
    counts = [1024, 4096]
    found = list(speed.operators("cpu", ["axpb"], counts, [torch.float32], columns=64, compiled=True, seconds=0.01))
    assert [options["dynamic"] for options, _ in asked] == [False, False]
    assert [sizes for _, sizes in asked] == [{1024}, {4096}]
    own = [record for record in found if record.labels["form"] == COMPILED]
    assert [record.data for record in own] == [{"compiled": "for each size"}] * 2


# ---- on a CPU: what must be reached, what is aimed at, and the records of further kinds

TWICE = Quantity(2.0, "×")
NEW = ("beyond the cache", "attention resident memory", "one element")


def with_records(*records: Record):
    """The golden run with a memory limit of 40 GB/s, and these records in place of its own of the new kinds."""
    limit = {"bandwidth": Quantity(4e10, "B/s")}
    kept = [
        replace(r, values={**r.values, **limit}) if r.name == "memory limit" else r
        for r in ON_CPU.records
        if r.name not in NEW
    ]
    return replace(ON_CPU, records=(*kept, *records))


def beyond(form: str, rate: float, dtype: str = "bfloat16") -> Record:
    labels = {"op": "bias_gelu", "dtype": dtype, "count": 1 << 26, "form": form}
    values = {"time": Quantity((1 << 28) / rate, "s"), "rate": Quantity(rate, "B/s"), "speedup": Quantity(5.0, "×")}
    values["share"] = Quantity(rate / 4e10, "×")
    return Record("beyond the cache", labels, values)


def attended(form: str, speed: float, *, error: float = 1e-6, length: int = 512) -> Record:
    labels = {"dtype": "float32", "head_size": 64, "length": length, "causal": False, "batch": 1, "heads": 2}
    values = {"time": Quantity(1 / speed, "s"), "rate": Quantity(1e11 * speed, "FLOP/s"), "error": Quantity(error, "")}
    if form == OURS:
        values["speedup"] = Quantity(speed, "×")
    labels |= {"direction": "forward", "form": form, "best": form != OURS, "clock": "wall-clock"}
    return Record("attention", labels, values)


def must_and_aim(*records: Record, gpu: object = None) -> dict[str, Reached]:
    limits = [
        Record("memory limit", {"traffic": "1 read 1 write"}, {"bandwidth": Quantity(4e10, "B/s"), "tensor": TENSOR}),
        Record("product limit", {"dtype": "float32", "size": 64}, {"rate": Quantity(2e11, "FLOP/s")}),
    ]
    environment = replace(ON_CPU.environment, gpu=gpu)
    results = replace(ON_CPU, environment=environment, records=(*limits, *records))
    return {line.target.what: line for line in targets.reached(results)}


def test_the_ceiling_of_emulated_16_bit_products_is_that_of_float32() -> None:
    records = [
        replace(record, labels={**record.labels, "dtype": "bfloat16"})
        for record in (attended(OURS, 1.4), attended("flash", 1.0))
    ]
    limits = [
        Record("product limit", {"dtype": dtype, "size": 64}, {"rate": Quantity(rate, "FLOP/s")})
        for dtype, rate in (("float32", 2e11), ("bfloat16", 1e9))
    ]
    results = replace(ON_CPU, records=(*limits, *records))
    text = render(results, report)
    assert "| forward | bfloat16 |" in text
    assert "| 70 % to 70 % |" in text
    assert "For bfloat16 it is float32's, because PyTorch's products in 16 bits are slower here" in text
    limits[1] = replace(limits[1], values={"rate": Quantity(4e11, "FLOP/s")})
    text = render(replace(results, records=(*limits, *records)), report)
    assert "| 35 % to 35 % |" in text
    assert "it is float32's" not in text


def test_bias_gelu_is_judged_beyond_the_cache_and_says_what_an_element_takes() -> None:
    line = must_and_aim(beyond(OURS, 2e10))["bias_gelu, bfloat16"]
    assert (line.target.must, line.target.aim, line.shown, line.missed) == (0.80, 0.95, "50 %", True)
    assert line.why == "an element takes 0.200 ns, a copy of its bytes 0.100 ns."
    assert must_and_aim(beyond(OURS, 3.2e10))["bias_gelu, bfloat16"].verdict == "yes"
    assert must_and_aim(beyond(OURS, 3.9e10))["bias_gelu, bfloat16"].verdict == "yes, and the aim"


def test_bias_gelu_by_avx2_alone_has_targets_of_its_own() -> None:
    environment = replace(ON_CPU.environment, instructions="avx2")
    results = replace(with_records(beyond(OURS, 2.6e10)), environment=environment)
    line = {line.target.what: line for line in targets.reached(results)}["bias_gelu, bfloat16"]
    assert (line.target.must, line.target.aim, line.verdict) == (0.60, 0.80, "yes")


def test_what_was_left_out_has_a_row_that_says_so() -> None:
    lines = must_and_aim()
    dtypes = ("float32", "bfloat16")
    for what in (f"{op}, {dtype}" for op in ("bias_gelu", "bias_gelu backward") for dtype in dtypes):
        assert (lines[what].verdict, lines[what].missed) == ("not measured", False)
    for what in (f"attention, {direction}, {dtype}" for direction in ("forward", "backward") for dtype in dtypes):
        assert lines[what].verdict == "not measured"


def test_what_targets_judge_comes_before_what_is_shown_alone(tmp_path: Path) -> None:
    names = [step.what for step in lens._measurements(run_of(tmp_path))]
    beyond = max(names.index(f"bias_gelu beyond the last-level cache in {dtype}") for dtype in ("float32", "bfloat16"))
    over_sizes = [index for index, name in enumerate(names) if " over sizes in " in name]
    training_steps = names.index("the operators in a training step")
    assert beyond < min(over_sizes)
    assert max(over_sizes) < training_steps < names.index("the loss of a language model in float32")


def test_attention_is_judged_at_its_worst_length_and_by_its_error() -> None:
    records = [attended(OURS, 1.4), attended("flash", 1.0), attended(OURS, 0.9, length=2048)]
    records.append(attended("flash", 1.0, length=2048))
    line = must_and_aim(*records)["attention, forward, float32"]
    assert (line.target.must, line.target.aim, line.missed) == (1.0, 1.3, True)
    assert line.shown == "0.900× (flash's speed, 2,048 tokens, head size 64)"
    assert line.why == "it runs at 90.0 GFLOP/s, flash at 100 GFLOP/s; float32 product alone: 200 GFLOP/s."
    line = must_and_aim(attended(OURS, 1.4, error=2e-6), attended("flash", 1.0))["attention, forward, float32"]
    assert line.shown == "1.40× (flash's speed, 512 tokens, head size 64)"
    assert line.verdict == "**no**, the error is larger"
    assert line.why == "its error is 2.0e-06, that of flash 1.0e-06."


def test_attention_by_avx2_has_targets_of_its_own() -> None:
    by_avx2 = [
        replace(record, name=avx2.RECORD, labels={**record.labels, "onednn": onednn})
        for onednn, ours in ((avx2.UNLIMITED, 0.7), (avx2.LIMITED, 2.0))
        for record in (attended(OURS, ours), attended("flash", 1.0))
    ]
    lines = must_and_aim(attended(OURS, 1.4), attended("flash", 1.0), *by_avx2)
    assert lines["attention, forward, float32"].verdict == "yes, and the aim"
    line = lines["attention, forward, float32, AVX2 only"]
    assert (line.target.must, line.target.aim, line.missed) == (0.8, 1.0, True)
    assert line.why == "it runs at 70.0 GFLOP/s, flash at 100 GFLOP/s."
    assert lines["attention, forward, float32, AVX2 only, oneDNN too"].verdict == "yes, and the aim"


SHORT = partial(attention.speeds, "cpu", [32], [16], [torch.float32], tokens=64, width=32, seconds=0.001)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="a CPU without AVX2")
@pytest.mark.parametrize("onednn_too", [pytest.param(False, marks=pytest.mark.slow), True])
def test_attention_is_measured_with_both_limited_to_avx2(onednn_too: bool) -> None:
    found = list(avx2.limited(SHORT, "attention", onednn_too=onednn_too))
    assert {record.name for record in found} == {avx2.RECORD}
    assert {record.labels["onednn"] for record in found} == {avx2.LIMITED if onednn_too else avx2.UNLIMITED}
    assert sum(record.labels["form"] == OURS for record in found) == 4  # two masks, two directions


def test_a_process_that_is_not_limited_to_avx2_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    with pytest.raises(RuntimeError, match="expected torch limited to AVX2 by ATEN_CPU_CAPABILITY, got AVX512"):
        avx2.measured(SHORT)


def test_a_gpu_is_not_judged_by_the_targets_of_a_cpu() -> None:
    assert must_and_aim(beyond(OURS, 2e10), gpu=ON_GPU.environment.gpu) == {}


def test_tables_without_records_are_absent() -> None:
    text = render(with_records(), report)
    for title in ("beyond the last-level cache, with results", "Calls on one element", "### Memory of attention"):
        assert title not in text
    assert "| attention, forward, float32 | 1.00× | 1.30× |" in text


def test_the_new_records_have_their_tables() -> None:
    memory = [
        Record(
            "attention resident memory",
            {"form": OURS, "length": length},
            {
                name: Quantity(length * size, "B")
                for name, size in (("operand", 1024), ("forward", 1024), ("peak", 8192))
            },
        )
        for length in (1024, 8192)
    ]
    calls = [
        Record(
            "one element", {"op": "bias_gelu", "form": form}, {"time": Quantity(t, "s"), "speedup": Quantity(2, "×")}
        )
        for form, t in ((OURS, 1e-6), ("torch", 2e-6))
    ]
    text = render(with_records(beyond(OURS, 2e10), beyond("torch", 1e9), *memory, *calls), report)
    assert "| bias_gelu | bfloat16 | 67,108,864 | 13.4 ms | 20.0 GB/s | 50 % | 268 ms | 5.00× |" in text
    assert "| custom_ops | 8,192 | 8.00 MiB | 8.00 MiB | 64.0 MiB | 8.00× |" in text
    assert "| bias_gelu | 1.00 µs | 2.00 µs | 2.00× |" in text
    assert "- bias_gelu, bfloat16: an element takes" in text


def test_the_memory_of_attention_grows_with_both_passes() -> None:
    """A process of its own computes both passes."""
    records = [next(resident_memory.peak(form, 2048, head_size=64, width=256)) for form in resident_memory.FORMS]
    assert [record.labels["form"] for record in records] == list(resident_memory.FORMS)
    for record in records:
        assert record["operand"].value == 2 << 20
        # Results may lie in memory that the process has touched before, so not all four of them are growth.
        assert 0 <= record["forward"].value <= record["peak"].value
        assert record["peak"].value >= 2 * (2 << 20)


def test_calls_on_one_element_are_timed_beside_torchs() -> None:
    records = list(measure.one_element("cpu", seconds=0.001))
    assert [(r.labels["op"], r.labels["form"]) for r in records][:2] == [("vector_add", OURS), ("vector_add", "torch")]
    assert all(record["speedup"].value > 0 for record in records if record.labels["form"] == OURS)
