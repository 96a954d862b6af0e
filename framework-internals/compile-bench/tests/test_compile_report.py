"""The report says what the records say, and nothing they do not."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchkit import Quantity
from benchkit.environment import capture
from benchkit.report import render
from benchkit.results import Results
from compile_bench.lens import build_lens, configure
from compile_bench.records import bench_records, eager_record, shorten, triage_record
from compile_bench.report import REPORT
from compile_bench.results import Accuracy, Bench, Case, ErrorPair, FirstSteps, Memory, Steady, Triage
from compile_bench.trace import Break, CompileTrace, Graph, Recompile

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
    recompiles=(Recompile("0/1", "forward", "/elsewhere/model.py", 10, "self.calls == 0", "Python value"),),
)


def bench(low=1.1, value=1.2, high=1.3, *, memory=None, mode="default"):
    step = Quantity(0.1, "s", 0.09, 0.11, 20, "p20-p80")
    sampled = Steady(
        step, Quantity(0.1 / value, "s", 0.08, 0.09, 20, "p20-p80"), _ratio(low, value, high), "wall-clock", 1
    )
    pair = ErrorPair("output", 1e-7, 2e-7, 4e-7)
    first = FirstSteps((9.0, 0.1, 0.1), 1.0, 0.5, TRACE)
    eager = FirstSteps((0.3, 0.1, 0.1))
    accuracy = Accuracy(pair, ErrorPair("head.weight", 1e-7, 2e-7, 4e-7), 9)
    return Bench(Case("gpt", mode=mode), eager, first, None, sampled, accuracy, memory)


def _ratio(low, value, high):
    return Quantity(value, "×", low, high, 20, "bootstrap 95%")


def records_of(*benches):
    first = benches[0]
    return [eager_record(first.case, first.eager), *(r for each in benches for r in bench_records(each, ROOT))]


def results(*records):
    return Results("compile-bench", capture("cpu", root=ROOT), {}, tuple(records), (), complete=True)


def test_the_verdict_and_its_figures_stand_first():
    text = render(results(*records_of(bench())), REPORT)
    first = text.splitlines()[2]
    # 10.7 s against 0.5 s, and 1/60 s gained a step: 3 + 10.2 · 60 = 615 steps.
    assert "costs 10.2 s up front" in first
    assert "1.20× (1.10–1.30) as fast" in first
    assert "compile from 615 (445–1,125) steps on" in first
    assert "/work" not in text
    assert "nan" not in text.lower()


def test_a_slower_compiled_step_is_never_recommended():
    text = render(results(*records_of(bench(0.7, 0.8, 0.9))), REPORT)
    assert "compile from" not in text
    assert "| don't |" in text
    assert "| never |" in text


def test_breaks_and_recompilations_are_listed_with_neutral_paths():
    record = triage_record(Triage(Case("planted"), TROUBLE, 3), ROOT)
    text = render(results(*records_of(bench()), record), REPORT)
    assert "| `a/model.py:12` | `if x > 0:` | branch | Data-dependent branching | 1 |" in text
    assert "| `model.py:10` | `forward` | Python value | `self.calls == 0` |" in text
    assert "1 graph, 1 break, 1 recompilation" in text


def test_memory_is_shown_where_it_was_measured():
    measured = bench(memory=Memory(3 * 2**30, 2 * 2**30))
    assert "| gpt training | 3.00 GiB | 2.00 GiB |" in render(results(*records_of(measured)), REPORT)


def test_modes_share_the_eager_run():
    records = records_of(bench(), bench(mode="reduce-overhead"))
    text = render(results(*records), REPORT)
    assert text.count("gpt training, eager") == 1
    assert "gpt training, reduce-overhead" in text
    for figure in REPORT.figures(results(*records)):
        figure.draw()


def test_an_empty_run_still_makes_a_report():
    assert "No case could be measured" in render(results(), REPORT)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
def test_a_configuration_is_plain_and_bounded(device, quick):
    configuration = configure(device, quick)
    assert configuration["cases"]
    assert configuration["limit_seconds"] > configuration["steady_seconds"]


def test_the_lens_is_wired_together():
    lens = build_lens(Path(__file__).parents[1])
    assert lens.name == "compile-bench"
    assert lens.report is REPORT


def test_names_outside_the_root_lose_their_folders():
    assert shorten("/elsewhere/x.py", ROOT) == "x.py"
    assert shorten(str(ROOT / "a/x.py"), ROOT) == "a/x.py"


def test_a_price_below_zero_is_no_price():
    slow_eager = replace(bench(), eager=FirstSteps((12.0, 0.1, 0.1)))
    text = render(results(*records_of(slow_eager)), REPORT)
    assert "**It costs:** no more with empty caches than eager for the first 3 steps" in text
