"""Break-even and verdict against figures worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from benchkit import Quantity
from benchkit.timing import Comparison, Timing
from compile_bench.capture.trace import CompileTrace
from compile_bench.measure.records import Accuracy, Bench, ErrorPair, FirstSteps, Steady
from compile_bench.measure.verdict import break_even, difference, judge, plan
from compile_bench.targets.case import Case

EAGER = FirstSteps((0.2, 0.1, 0.1))
COMPILED = FirstSteps((9.0, 0.1, 0.1), import_seconds=1.0, toolchain_seconds=0.2)


def steady(low, speedup, high, pressure=0.0, control=None):
    ratio = Quantity(speedup, "×", low, high, 20, "bootstrap 95%")
    return Steady(
        Quantity(0.1, "s", 0.09, 0.11, 20), Quantity(0.1 / speedup, "s", 0.09, 0.11, 20), ratio, "x", pressure, control
    )


def bench(sampled, accuracy=None, device="cpu"):
    pair = ErrorPair("output", 1e-7, 1e-7, 4e-7)
    measured = {"cold": COMPILED, "steady": sampled, "accuracy": accuracy or Accuracy(pair, None, 1)}
    return Bench.of_case(Case("x", device), CompileTrace(), eager=EAGER, **measured)


def test_break_even_is_where_the_totals_meet():
    even = break_even(COMPILED, EAGER, steady(1.6, 2.0, 4.0))
    assert even.steps == pytest.approx(3 + 10.0 / 0.05)  # 10 s more up front, 50 ms gained a step
    assert even.low == pytest.approx(3 + 10.0 / 0.075)
    assert even.high == pytest.approx(3 + 10.0 / 0.0375)
    total_eager = EAGER.total + (even.steps - 3) * 0.1
    assert COMPILED.total + (even.steps - 3) * 0.05 == pytest.approx(total_eager)


def test_a_slower_step_never_breaks_even_however_cheap_the_first_ones():
    """With cache artifacts and noise the first steps may cost less than eager's."""
    even = break_even(EAGER, COMPILED, steady(0.8, 0.9, 1.25))
    assert even.steps is None
    assert even.low == 3


def test_no_gain_never_breaks_even():
    even = break_even(COMPILED, EAGER, steady(0.9, 1.0, 1.25))
    assert even.steps is None
    assert even.high is None
    assert even.low == pytest.approx(3 + 10.0 / 0.02)


@pytest.mark.parametrize(
    ("sampled", "advice"),
    [
        (steady(1.1, 1.2, 1.3), "compile"),
        (steady(0.7, 0.8, 0.9), "don't"),
        (steady(0.9, 1.1, 1.3), "inconclusive"),
        (steady(1.1, 1.2, 1.3, pressure=80.0), "inconclusive"),
        (steady(1.1, 1.2, 1.3, pressure=None), "compile"),
    ],
)
def test_the_advice_follows_the_interval_and_the_machine(sampled, advice):
    assert judge(bench(sampled)).advice == advice


@pytest.mark.parametrize(("low", "high"), [(1.1, 1.3), (0.7, 0.9)])
def test_the_range_of_a_few_rounds_is_no_verdict(low, high):
    speedup = Quantity((low + high) / 2, "×", low, high, 5, "range")
    few = replace(steady(low, speedup.value, high), speedup=speedup)
    verdict = judge(bench(few))
    assert verdict.advice == "inconclusive"
    assert verdict.why == "5 rounds are too few for a verdict"
    assert difference(speedup, None) == "none"
    # What compiling costs decides alone where no speed of later steps makes up for it.
    short, long = (plan(bench(few), steps, 0, "lost") for steps in (10, 100_000))
    assert (short.advice, long.advice) == ("don't", "inconclusive")


def test_cpu_pressure_does_not_judge_a_gpu():
    assert judge(bench(steady(1.1, 1.2, 1.3, pressure=80.0), device="cuda")).advice == "compile"


def test_wrong_results_are_not_worth_any_speed():
    wrong = Accuracy(ErrorPair("output", 1e-7, 1e-3, 4e-7), None, 1)
    verdict = judge(bench(steady(2.0, 3.0, 4.0), wrong))
    assert verdict.advice == "don't"
    assert "float64" in verdict.why


@pytest.mark.parametrize(
    ("low", "high", "seen"),
    [(1.06, 1.2, "faster"), (1.04, 1.2, "none"), (0.8, 0.94, "slower"), (0.8, 0.96, "none"), (0.99, 1.01, "none")],
)
@pytest.mark.parametrize("control", [(0.98, 1.05), (1 / 1.05, 1.02)])
def test_a_difference_is_larger_than_what_eager_shows_against_itself(low, high, seen, control):
    own = Quantity(1.0, "×", *control, 20, "bootstrap 95%")
    assert difference(Quantity((low + high) / 2, "×", low, high, 20, "bootstrap 95%"), own) == seen


def test_a_step_against_itself_is_no_difference_in_95_percent_of_runs():
    # Noise as machines have it: skewed, with drift that the rounds share and that dies away slowly.
    rng = np.random.default_rng(0)
    rounds, runs = 20, 200
    wrong = 0
    for _ in range(runs):
        drift = np.cumsum(rng.normal(0, 0.01, rounds))
        times = {name: np.exp(drift + rng.gamma(0.5, 0.05, rounds)) for name in ("eager", "compiled", "control")}
        timings = Comparison({name: Timing(tuple(values), 1, "x", 0.0) for name, values in times.items()})
        speedup, control = (timings.speedup(name, over="eager") for name in ("compiled", "control"))
        wrong += difference(speedup, control) != "none"
    assert wrong <= 0.05 * runs


def test_a_gain_is_only_for_runs_that_pay_its_price():
    # 10 s more up front, 50 ms gained a step: 203 steps; at the ends of the interval 48 and 53 ms.
    verdict = judge(bench(steady(1.9, 2.0, 2.1)))
    assert verdict.advice == "compile"
    assert verdict.text == "only for runs over 203 (194–214) steps"
    free = replace(bench(steady(1.9, 2.0, 2.1)), cold=EAGER)
    assert judge(free).text == "compile"


def test_a_gain_whose_results_were_not_compared_says_so_wherever_it_is_recommended():
    skipped = replace(full(steady(1.9, 2.0, 2.1)), accuracy=Accuracy(skipped="it draws random numbers"))
    assert judge(skipped).text == "only for runs over 203 (194–214) steps; results not compared"
    assert plan(skipped, 1_000, 0, "lost").text == "compile (results not compared), 1.66×"
    assert plan(skipped, 100, 0, "lost").text == "don't, 0.662×"
    assert plan(full(steady(1.9, 2.0, 2.1)), 1_000, 0, "lost").text == "compile, 1.66×"


def test_an_inconclusive_verdict_says_why():
    below = steady(0.93, 0.95, 0.98, control=Quantity(1.02, "×", 1.0, 1.05, 20, "bootstrap 95%"))
    assert judge(bench(below)).text == (
        "inconclusive: the interval reaches into 0.952–1.05×, which eager shows against itself"
    )
    assert judge(bench(steady(0.9, 1.1, 1.3))).text == "inconclusive: the interval of the speed-up contains 1"
    assert "some task waited for a core" in judge(bench(steady(1.1, 1.2, 1.3, pressure=80.0))).text


def full(sampled):
    warm = FirstSteps((1.0, 0.1, 0.1))
    return replace(bench(sampled), warm=warm, artifact=replace(warm, artifact_seconds=1.0))


def test_a_plan_adds_up_the_processes():
    # Steps of 0.1 s and 0.05 s; starts: eager 0.4 s, cold 10.4 s, warm 1.2 s, artifacts 2.2 s.
    found = plan(full(steady(1.9, 2.0, 2.1)), 1_000, 10, "kept")
    later = (1_000 - 33) * 0.1
    assert found.ratio == pytest.approx((11 * 0.4 + later) / (10.4 + 10 * 1.2 + later / 2))
    lost = plan(full(steady(1.9, 2.0, 2.1)), 1_000, 10, "lost")
    assert lost.ratio == pytest.approx((11 * 0.4 + later) / (11 * 10.4 + later / 2))
    assert (found.advice, lost.advice) == ("compile", "don't")
    assert plan(full(steady(1.9, 2.0, 2.1)), 100, 0, "artifact").ratio == pytest.approx(
        (0.4 + 97 * 0.1) / (2.2 + 97 * 0.05)
    )


def test_a_plan_is_there_only_for_what_was_measured():
    assert plan(bench(steady(1.9, 2.0, 2.1)), 1_000, 10, "kept") is None
    assert plan(bench(steady(1.9, 2.0, 2.1)), 1_000, 0, "artifact") is None
    assert plan(full(steady(1.9, 2.0, 2.1)), 1_000, 0, "kept") is None
    with pytest.raises(ValueError, match="11 processes take at least 33 steps, got 32"):
        plan(full(steady(1.9, 2.0, 2.1)), 32, 10, "lost")


def test_a_short_run_is_no_case_for_compiling_however_fast_the_step():
    assert plan(full(steady(1.9, 2.0, 2.1)), 100, 0, "lost").advice == "don't"
    assert plan(full(steady(0.9, 1.0, 1.1)), 100, 0, "lost").advice == "don't"
    assert plan(full(steady(0.9, 1.0, 1.1)), 1_000_000, 0, "lost").advice == "inconclusive"
