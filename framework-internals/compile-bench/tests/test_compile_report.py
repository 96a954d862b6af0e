"""The report says what the records say, and nothing they do not."""

import re
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import pytest

from benchkit import Quantity
from benchkit.environment import capture
from benchkit.report import figures, render
from benchkit.report.drawing import draw_chart
from benchkit.report.plotting import save
from benchkit.report.rendering import block_text
from benchkit.results import Results, load_report
from compile_bench.capture.frames import Frame
from compile_bench.capture.text import neutral, shorten
from compile_bench.capture.trace import Break, CompileTrace, Graph, Recompile
from compile_bench.measure.records import (
    Accuracy,
    Bench,
    Compilation,
    CountedBreaks,
    EagerStart,
    ErrorPair,
    FailedCell,
    FirstSteps,
    KernelTime,
    Memory,
    ShapeStudy,
    Steady,
    StepProfile,
    SweepCall,
    Triage,
    Untuned,
)
from compile_bench.measure.shapes import Passes
from compile_bench.report.queries import in_order, measured_cases
from compile_bench.report.regressions import attention_table
from compile_bench.report.sections import report
from compile_bench.targets.case import MODES, Case

ROOT = Path(__file__).parents[3]

TRACE = CompileTrace(
    graphs=(Graph("0/0", "forward", 57, 201, 2e-4),),
    phases={"Dynamo": 1.0, "Inductor": 2.0, "C++/Triton compiler": 5.0},
    kernels=17,
    handler_seconds=0.01,
)
TROUBLE = CompileTrace(
    graphs=TRACE.graphs,
    breaks=(
        Break(
            str(ROOT / "a/model.py"), 12, "forward", "if x > 0:", "Data-dependent branching", "", (), "branch", False
        ),
    ),
    recompiles=(Recompile("/elsewhere/model.py", 10, "self.calls == 0", compile_id="0/1", function="forward"),),
)


def bench(low=1.1, value=1.2, high=1.3, *, memory=None, mode="default"):
    step = Quantity(0.1, "s", 0.09, 0.11, 20, "p20-p80")
    sampled = Steady(
        step, Quantity(0.1 / value, "s", 0.08, 0.09, 20, "p20-p80"), _ratio(low, value, high), "wall-clock", 1
    )
    pair = ErrorPair("output", 1e-7, 2e-7, 4e-7)
    first = FirstSteps((9.0, 0.1, 0.1), 1.0, 0.5, phases=TRACE.phases)
    eager = FirstSteps((0.3, 0.1, 0.1))
    accuracy = Accuracy(pair, ErrorPair("head.weight", 1e-7, 2e-7, 4e-7), 9)
    measured = {"cold": first, "steady": sampled, "accuracy": accuracy, "memory": memory}
    return Bench.of_case(Case("gpt", mode=mode), TRACE, eager=eager, **measured)


def _ratio(low, value, high):
    return Quantity(value, "×", low, high, 20, "bootstrap 95%")


def records_of(*benches):
    """The records of benches; the first of a model has its eager start, too."""
    records = []
    for measured in benches:
        records += measured.records(ROOT, results(*records))
    return records


def results(*records):
    return Results("compile-bench", capture("cpu", root=ROOT), {}, tuple(records), (), complete=True)


def test_the_verdict_and_its_figures_stand_first():
    text = render(results(*records_of(bench())), report)
    first = text.partition("Measured on")[0]
    # 10.7 s against 0.5 s, and 1/60 s gained a step: 3 + 10.2 · 60 = 615 steps.
    assert "1.20× (1.10–1.30) as fast, and 10.2 s of compiling are paid after 615 (445–1,125) steps" in first
    assert "| 1.20× (1.10–1.30) | only for runs over 615 (445–1,125) steps |" in text
    assert "/work" not in text
    assert "nan" not in text.lower()


def test_a_slower_compiled_step_is_never_recommended():
    text = render(results(*records_of(bench(0.7, 0.8, 0.9))), report)
    assert "**Compiled steps run at 0.800× (gpt training) of eager's speed, and 1 case is slower.**" in text
    assert "as fast, and" not in text
    assert "only for runs over" not in text.replace("worth compiling *only for runs over* its", "")
    assert "| **don't**: the whole interval of the speed-up is below 1" in text
    assert "| **0.800× (0.700–0.900)** |" in text


def test_breaks_and_recompilations_are_listed_with_neutral_paths():
    record = CountedBreaks.of_triage(Triage(Case("planted"), TROUBLE, 3), ROOT).record()
    text = render(results(*records_of(bench()), record), report)
    assert "| `model.py:12` | `if x > 0:` | branch | Data-dependent branching | 1 |" in text
    assert "| `model.py:10` | `forward` | Python value | self.calls is no longer 0 |" in text
    assert "1 graph, 1 break, 1 recompilation" in text


def broken(mode, entry):
    """A case whose model broke by itself, at one place."""
    trace = CompileTrace(breaks=(entry,))
    return replace(bench(mode=mode), compilation=Compilation.of(trace))


def test_a_break_in_a_library_has_the_librarys_line_and_modes_share_a_table():
    frames = (Frame("a/model.py", 12, "forward", "return self.model(x)"), Frame("lib.py", 7, "wrapped", "x.item()"))
    inside = replace(TROUBLE.breaks[0], stack=frames)
    benches = [broken(mode, inside) for mode in ("max-autotune", "default")]
    failed = replace(inside, category="backend failed", explanation="Backend `x` failed with y. Adding a graph break.")
    text = render(results(*records_of(*benches, broken("reduce-overhead", failed))), report)
    assert text.count("breaks or is compiled again") == 2
    assert "**gpt training** (modes default, max-autotune) breaks or is compiled again" in text
    assert "| `model.py:12` | `lib.py:7` `x.item()` | branch | Data-dependent branching | 1 |" in text
    assert "**gpt training** (mode reduce-overhead) breaks or is compiled again" in text
    assert "| backend failed | Backend `x` failed with y | 1 |" in text


def profiled(measured, **more):
    eager, compiled = StepProfile(0.0, 91.0, None, None, 0.0), StepProfile(0.86, 32.0, None, None, 1e-4)
    return replace(measured, eager_profile=eager, compiled_profile=compiled, **more)


def test_what_a_step_does_is_shown():
    text = render(results(*records_of(profiled(bench(memory=Memory(3 * 2**30, 2 * 2**30))))), report)
    assert "| gpt training | 86.0 % | 91 → 32 | 100 µs | 3.00 GiB → 2.00 GiB |" in text


def test_a_slower_step_shows_the_gpus_time_and_its_costliest_kernels():
    eager = StepProfile(0.0, 9, 7, 7, 0.0, 0.08, (KernelTime("gemm", 4, 0.06), KernelTime("softmax", 2, 0.01)))
    compiled = StepProfile(0.9, 2, 5, 5, 0.0, 0.11, (KernelTime("triton_poi_fused_gelu", 4.5, 0.1),))
    slower = replace(bench(0.8, 0.85, 0.9), eager_profile=eager, compiled_profile=compiled)
    text = render(results(*records_of(slower)), report)
    assert (
        "| gpt training | 100 ms → 118 ms | 80.0 ms → 110 ms | `gemm` 4 × in 60.0 ms; `softmax` 2 × in 10.0 ms |"
        " `triton_poi_fused_gelu` 4.5 × in 100 ms |"
    ) in text
    for other in (bench(), profiled(bench(0.8, 0.85, 0.9))):  # a faster one; a CPU's
        assert "Slower when compiled" not in render(results(*records_of(other)), report)


def test_a_slower_step_has_its_cause_and_a_remedy_beside_its_number():
    def slower(before, after):
        eager, compiled = (StepProfile(0.9, 9, 7, 7, 0.0, *each) for each in (before, after))
        return replace(bench(0.8, 0.85, 0.9), eager_profile=eager, compiled_profile=compiled)

    def row(*benches):
        text = render(results(*records_of(*benches)), report)
        return next(line for line in text.splitlines() if line.startswith("| gpt training | preset"))

    graphs = profiled(bench(1.1, 1.17, 1.2, mode="reduce-overhead"))
    unfused = row(slower((0.08, (), 2.0), (0.11, (), 0.0)))
    assert "| **don't**: attention is no longer fused (2 → 0 fused kernels a step); often a mask that torch" in unfused
    assert "| **0.850× (0.800–0.900)** |" in unfused
    assert "the compiler's kernels are slower (GPU at work 80.0 ms → 110 ms)" in row(slower((0.08,), (0.11,)))
    host = slower((0.08,), (0.07,))
    assert row(host).count("the GPU waits for the host (at work for 70.0 ms of 118 ms); use CUDA graphs |") == 1
    assert "use CUDA graphs, mode reduce-overhead: 1.17× (1.10–1.20) of eager |" in row(host, graphs)


def test_the_table_of_models_has_what_a_verdict_rests_on():
    control = _ratio(0.98, 1.0, 1.05)
    measured = bench(0.93, 0.95, 0.98)
    measured = replace(measured, steady=replace(measured.steady, control=control))
    text = render(results(*records_of(measured)), report)
    assert (
        "| gpt training | preset `tiny`, 16 × 128 bytes "
        "| 0.950× (0.930–0.980) "
        "| inconclusive: the interval reaches into 0.952–1.05×, which eager shows against itself "
        "| 1.00× (0.980–1.05) | 10.2 s | yes, within bounds |"
    ) in text
    skipped = replace(bench(), accuracy=Accuracy(skipped="it draws random numbers"))
    text = render(results(*records_of(skipped)), report)
    assert "1.20× (1.10–1.30) as fast, results not compared, and" in text.partition("Measured on")[0]
    assert "| only for runs over 615 (445–1,125) steps; results not compared |" in text
    assert "| noᵇ |" in text
    assert "- gpt training: it draws random numbers" in text
    assert "| compile (results not compared), 1." in text


def test_what_is_left_out_of_a_comparison_is_said_once_a_case():
    noisy = replace(bench(), accuracy=replace(bench().accuracy, left_out=("noise",)))
    text = render(results(*records_of(noisy)), report)
    assert text.count("| yes; not compared, since random or not finite by itself: noise |") == 1
    assert text.count("| gpt training | gradient of `head.weight` ") == 1


GOLDEN = Path(__file__).parent / "golden" / "reports"


@pytest.fixture(scope="module")
def golden() -> dict[str, str]:
    return {device: render(load_report(GOLDEN / device), report) for device in ("cpu", "gpu")}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_no_table_puts_the_unpaired_speedups_of_two_modes_side_by_side(golden, device):
    lines = golden[device].splitlines()
    headers = [line.split(" | ") for line, rule in pairwise(lines) if rule.startswith("|---")]
    assert headers
    assert not [header for header in headers if len({cell.strip("| ") for cell in header} & set(MODES)) > 1]
    compared = [line for line in lines if line.startswith("| t5 inference, max-autotune | reduce-overhead |")]
    if device == "gpu":
        assert compared == ["| t5 inference, max-autotune | reduce-overhead | 0.964× (0.951–0.980) | +49.0 sᵃ |"]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_no_verdict_recommends_compiling_without_its_price(golden, device):
    assert "| compile |" not in golden[device]
    rows = re.findall(r"^\|.+\| noᵇ \|$", golden[device], re.MULTILINE)
    assert all("only for runs over" not in row or "; results not compared |" in row for row in rows)
    if device == "gpu":
        assert [row for row in rows if "only for runs over" in row]


def test_every_figure_says_which_way_is_better_and_shows_its_values(tmp_path):
    shapes = Passes("eager", 0.1, Quantity(0.1, "s", 0.1, 0.1, 9, "p20-p80"), 1)
    study = ShapeStudy.of_case(
        Case("gpt"), ("[8]", "[5]"), ("args[0] dimension 0",), (shapes, replace(shapes, first=0.2))
    )
    tuned = bench(mode="max-autotune")
    untuned = Untuned("default", tuned.steady.compiled, _ratio(1.1, 1.2, 1.3))
    tuned = [replace(tuned, target=name, steady=replace(tuned.steady, untuned=untuned)) for name in "abc"]
    records = [*records_of(bench(), *tuned), study.ranked((1, 1_000), ROOT)]
    charts = figures(results(*records), report)
    assert {chart.name for chart in charts if chart} >= {"speedup", "break_even", "first_step", "autotuning", "shapes"}
    for figure in charts:
        drawn = draw_chart(figure)
        labels = [label for axes in drawn.axes for label in (axes.get_xlabel(), axes.get_ylabel())]
        assert any("is better)" in label for label in labels), figure.name
        save(drawn, tmp_path / "figure.svg")
        assert "<title>" in (tmp_path / "figure.svg").read_text(), figure.name


def test_the_bands_of_the_break_even_figure_are_opaque_and_outlined():
    (figure,) = (chart for chart in figures(results(*records_of(bench())), report) if chart.name == "break_even")
    (band,) = draw_chart(figure).axes[0].collections[:1]
    assert band.get_facecolor()[0][3] == 1
    assert tuple(band.get_edgecolor()[0]) != tuple(band.get_facecolor()[0])


def test_attention_that_is_fused_no_more_is_named_with_its_modes():
    def attending(mode, eager, compiled):
        before, after = (StepProfile(0.5, 9, None, None, 0.0, fused_attention=count) for count in (eager, compiled))
        return records_of(replace(bench(mode=mode), eager_profile=before, compiled_profile=after))

    lost = [attending("default", 8, 2), attending("reduce-overhead", 8, 0), attending("max-autotune", 8, 6)]
    together = results(*{record.labels.get("mode"): record for record in chain(*lost)}.values())
    table = block_text(attention_table(together, measured_cases(together)))
    assert "| gpt training | default, reduce-overhead | 8 → 2 |" in table
    assert "| gpt training | default | 8 → 2 |" in render(results(*lost[0]), report)
    assert "takes apart" not in render(results(*attending("default", 0, 0)), report)


def test_a_lost_cuda_graph_has_its_reason():
    lost = profiled(bench(mode="reduce-overhead"), no_cudagraphs=("mutated inputs (1 instances)",))
    assert "- gpt training, reduce-overhead: mutated inputs (1 instances)" in render(results(*records_of(lost)), report)


def test_starts_with_artifacts_and_restarts_are_in_the_plan():
    first = FirstSteps((1.0, 0.1, 0.1), 1.0, 0.5, 0.2, TRACE.phases)
    measured = replace(bench(), warm=first, artifact=first, artifact_bytes=3 * 2**20)
    text = render(results(*records_of(measured)), report)
    assert "| 10 | cache artifacts |" in text
    assert "gpt training, cache artifacts" in text
    assert "or 147 with cache artifacts." in text.partition("Measured on")[0]
    assert "| gpt training | 615 (445–1,125) steps | 147 (107–267) steps | 147 (107–267) steps |" in text


def test_modes_and_models_are_a_table_and_autotuning_has_its_cost():
    modes = ("default", "max-autotune")
    benches = [
        replace(bench(0.8, 0.9, 0.95) if name == "b" else bench(1.9, 2.0, 2.1), target=name, mode=mode)
        for name in ("a", "b", "c")
        for mode in modes
    ]
    ratios = (_ratio(0.99, 1.0, 1.01), _ratio(1.2, 1.25, 1.3), _ratio(0.8, 0.9, 0.95))
    benches[1::2] = [
        replace(
            each,
            cold=replace(each.cold, steps=(19.0, 0.1, 0.1)),
            steady=replace(each.steady, untuned=Untuned("default", Quantity(0.05, "s", 0.05, 0.05), ratio)),
        )
        for each, ratio in zip(benches[1::2], ratios, strict=True)
    ]
    records = records_of(*(replace(measured, processes=4) for measured in benches))
    text = render(results(*records), report)
    assert (
        "Of 6 cells (a model, training or inference, a mode), 4 are faster than eager, 0 inconclusive and 2 not" in text
    )
    assert "run at 0.900× (b training) to 2.00× (" in text
    assert "and 1 case is slower.**" in text
    assert "Up to 4 processes compiled side by side" in text
    assert "| **0.900× (0.800–0.950)** | **don't**: " in text
    assert "results compared: yes, within bounds" in text
    assert "a step was faster in 1 of 3 cases, slower in 1 and not distinguishable in 1. The best is b" in text
    assert "| a training, max-autotune | 1.00× (0.990–1.01) | never |" in text
    # 50 ms that become 40 ms: ten seconds are a thousand steps.
    assert "| b training, max-autotune | 1.25× (1.20–1.30) | 1,000 steps |" in text
    assert "| c training, max-autotune | 0.900× (0.800–0.950) | never |" in text


def test_blocks_stand_beside_the_whole_model():
    blocks = replace(bench(), scope="blocks", cold=FirstSteps((3.0, 0.1, 0.1), 1.0, 0.5))
    text = render(results(*records_of(bench(), blocks)), report)
    assert "| gpt training | whole | 10.7 s |" in text
    assert "| gpt training | blocks | 4.70 s |" in text


def test_shapes_have_a_recommendation_for_each_number_of_passes():
    def passes(strategy, first, later):
        return Passes(strategy, first, Quantity(later, "s", later, later, 9, "p20-p80"), 1, TROUBLE.recompiles)

    found = (passes("eager", 0.1, 0.1), passes("automatic", 5.0, 0.05), Passes("padding", failed="ValueError: no"))
    study = ShapeStudy.of_case(Case("gpt"), ("[8]", "[5]"), ("args[0] dimension 0",), found)
    record = study.ranked((1, 1_000), ROOT)
    full = results(*records_of(bench()), record)
    text = render(full, report)
    assert "Cheapest for 1 pass: eager (no compiling), 100 ms." in text
    assert "Cheapest for 1,000 passes: automatic (torch.compile as it is" in text
    assert "| padding | fails: ValueError: no |" in text
    assert "| automatic | `model.py:10` | Python value | self.calls is no longer 0 |" in text


def test_modes_share_the_eager_run():
    records = records_of(bench(), bench(mode="reduce-overhead"))
    text = render(results(*records), report)
    assert text.count("gpt training, eager") == 1
    assert "gpt training, reduce-overhead" in text


def test_an_empty_run_still_makes_a_report():
    assert "No case could be measured" in render(results(), report)


def test_paths_inside_texts_and_call_stacks_lose_their_folders_too():
    entry = {"reason": f"WON'T CONVERT f {ROOT}/a/x.py line 3", "stack": ({"file": "/elsewhere/y.py", "line": 1},)}
    assert neutral(entry, ROOT) == {
        "reason": "WON'T CONVERT f a/x.py line 3",
        "stack": [{"file": "y.py", "line": 1}],
    }
    assert neutral("a / b.py, half/way.py", ROOT) == "a / b.py, half/way.py"


def test_a_library_is_named_with_its_package_wherever_pip_put_it(tmp_path):
    (tmp_path / "target" / "gpytorch-1.15.dist-info").mkdir(parents=True)
    for folder in ("/usr/lib/python3/dist-packages", str(ROOT / ".venv/lib/site-packages"), f"{tmp_path}/target"):
        assert shorten(f"{folder}/gpytorch/kernels/kernel.py", ROOT) == "gpytorch/kernels/kernel.py"
    assert shorten("/usr/lib/python3.11/json/decoder.py", ROOT) == "python3.11/json/decoder.py"
    assert shorten("/elsewhere/x.py", ROOT) == "x.py"
    assert shorten(str(ROOT / "a/x.py"), ROOT) == "a/x.py"
    assert shorten(f"{tmp_path}/target/own/model.py", tmp_path / "target/own") == "model.py"


def test_cases_stand_in_the_order_of_their_models_and_modes_whenever_a_sweep_came_to_them():
    def cell(target, kind, mode):
        return FailedCell(target, kind, mode, "it raised", 1.0, 1)

    wanted = [
        cell("b", "inference", "default"),
        cell("b", "inference", "max-autotune"),
        cell("b", "training", "reduce-overhead"),
        cell("b", "training", "default, blocks"),
        cell("a", "inference", "default"),
    ]
    call = SweepCall(1, "2026-11-23", "run.py", None, None)
    swept = replace(
        results(*(each.record() for each in reversed(wanted)), call.record()),
        configuration={"sweep": {"groups": [["b"], ["a"]]}},
    )
    assert in_order(swept, FailedCell.select(swept)) == wanted


def test_records_are_read_as_they_were_written():
    first = FirstSteps((1.0, 0.1, 0.1), 1.0, 0.5, 0.2, {"Dynamo": 0.1}, {"fx_graph_cache_hit": 2})
    step = Quantity(0.05, "s", 0.04, 0.06, 9, "p20-p80")
    untuned = Untuned("default", step, _ratio(1.1, 1.2, 1.3))
    measured = profiled(bench(memory=Memory(3, 2, 1), mode="max-autotune"), warm=first, artifact=first, tuned=True)
    measured = replace(measured, steady=replace(measured.steady, untuned=untuned), no_cudagraphs=("no",))
    kernels = (KernelTime("gemm", 4.0, 0.06),)
    measured = replace(measured, compiled_profile=replace(measured.compiled_profile, costliest=kernels))
    full = results(*records_of(measured))
    (case,) = measured_cases(full)
    assert case.steady == measured.steady
    assert case.accuracy == measured.accuracy
    assert case.memory == measured.memory
    assert case.compiled_profile == measured.compiled_profile
    assert (case.eager, case.cold) == (measured.eager, measured.cold)
    assert case.warm == case.artifact == first
    assert Bench.one(full).record() == full.records[1]
    assert EagerStart.one(full).start == measured.eager
