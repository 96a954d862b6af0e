"""Break-even and verdict against figures worked out by hand."""

import pytest

from benchkit import Quantity
from compile_bench.results import Accuracy, Bench, Case, ErrorPair, FirstSteps, Steady
from compile_bench.trace import CompileTrace
from compile_bench.verdict import break_even, judge

EAGER = FirstSteps((0.2, 0.1, 0.1))
COMPILED = FirstSteps((9.0, 0.1, 0.1), import_seconds=1.0, toolchain_seconds=0.2, trace=CompileTrace())


def steady(low, speedup, high, pressure=0.0):
    ratio = Quantity(speedup, "×", low, high, 20, "bootstrap 95%")
    return Steady(
        Quantity(0.1, "s", 0.09, 0.11, 20), Quantity(0.1 / speedup, "s", 0.09, 0.11, 20), ratio, "x", pressure
    )


def bench(sampled, accuracy=None, device="cpu"):
    pair = ErrorPair("output", 1e-7, 1e-7, 4e-7)
    return Bench(Case("x", device), EAGER, COMPILED, None, sampled, accuracy or Accuracy(pair, None, 1), None)


def test_break_even_is_where_the_totals_meet():
    even = break_even(COMPILED, EAGER, steady(1.6, 2.0, 4.0))
    assert even.steps == pytest.approx(3 + 10.0 / 0.05)  # 10 s more up front, 50 ms gained a step
    assert even.low == pytest.approx(3 + 10.0 / 0.075)
    assert even.high == pytest.approx(3 + 10.0 / 0.0375)
    total_eager = EAGER.total + (even.steps - 3) * 0.1
    assert COMPILED.total + (even.steps - 3) * 0.05 == pytest.approx(total_eager)


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


def test_cpu_pressure_does_not_judge_a_gpu():
    assert judge(bench(steady(1.1, 1.2, 1.3, pressure=80.0), device="cuda")).advice == "compile"


def test_wrong_results_are_not_worth_any_speed():
    wrong = Accuracy(ErrorPair("output", 1e-7, 1e-3, 4e-7), None, 1)
    verdict = judge(bench(steady(2.0, 3.0, 4.0), wrong))
    assert verdict.advice == "don't"
    assert "float64" in verdict.why
