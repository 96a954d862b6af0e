"""The smallest run of the main job, and the sentences of the report, which follow the data."""

import gzip
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from benchkit import numbers
from benchkit.environment import capture
from benchkit.processes import budget
from benchkit.report import figures as figures_of
from benchkit.report import render
from benchkit.report.plotting import save
from benchkit.report.rendering import block_text
from benchkit.results import Quantity, Record, Results, load
from benchkit.run import measure_and_write
from dispatcher_trace import lens as lens_module
from dispatcher_trace.capture import native_step
from dispatcher_trace.capture.shims import Shims
from dispatcher_trace.lens import build_lens
from dispatcher_trace.measure import traces
from dispatcher_trace.measure.cases import EXPRESSIONS, FOUR_MODES, PAGE, PERFETTO
from dispatcher_trace.report import finding, sections
from dispatcher_trace.report.figures import figures


def _trace(
    keys: list[str], *, predicted: dict[int, str] | None = None, bit_equal: bool = True, **labels: str
) -> Record:
    predicted = predicted or {}
    wrong = [
        {"number": number, "operator": "aten::mm", "key": keys[number - 1], "predicted": key}
        for number, key in predicted.items()
    ]
    hops = len(keys)
    counts = {"hops": hops, "positions": hops, "agreed": hops - len(wrong), "calls": 1, "profiled": 1, "tied": 1}
    data = {
        "bit_equal": bit_equal,
        "same_operators": True,
        "only_untraced": {},
        "only_traced": {},
        "lines": ["x"],
        "main_path": [["aten::mm", key] for key in keys],
        "hops": [],
        "keys": keys,
        "autocast": {"included": False, "removed": labels.get("mode") == "plain"},
        "disagreements": wrong,
        "threads": {"main": hops},
        "kernels": [],
        "findings": [],
        "notes": [],
    }
    values = {name: Quantity(count, "") for name, count in counts.items()}
    return Record("trace", {"expression": "a @ b", "dtype": "f32", "mode": "autocast", **labels}, values, data)


def _agreement(mode: str, calls: int, wrong: int, *, functorch: bool) -> Record:
    item = {"operator": "aten::detach_", "visited": ["AutogradCPU"], "predicted": ["AutogradCPU", "CPU"]}
    values = {"entries": Quantity(3, ""), "calls": Quantity(calls, ""), "agreed": Quantity(calls - wrong, "")}
    data = {"disagreements": [{**item, "cause": "by hand", "calls": wrong}] if wrong else [], "errors": []}
    return Record("agreement", {"mode": mode, "functorch": functorch}, values, data)


def _results(*records: Record) -> Results:
    environment = capture("cpu", root=Path(__file__).parent)
    return Results("dispatcher-trace", environment, {"size": 4, "seconds": 0.1}, records, (), True)


def test_the_order_of_autocast_and_autograd_is_read_from_the_trace() -> None:
    usual = _results(_trace(["AutocastCPU", "AutogradCPU", "CPU"]))
    ((_, *order),) = finding.autocast_order(usual)
    assert order == ["AutocastCPU", "AutogradCPU"]
    turned = _results(_trace(["AutogradCPU", "AutocastCPU", "CPU"]))
    assert finding.autocast_order(turned)[0][1:] == ("AutogradCPU", "AutocastCPU")
    neither = _results(_trace(["CPU"]))
    assert finding.autocast_order(neither) == []


def test_disagreements_and_unequal_results_are_reported() -> None:
    results = _results(_trace(["AutocastCPU"], predicted={1: "AutogradCPU"}, bit_equal=False))
    assert "0 of 1 traced results are bit-equal" in finding.use(results)
    assert "hop 1, `aten::mm` at AutocastCPU; predicted AutogradCPU" in sections.disagreements(results)[0]
    assert "| no |" in block_text(sections.traces_table(results.select("trace")))


@pytest.mark.parametrize(
    ("positions", "cell"),
    [
        (2, "| 2 of 2 |"),
        (3, "| 2 of 3: 1 predicted hop did not happen |"),
        (1002, "| 2 of 1,002: 1,000 predicted hops did not happen |"),
    ],
)
def test_predicted_hops_that_did_not_happen_are_counted(positions: int, cell: str) -> None:
    trace = _trace(["AutogradCPU", "CPU"])
    trace.values["positions"] = Quantity(positions, "")
    assert cell in block_text(sections.traces_table([trace]))


def test_agreement_is_summed_inside_and_outside_functorch() -> None:
    records = (
        _agreement("plain", 100, 1, functorch=False),
        _agreement("autocast", 300, 1, functorch=False),
        _agreement("vmap", 100, 5, functorch=True),
    )
    results = _results(_trace(["CPU"]), *records)
    assert finding.headline(results) == (
        "The prediction is right for 99.50 % of calls outside functorch, at worst 95.00 % (`vmap`)."
    )
    assert finding.worst(results).endswith("Of all calls inside functorch: 95.00 %.")
    assert "| autocast | 300 | 1 | 99.67 % |" in block_text(sections.agreement_table(results))
    (line,) = sections.causes(results)
    assert line == "`aten::detach_`, 7 calls: visited AutogradCPU, predicted AutogradCPU → CPU; by hand"


def test_the_sentence_on_autocast_follows_the_traces() -> None:
    plain, cast = _trace(["CPU"], mode="plain"), _trace(["AutocastCPU"])
    assert "autocast stops that" in sections.autocast_claim(_results(plain, cast))
    cast.data["autocast"]["included"] = True
    assert sections.autocast_claim(_results(plain, cast)) == "Under autocast the thread includes the Autocast key."
    assert sections.autocast_claim(_results(plain)) == ""


def test_operators_of_only_one_run_are_named() -> None:
    trace = _trace(["CPU"])
    trace.data["only_untraced"] = {"aten::promote_types": 2}
    differences = sections.operator_differences(_results(trace))
    assert differences == ["`a @ b` f32 autocast: `promote_types` × 2 (untraced)"]


def test_kernels_appear_where_there_are_any() -> None:
    trace = _trace(["CUDA"])
    assert not sections.kernel_table(_results(trace))
    kernel = {"operator": "aten::mm", "node": "", "name": "nvjet_" + "k" * 200, "grid": [2, 1, 1], "block": [128, 1, 1]}
    kernel |= {"registers": 168, "shared_memory": 98304, "library": "cuBLAS", "seconds": 2e-6}
    trace.data["kernels"].append(kernel)
    table = block_text(sections.kernel_table(_results(trace)))
    assert "2×1×1" in table
    assert "| 168 | 96.0 KiB | 2.00 µs |" in table
    assert "(cuBLAS)" in table
    assert "k" * 110 not in table


def _golden(device: str) -> Results:
    return load(Path(__file__).parent / "golden" / "reports" / device / "results.json")


def test_advice_counts_what_was_equal_and_what_recording_costs() -> None:
    results = _golden("cpu")
    counted = finding.totals(results)
    assert f"{counted['bit_equal']} of {counted['traces']} traced results are bit-equal" in finding.use(results)
    (record,) = results.select("overhead")
    slower = record["on"].value / record["untraced"].value
    assert f"{numbers.with_unit(slower, '×')} as slow" in finding.avoid(results)
    lowest = min(finding.agreed_share(record) for record in results.select("agreement"))
    assert numbers.percent(lowest, 2) in finding.worst(results)


def test_a_key_set_is_shown_without_where_its_keys_come_from() -> None:
    line = "keys {AutogradCPU, CPU} = self {AutogradCPU, CPU} ∪ thread {BackendSelect}; as predicted; made AddBackward0"
    assert sections._key_set(line) == "{AutogradCPU, CPU}; made AddBackward0"
    assert (
        sections._key_set("keys {CPU} from the redispatch; predicted XLA") == "{CPU} from the redispatch; predicted XLA"
    )


def test_another_path_in_bf16_is_named() -> None:
    f32, bf16 = _trace(["AutogradCPU", "CPU"]), _trace(["AutogradCPU", "CPU"], dtype="bf16")
    assert sections.same_in_bf16(_results(f32, bf16)) == "In bf16 the paths of the first 1 rows are the same."
    other = _trace(["CPU"], dtype="bf16")
    expected = "In bf16 the path is another: for `a @ b` under autocast it is `mm` CPU."
    assert sections.same_in_bf16(_results(f32, other)) == expected
    assert sections.same_in_bf16(_results(f32)) == ""
    first = _trace(["AutogradCPU", "CPU"], mode="plain")  # as in a run that ended before the others in bf16
    assert sections.same_in_bf16(_results(first, f32, bf16)) == "In bf16 these paths are the same: `a @ b` autocast."


def test_traces_stand_either_on_the_first_screen_or_in_the_fold() -> None:
    results = _results(_trace(["CPU"]), _trace(["CPU"], dtype="bf16"), _trace(["CPU"], expression="F.linear(a, b)"))
    first_screen, _, folded = render(results, sections.report).partition("The other traces")
    assert first_screen.count("| yes |") == 1
    assert folded.count("| yes |") == 2


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_no_time_of_a_traced_run_is_drawn(device: str) -> None:
    """Most of such a time is the tracer's own, 75 µs a hop."""
    results = _golden(device)
    for figure in figures(results):
        (axes,) = figure.draw().axes
        assert "time" not in axes.get_xlabel()
        assert "highest priority" in axes.get_xlabel() + axes.get_ylabel()


def test_each_mark_of_a_path_shows_its_operator_and_key(tmp_path: Path) -> None:
    results = _golden("cpu")
    paths = next(figure for figure in figures(results) if figure.name == "paths")
    save(paths.draw(), tmp_path / "paths.svg")
    text = (tmp_path / "paths.svg").read_text()
    assert "<title>a @ b, autocast, 1: matmul at AutocastCPU</title>" in text
    traces = [trace for trace in results.select("trace", dtype="f32") if trace.labels["expression"] in FOUR_MODES]
    assert text.count("<title>") == sum(len(trace.data["main_path"]) for trace in traces)


@pytest.mark.slow
def test_without_time_the_first_traces_are_there_and_one_line_names_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what this test counts takes time, on any machine: a second for an untraced run, an hour for the shims."""
    now, run_untraced, installed = 0.0, traces.run_untraced, lens_module.installed

    def untraced(make: Callable[[], traces.Evaluate]) -> traces.Untraced:
        nonlocal now
        now += 1.0
        return run_untraced(make)

    def installed_slowly(where: Literal["all"]) -> AbstractContextManager[Shims]:
        nonlocal now
        now += 3600.0
        return installed(where)

    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(traces, "run_untraced", untraced)
    monkeypatch.setattr(lens_module, "installed", installed_slowly)
    lens = build_lens(Path(__file__).resolve().parents[1])
    with budget.within(6.0):  # half of it for what the traces are compared with
        measure_and_write(lens, device="cpu", quick=True, out=tmp_path)
    results = load(tmp_path / "results.json")
    assert results.select("trace", expression="a + b", dtype="f32", mode="plain")
    assert len(results.select("trace")) == 3
    (absence,) = (absence for absence in results.absences if "--budget" in absence.why)
    left_out = absence.what.lower().split("; ")
    assert {"the catalogue", "what a hop costs", "whether the tables are restored"} <= set(left_out)
    assert len(left_out) == len(set(left_out))
    assert not results.select("restored")


@pytest.mark.slow
def test_the_main_job(tmp_path: Path) -> None:
    lens = build_lens(Path(__file__).resolve().parents[1])
    path = measure_and_write(lens, device="cpu", quick=True, out=tmp_path)
    results = load(tmp_path / "results.json")
    assert render(results, lens.report) == path.read_text(encoding="utf-8")
    traces = results.select("trace")
    modes = {trace.labels["mode"] for trace in traces}
    assert modes >= {"plain", "requires_grad", "autocast", "inference_mode", "vmap"}
    assert {trace.labels["expression"] for trace in traces} == {*EXPRESSIONS, "scaled_relu(x, 2.0)"}
    counted = finding.totals(results)
    assert counted["bit_equal"] == counted["traces"] == len(traces) + 2
    assert counted["same_operators"] == counted["traces"]
    assert results.one("program", step="GPT step").data["only_untraced"] == {}
    assert results.one("restored").data == {"equal": True, "equal_after_exception": True}
    assert len(results.select("agreement")) == 9
    assert results.one("overhead")["hops"].value == 2
    drawn = {figure.name for figure in figures_of(results, lens.report)}
    assert drawn == {"paths", "trace_autocast_f32", "trace_requires_grad_bf16"}
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert "every hop" in page
    events = json.loads(gzip.decompress((tmp_path / PERFETTO).read_bytes()))["traceEvents"]
    assert sum(event.get("cat") == "hop" for event in events) == results.one("program", step="GPT step")["hops"].value
    steps = {record.labels["operator"]: record for record in results.select("native_step")}
    if not native_step.unavailable():
        assert {"aten::add.Tensor", "aten::mm", "aten::_softmax"} <= set(steps)
