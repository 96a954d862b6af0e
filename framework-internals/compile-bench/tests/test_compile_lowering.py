"""The choice between formula and kernel: planted kernels are taken and refused, one winner is added to the next."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lowering
from benchkit import Comparison, Timing, UserError
from benchkit.environment import capture
from benchkit.processes import budget
from compile_bench.cli import app
from compile_bench.cli.tuning import _keep, describe_study
from compile_bench.measure.lowerings import greedy, step
from compile_bench.measure.lowerings.greedy import choose_lowerings
from compile_bench.measure.lowerings.step import LoweredStep, Operators
from compile_bench.targets.case import Case
from compile_bench.targets.target import Target
from lowering import choice
from lowering.rows import TUNED_ORIGIN, rows_here

PLANTED = Path(__file__).parent / "planted" / "lowerings.py"
MAKE = Case(f"{PLANTED}:make")


class InThisProcess:
    """A variant that keeps its choice for itself, as a process of its own does."""

    def __init__(self, case: Case, choices: Mapping[str, lowering.Choice]) -> None:
        before = choice._chosen
        self._step = LoweredStep(case, choices)
        self._chosen, choice._chosen = choice._chosen, before

    def call(self, method: str, **arguments: Any) -> Any:
        before, choice._chosen = choice._chosen, self._chosen
        try:
            return getattr(self._step, method)(**arguments)
        finally:
            choice._chosen = before

    def close(self) -> None:
        self._step._chosen.close()


@pytest.fixture
def quick(monkeypatch):
    """Without a code generator and with short samples. No guard sees an adapter, so every variant traces anew."""
    monkeypatch.setattr(greedy, "_SAMPLE_SECONDS", 0.01)

    def compiled(model: torch.nn.Module, case: Case, **_: object) -> torch.nn.Module:
        # A back end of its own: torch.compile runs no program that another back end compiled.
        return torch.compile(model, backend=lambda graph, inputs: graph.forward, dynamic=False)

    monkeypatch.setattr(step, "compile_case", compiled)
    torch.compiler.reset()


@pytest.fixture
def timed_as_planted(monkeypatch):
    """Each kernel's step takes what its name says, whatever else this machine does meanwhile."""
    factors = {"better": 0.5, "worse": 2.0}

    def compared(processes: Any, keys: Any, seconds: float) -> Comparison:
        names = [greedy._name(key) for key in keys if key in processes.running]
        return Comparison({name: Timing((factors.get(name, 1.0),) * 10, 1, "wall-clock", 1.0) for name in names})

    monkeypatch.setattr(greedy, "_compare", compared)


def test_a_faster_kernel_is_taken_and_a_slower_or_wrong_one_refused(quick, timed_as_planted, monkeypatch, tmp_path):
    operators = step.operators(MAKE)
    assert operators.names == ["better", "worse", "plain", "wrong", "failing"]
    study = choose_lowerings(MAKE, operators, lambda choices: InThisProcess(MAKE, choices), seconds=0.0)
    taken = {name: trial.choice for name, trial in study.decisive.items()}
    assert taken["better"] == "kernel"
    assert taken["worse"] == taken["wrong"] == taken["failing"] == "formula"
    assert study.decisive["better"].speedup.low > 1
    assert study.decisive["worse"].speedup.high < 1
    assert re.search("it computes something else: a norm of .* at most 1e-04", study.decisive["wrong"].why)
    assert "no such kernel on this machine" in study.decisive["failing"].why
    assert study.gain.low > 1

    told = describe_study(study)
    assert re.search(r"^\| better \| – \| kernel \|", told, re.MULTILINE)
    assert re.search(r"^\| wrong \| – \| formula \| failed \|", told, re.MULTILINE)

    table = tmp_path / "table.json"
    lowering.write_table(table, study.rows(capture("cpu", root=tmp_path)))
    rows = {row.operator: row for row in lowering.read_table(table)}
    assert rows.keys() == {"better", "worse", "plain"}
    assert rows["better"].sizes == {"rows": 4, "columns": 8}
    assert (rows["better"].dtype, rows["better"].direction) == ("float32", "training")
    assert rows["better"].evidence.low > rows["better"].evidence.control_high
    assert rows["plain"].sizes == {}

    # What was measured is found without being named.
    monkeypatch.setenv("LOWERING_CACHE", str(tmp_path))
    assert study.keep(capture("cpu", root=tmp_path)) == 3
    assert {origin: row.choice for origin, row in rows_here("better", "planted", "cpu")} == {}
    assert {origin: row.choice for origin, row in rows_here("better", "", "cpu")} == {TUNED_ORIGIN: "kernel"}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda x, w: (-x, w), "result"),  # the norms are the same
        (lambda x, w: (x.roll(1, 0), w), "result"),
        (lambda x, w: (2 * x.detach() - x, w), "gradient"),
        (lambda x, w: (x, 2 * w.detach() - w), "gradient"),  # of one small weight
        (lambda x, w: (x * torch.linspace(1, 2, 64), w), "whole-number result"),
        (lambda x, w: (x * 1.5, w), "state"),
        (lambda x, w: (x * 1.5, w), "whole-number state"),
    ],
)
def test_a_kernel_whose_results_have_the_right_norm_and_are_wrong_is_refused(change, kind):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.change = torch.nn.Linear(64, 64, bias=False), None
            self.bias = torch.nn.Parameter(torch.zeros(64))
            self.register_buffer("mean", torch.zeros(64))
            self.register_buffer("seen", torch.zeros(64, dtype=torch.long))

        def forward(self, x):
            x, bias = self.change(x, self.bias) if self.change else (x, self.bias)
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.seen += (x > 1).sum(0)
            y = self.linear(x) + 0.03 * bias
            return y if kind == "gradient" else (y, y.argmax(-1), y.masked_fill(y > 0, float("-inf")))

    torch.manual_seed(0)
    target = Target(Model(), (torch.randn(256, 64, requires_grad=True),), loss=lambda y: (y * y.detach().sin()).sum())
    marks = []
    for chosen in (None, change):
        variant = LoweredStep.__new__(LoweredStep)
        variant._name, variant._model, variant._arguments = "", target.copied(), list(target.args)
        variant._model.change = chosen
        variant._step = target.step(variant._model, train=kind == "gradient")
        marks.append(variant.prepare())
    with pytest.raises(UserError, match=f"it computes something else: ({kind} |a norm of)"):
        greedy._compare_marks(kind, marks[1][kind], marks[0][kind], 1e-4)
    greedy._compare_marks(kind, marks[0][kind], marks[0][kind], 1e-4)


def test_a_sparse_gradient_has_the_marks_of_the_dense_one():
    sparse = torch.sparse_coo_tensor([[0], [1]], [2.0], (2, 2), check_invariants=True)
    assert step.marks_of(sparse) == step.marks_of(torch.tensor([[0.0, 2.0], [0.0, 0.0]]))


class Taking:
    """A variant whose step takes a known time; :func:`exact_times` reads it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def call(self, method: str, steps: int = 1) -> Any:
        assert method == "prepare"
        return {"result": {"1": (1.0, 0.5)}}

    def close(self) -> None:
        pass


@pytest.fixture
def exact_times(monkeypatch):
    """Each variant takes the time that it says, whatever else this machine does meanwhile."""

    def compared(processes: Any, keys: Any, seconds: float) -> Comparison:
        running = {greedy._name(key): processes.running[key].seconds for key in keys if key in processes.running}
        return Comparison({name: Timing((took,) * 10, 1, "wall-clock", took) for name, took in running.items()})

    monkeypatch.setattr(greedy, "_compare", compared)


@pytest.fixture
def pass_time(monkeypatch):
    """Lets seconds pass for the budget, for which no others pass."""
    now = 1000.0

    def seconds(count: float) -> None:
        nonlocal now
        now += count

    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now))
    return seconds


@pytest.mark.parametrize(
    ("both", "expected"), [(0.002, {"a": "kernel", "b": "kernel"}), (0.009, {"a": "kernel", "b": "formula"})]
)
def test_a_second_winner_is_confirmed_beside_the_first(both, expected, exact_times):
    seconds = {(): 0.012, ("a",): 0.004, ("b",): 0.006, ("a", "b"): both, ("c",): 0.03}

    def start(choices: Mapping[str, lowering.Choice]) -> Taking:
        return Taking(seconds[tuple(name for name, chosen in choices.items() if chosen == "kernel")])

    operators = Operators((), ("a", "b", "c"), 1e-4)
    study = choose_lowerings(MAKE, operators, start, seconds=0.0, beside=5)
    assert {name: trial.choice for name, trial in study.decisive.items()} == {**expected, "c": "formula"}
    assert [(trial.operator, trial.beside) for trial in study.trials] == [
        ("a", ()), ("b", ()), ("c", ()), ("b", ("a",)),
    ]  # fmt: skip
    assert study.gain.value > 1


@pytest.mark.parametrize(("left", "longer", "choice"), [(1e9, 6.0, "kernel"), (100.0, None, "formula")])
def test_where_noise_alone_rejects_a_gain_beside_a_winner_a_longer_comparison_decides(
    left, longer, choice, pass_time, monkeypatch
):
    asked: list[float] = []

    def compared(processes: Any, keys: Any, seconds: float) -> Comparison:
        asked.append(seconds)
        noise = 0.0 if len(asked) == 1 or seconds > 2.0 else 0.1

        def timing(key: object) -> Timing:
            took = processes.running[key].seconds
            noisy = noise if key is greedy.CONTROL else 0.0
            samples = tuple(took * (1 + noisy * (-1) ** sample) for sample in range(10))
            return Timing(samples, 1, "wall-clock", took)

        return Comparison({greedy._name(key): timing(key) for key in keys if key in processes.running})

    monkeypatch.setattr(greedy, "_compare", compared)
    seconds = {(): 0.012, ("a",): 0.008, ("b",): 0.0112, ("a", "b"): 0.0075}

    def start(choices: Mapping[str, lowering.Choice]) -> Taking:
        return Taking(seconds[tuple(name for name, chosen in choices.items() if chosen == "kernel")])

    with budget.within(left):
        study = choose_lowerings(MAKE, Operators((), ("a", "b"), 1e-4), start, seconds=2.0, beside=5)
    assert {name: trial.choice for name, trial in study.decisive.items()} == {"a": "kernel", "b": choice}
    assert asked == [2.0, 2.0, *([longer] if longer else [])]


@pytest.mark.parametrize(("both", "choice"), [(0.0105, "kernel"), (0.0119, "formula")])
def test_gains_that_are_too_small_alone_are_tried_together(both, choice, exact_times, monkeypatch, tmp_path):
    """Beside a winner: two kernels that gain 1 % each, and one that loses."""
    monkeypatch.setattr(greedy, "machine_class", lambda device: "cpu-avx512-amd-zen-5")
    small = {("b",): 0.0119, ("c",): 0.0119, ("d",): 0.0121}
    seconds = {(): 0.012, ("a",): 0.011, **small, ("a", "b", "c"): both - 0.001}

    def start(choices: Mapping[str, lowering.Choice]) -> Taking:
        return Taking(seconds[tuple(name for name, chosen in choices.items() if chosen == "kernel")])

    lines: list[str] = []
    study = choose_lowerings(MAKE, Operators((), tuple("abcd"), 1e-4), start, seconds=0.0, beside=5, tell=lines.append)
    chosen = {name: trial.choice for name, trial in study.decisive.items()}
    assert chosen == {"a": "kernel", "b": choice, "c": choice, "d": "formula"}
    assert any(line.startswith("  b, c together beside a: 1.") and line.endswith(choice) for line in lines)
    if choice == "kernel":
        assert study.decisive["b"].together == ("c",)
        assert study.decisive["b"].beside == ("a",)
        assert {row.operator: row.choice for row in study.rows(capture("cpu", root=tmp_path))} == chosen
    assert study.chosen.value == (both - 0.001 if choice == "kernel" else 0.011)


def test_an_interrupt_keeps_the_trials_that_ended(exact_times, monkeypatch, tmp_path):
    monkeypatch.setattr(greedy, "machine_class", lambda device: "cpu-avx512-amd-zen-5")
    seconds = {(): 0.012, ("a",): 0.004, ("b",): 0.006, ("c",): 0.03}

    def start(choices: Mapping[str, lowering.Choice]) -> Taking:
        kernels = tuple(name for name, chosen in choices.items() if chosen == "kernel")
        if len(kernels) == 2:
            raise KeyboardInterrupt
        return Taking(seconds[kernels])

    lines: list[str] = []
    operators = Operators((), ("a", "b", "c"), 1e-4)
    study = choose_lowerings(MAKE, operators, start, seconds=0.0, beside=5, tell=lines.append)
    assert study.undecided == ("b",)
    assert {name: trial.choice for name, trial in study.decisive.items()} == {"a": "kernel", "c": "formula"}
    assert [row.operator for row in study.rows(capture("cpu", root=tmp_path))] == ["a", "c"]
    assert lines[0].startswith("compiling 5 steps: every formula")
    assert re.match(r"  a: .*×.*, kernel$", lines[2])
    assert lines[-1] == "interrupted: not timed beside a: b"
    assert "3 operators with two lowerings; kernel: a; undecided, no row: b; formula: the rest" in describe_study(study)


def test_an_interrupt_before_the_first_comparison_says_what_is_kept_and_how_to_go_on(monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(greedy, "measure_lowerings", interrupted)
    answer = CliRunner().invoke(app, ["tune", "gpt", "--device", "cpu"])
    assert answer.exit_code == 130
    (line,) = answer.output.splitlines()
    assert line.startswith("interrupted before the first comparison: no row of this run is kept, those of earlier runs")


@pytest.mark.parametrize(("gain", "taken"), [(1.015, "formula"), (1.03, "kernel")])
def test_a_kernel_that_gains_less_than_two_percent_stays_out(gain, taken):
    def timed(name: str, seconds: float) -> tuple[str, Timing]:
        return name, Timing((seconds,) * 10, 1, "wall-clock", seconds)

    comparison = Comparison(dict([timed("plain", 1.0), timed("control", 1.0), timed("a", 1 / gain)]))
    processes = SimpleNamespace(failed={})
    assert greedy._trial(processes, comparison, "a", greedy.PLAIN_KEY).choice == taken


@pytest.mark.parametrize(
    ("both", "chosen", "undecided", "said"),
    [
        (0.013, {"a": "kernel"}, ("b",), "out of time: not compiled: b"),
        (0.008, {"a": "kernel", "b": "kernel"}, (), "taken: all kernels, which gain together"),
    ],
)
def test_without_time_for_each_all_kernels_are_taken_if_they_gain_and_else_the_rest_gets_no_row(
    both, chosen, undecided, said, exact_times, pass_time, monkeypatch, tmp_path
):
    seconds = {(): 0.012, ("a",): 0.004, ("a", "b"): both}

    def start(choices: Mapping[str, lowering.Choice]) -> Taking:
        kernels = tuple(name for name, chosen in choices.items() if chosen == "kernel")
        if kernels == ("a",):
            pass_time(2.2)  # a compilation that leaves less than the timing of five takes
        return Taking(seconds[kernels])

    lines: list[str] = []
    with budget.within(5.0):
        study = choose_lowerings(MAKE, Operators((), ("a", "b"), 1e-4), start, seconds=0.6, tell=lines.append)
    assert study.undecided == undecided
    assert not study.interrupted
    assert {row.operator: row.choice for row in study.rows(capture("cpu", root=tmp_path))} == chosen
    assert lines[-1] == said
    assert study.gain.value == pytest.approx(0.012 / (0.004 if undecided else both))


def test_kernels_that_gain_elsewhere_come_first_and_without_time_for_one_nothing_is_timed(
    exact_times, pass_time, monkeypatch
):
    monkeypatch.setattr(greedy, "gain_elsewhere", lambda name, device: {"a": 1.0, "b": 1.4, "c": 1.1}[name])
    started = []

    def start(choices: Mapping[str, lowering.Choice]) -> Taking:
        started.append([name for name, chosen in choices.items() if chosen == "kernel"])
        if started[-1] == ["c"]:
            pass_time(0.3)
        return Taking(0.01)

    operators = Operators((), ("a", "b", "c"), 1e-4)
    with budget.within(0.5):
        choose_lowerings(MAKE, operators, start, seconds=0.05)
    assert started == [[], [], ["b", "c", "a"], ["b"], ["c"]]
    with budget.within(0.5):
        pass_time(0.6)
        with pytest.raises(budget.OutOfTime, match="to compile a kernel"):
            choose_lowerings(MAKE, operators, start, seconds=0.05)


def test_a_kernel_starts_only_with_time_to_compile_as_long_as_another_did(exact_times, monkeypatch):
    started = []

    def start(choices: Mapping[str, lowering.Choice]) -> Taking:
        started.append([name for name, chosen in choices.items() if chosen == "kernel"])
        time.sleep(0.3 if started[-1] == [] else 0.0)
        return Taking(0.01)

    # Less is left after the two plain steps than one of them took.
    with budget.within(0.8), pytest.raises(budget.OutOfTime, match="to compile a kernel"):
        choose_lowerings(MAKE, Operators((), ("a", "b"), 1e-4), start, seconds=0.0)
    assert started == [[], []]


def test_few_rounds_are_no_choice(monkeypatch):
    def few(functions: Any, *, rounds: int, **options: Any) -> Comparison:
        return Comparison({name: Timing((0.01,) * min(rounds, 5), 1, "wall-clock", 0.01) for name in functions})

    monkeypatch.setattr(greedy, "compare", few)
    with pytest.raises(budget.OutOfTime, match="5 rounds are too few for a choice"):
        choose_lowerings(MAKE, Operators((), ("a", "b"), 1e-4), lambda choices: Taking(0.01), seconds=0.0)


def test_a_model_without_such_operators_is_one_line():
    case = Case(f"{PLANTED}:none")
    with pytest.raises(UserError, match=r"calls no operator with two lowerings: use lowering\.lower, or name adapters"):
        choose_lowerings(case, step.operators(case), lambda choices: Taking(0.0))


def test_a_plain_step_that_raises_ends_the_measurement():
    def start(choices: Mapping[str, lowering.Choice]) -> Taking:
        raise UserError("the compiled step raised")

    with pytest.raises(UserError, match="the compiled step raised"):
        choose_lowerings(MAKE, Operators((), ("a",), 1e-4), start)


@pytest.mark.parametrize(
    ("table", "cache", "says"),
    [
        ("other.json", ".", "expected a table of lowerings"),
        ("/proc/x/table.json", ".", "/proc/x/table.json cannot be written"),
        (None, "other.json", "other.json/rows cannot be written"),
    ],
)
def test_where_no_row_can_be_kept_nothing_is_measured(table, cache, says, tmp_path, monkeypatch):
    monkeypatch.setattr("compile_bench.cli.tuning.Harness.open", None)
    monkeypatch.setenv("LOWERING_CACHE", str(tmp_path / cache))
    (tmp_path / "other.json").write_text("{}")
    option = [] if table is None else ["--table", str(tmp_path / table)]
    answer = CliRunner().invoke(app, ["tune", f"{PLANTED}:two", "--device", "cpu", *option])
    assert answer.exit_code == 2
    assert says in answer.output.replace("\n", "")


@pytest.mark.parametrize(
    ("mode", "says"), [("replay", "takes from now on"), ("off", "takes none of them while LOWERING=off is set")]
)
def test_rows_are_said_to_be_taken_where_they_are(mode, says, monkeypatch):
    monkeypatch.setattr(choice, "_mode", mode)
    assert says in _keep(SimpleNamespace(case=MAKE, keep=lambda environment: 2), None)


@pytest.mark.slow
def test_the_command_measures_in_processes_and_writes_a_table(tmp_path):
    table = tmp_path / "table.json"
    arguments = ["tune", f"{PLANTED}:two", "--device", "cpu", "--seconds", "1", "--table", str(table)]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    assert re.search(r"^\| better \| – \| kernel \|", answer.output, re.MULTILINE)
    assert re.search(r"^\| worse \| – \| formula \|", answer.output, re.MULTILINE)
    assert "2 rows in" in answer.output
    assert {row.operator: row.choice for row in lowering.read_table(table)} == {"better": "kernel", "worse": "formula"}
