"""Chooses lowerings greedily: every operator's kernel in the whole step, then one winner added to the next.

All variants of a round are compared in alternation, with the plain step and a second process of the plain step, the
control. A kernel is taken if the whole interval of its speedup is above 1 and above the control's interval, so that the
difference is larger than what two processes of the same program show, and if its median is 2 % above both. Otherwise
the formula stays: a choice that follows every small gain loses more elsewhere than it wins. Kernels whose gains are too
small to be told one at a time are tried once more, together, and are taken together by the same rule. Where the median
of such a trial, or of one beside a winner, gains 2 % and noise alone rejects it, a longer comparison decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from benchkit import Comparison, Quantity, UserError, compare, numbers
from benchkit.environment import Environment, commit_label
from benchkit.processes import ChildFailure, RemoteObject, budget, deferred_module, waiting_threads
from compile_bench.measure.harness import Harness
from compile_bench.targets.case import Case
from lowering import Call, Choice, Direction, Evidence, Row, gain_elsewhere, keep_rows, machine_class

if TYPE_CHECKING:
    from compile_bench.measure.lowerings import step as in_child
    from compile_bench.measure.lowerings.step import Marks, Operators
else:
    in_child = deferred_module("compile_bench.measure.lowerings.step")

PLAIN, CONTROL = "plain", "control"
PLAIN_KEY: frozenset[str] = frozenset()

# A sample is so long that the message to its process (0.1 ms) and the clock do not count.
_SAMPLE_SECONDS = 0.1
_FEWEST_ROUNDS, _MOST_ROUNDS = 10, 200

LEAST_GAIN = 1.02

# How many times as long the second comparison of an undecided trial is: less where that is more than a part of the time
# that is left, and none where it could not be much longer than the first.
_LONGER, _LEAST_LONGER = 3.0, 1.5
_PART_OF_TIME_LEFT = 0.1


# Starts the process of a :class:`compile_bench.measure.lowerings.step.LoweredStep`.
Start = Callable[[Mapping[str, Choice]], RemoteObject]


@dataclass(frozen=True)
class Trial:
    """What one operator's kernel brought."""

    operator: str
    beside: tuple[str, ...]  # operators whose kernels were in the step already
    choice: Choice  # the lowering that is taken after this trial
    # Time of the step without the kernel over that with it, paired; None if it could not be timed.
    speedup: Quantity | None
    control: Quantity  # the same of the plain step against itself in another process, in the same rounds
    step: Quantity | None  # seconds of the step with the kernel; None if it could not be timed
    why: str = ""  # why it could not be timed; empty otherwise
    together: tuple[str, ...] = ()  # operators whose kernels came into the step in the same trial


@dataclass(frozen=True)
class LoweringStudy:
    """The choice for a target."""

    case: Case  # the target and how it is compiled
    calls: tuple[Call, ...]  # calls of operators that use :func:`lowering.lower`
    trials: tuple[Trial, ...]  # in the order of the measurements; the last one of an operator decides
    plain: Quantity  # seconds of a step with every formula
    chosen: Quantity  # seconds of a step with the lowerings that were taken
    gain: Quantity  # how many times faster the chosen step is than the plain one; exactly 1 if no kernel is taken
    control: Quantity  # the plain step against itself in another process, in the rounds of gain
    # Operators whose kernel was not timed, or not beside the others', when an interrupt or the end of the time ended
    # the measurement. They are not in decisive.
    undecided: tuple[str, ...] = ()
    interrupted: bool = False  # whether an interrupt ended the measurement

    @property
    def decisive(self) -> dict[str, Trial]:
        """The trial that decides, by operator."""
        return {trial.operator: trial for trial in self.trials if trial.operator not in self.undecided}

    def rows(self, environment: Environment) -> list[Row]:
        """The rows of the table; an operator that could not be timed has none."""
        machine = machine_class(self.case.device)
        direction: Direction = "training" if self.case.train else "inference"
        gpu = environment.gpu
        rows: list[Row] = []
        for trial in self.decisive.values():
            if trial.speedup is None:
                continue
            evidence = Evidence(
                self.case.target,
                round(trial.speedup.value, 4),
                *_ends(trial.speedup),
                *_ends(trial.control),
                gpu.name if gpu is not None else f"{environment.cpu}, {environment.threads} threads",
                environment.packages["torch"],
                commit_label(environment.commit, environment.dirty).replace("`", ""),
                environment.date[:10],
            )
            rows += [
                Row(machine, call.operator, call.dtype, call.direction, dict(call.sizes), trial.choice, evidence)
                for call in self.calls
                if call.operator == trial.operator
            ] or [Row(machine, trial.operator, "", direction, {}, trial.choice, evidence)]
        return rows

    def keep(self, environment: Environment) -> int:
        """Keep the rows for this machine, where :func:`lowering.lower` finds them; return their number."""
        sources = {call.operator: call.source for call in self.calls}
        rows = self.rows(environment)
        for source in dict.fromkeys(sources.get(row.operator, "") for row in rows):
            own = [row for row in rows if sources.get(row.operator, "") == source]
            keep_rows(own, source, self.case.device)
        return len(rows)


def _ends(ratio: Quantity) -> tuple[float, float]:
    assert ratio.low is not None
    assert ratio.high is not None
    return round(ratio.low, 4), round(ratio.high, 4)


@dataclass
class _Processes:
    """The variants that run, by the operators whose kernels they use, and the control."""

    start: Start
    names: Sequence[str]
    tolerance: float
    beside: int
    stack: ExitStack
    running: dict[object, RemoteObject] = field(default_factory=dict)
    failed: dict[object, str] = field(default_factory=dict)
    late: list[object] = field(default_factory=list)
    compiling: float = 0.0  # seconds that the last variant took
    plain: Mapping[str, Mapping[str, Marks]] | None = None  # the marks of the first variant

    def begin(self, keys: Sequence[object], *, seconds: float, running: int = 0) -> None:
        """Start and prepare variants; one that fails, or computes something else, is in ``failed``.

        One is in ``late`` if the budget leaves no time to compile it for as long as the last one took, and then to time
        those before it and ``running`` others for ``seconds`` each.
        """
        with waiting_threads(self.beside) as pool:
            preparing = {
                key: pool.submit(self._prepared, key, seconds * (running + number))
                for number, key in enumerate(keys, start=1)
            }
        for key, prepared in preparing.items():
            try:
                self.running[key], marks = prepared.result()
                self.plain = self.plain or marks
                for kind, own in marks.items():
                    least = _OF_WHOLE_NUMBERS if kind.startswith("whole-number") else 0.0
                    _compare_marks(kind, own, self.plain[kind], max(self.tolerance, least))
            except budget.OutOfTime:
                self.late.append(key)
            except (ChildFailure, UserError) as error:
                if key in (PLAIN_KEY, CONTROL):
                    raise
                self.running.pop(key, None)
                self.failed[key] = str(error)

    def _prepared(self, key: object, timing: float) -> tuple[RemoteObject, Mapping[str, Mapping[str, Marks]]]:
        if key not in (PLAIN_KEY, CONTROL) and budget.left() < self.compiling + timing:
            raise budget.OutOfTime(f"no time was left for {_name(key)}")
        start = time.monotonic()
        variant = self.start(self._choices(key))
        self.stack.callback(variant.close)
        marks = variant.call("prepare")
        self.compiling = time.monotonic() - start  # the first one's has Inductor's first steps, too
        return variant, marks

    def _choices(self, key: object) -> dict[str, Choice]:
        kernels = key if isinstance(key, frozenset) else frozenset()
        return {name: "kernel" if name in kernels else "formula" for name in self.names}


# A tensor varies more than all tensors together, and what is small beside them may be rounding errors alone, such as
# the gradient of a bias before a norm.
_OF_ONE_TENSOR = 5.0
_SMALL = 0.01
# Rounding decides some of them, as in argmax.
_OF_WHOLE_NUMBERS = 0.02


def _compare_marks(kind: str, own: Mapping[str, Marks], plain: Mapping[str, Marks], tolerance: float) -> None:
    """Raise an error if the marks of a variant are not those of the plain step, within rounding errors."""
    whole = [math.hypot(*(marks[0] for marks in group.values())) for group in (own, plain)]
    if own.keys() != plain.keys():
        raise UserError(
            f"it computes something else: {kind} {min(own.keys() ^ plain.keys())} is in one of the two only"
        )
    if not abs(whole[0] - whole[1]) <= tolerance * max(whole):
        raise UserError(
            f"it computes something else: a norm of {whole[0]:.6g} where the plain step has {whole[1]:.6g}, and at "
            f"most {tolerance:.0e} of difference is expected"
        )
    for name, marks in own.items():
        size = max(marks[0], plain[name][0], _SMALL * max(whole))
        difference = max(abs(one - other) for one, other in zip(marks, plain[name], strict=True))
        if not difference <= _OF_ONE_TENSOR * tolerance * size:
            raise UserError(
                f"it computes something else: {kind} {name} is {difference / size:.1g} of its size away from the "
                f"plain step's, and at most {_OF_ONE_TENSOR * tolerance:.0e} is expected"
            )


def choose_lowerings(
    case: Case,
    operators: Operators,
    start: Start,
    *,
    seconds: float = 10.0,
    beside: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> LoweringStudy:
    """Measure the kernel of each operator in the whole step and choose.

    Each variant is sampled for ``seconds``, and ``beside`` of them compile side by side. Kernels that gain most on
    other machines come first. Where the time ends before each was timed alone and the gains beside one another, all
    kernels together are the choice if they gain. An interrupt after the first comparison ends the measurement; the
    rest is then ``undecided``.

    Raises:
        OutOfTime: If the budget ends before any kernel is compiled.
    """
    names = sorted(operators.names, key=lambda name: -gain_elsewhere(name, case.device))
    if not names:
        raise UserError(
            f"{case.target} calls no operator with two lowerings: use lowering.lower, or name adapters in "
            "Target(operators=…)"
        )
    with ExitStack() as stack:
        processes = _Processes(start, names, operators.tolerance, beside, stack)
        comparison, trials, of_all = _timed_alone(processes, seconds, tell)
        first = comparison
        late = [name for name in names if frozenset([name]) in processes.late]
        promising = sorted(
            (trial for trial in trials if trial.choice == "kernel"), key=lambda trial: -_value(trial.speedup)
        )
        taken = frozenset(trial.operator for trial in promising[:1])
        waiting = [trial.operator for trial in promising[1:]]
        interrupted, small = False, list[str]()
        try:
            while waiting:
                comparison, (trial,) = _timed_with_taken(processes, taken, waiting[:1], seconds, tell)
                trials.append(trial)
                operator = waiting.pop(0)
                if trial.choice == "kernel":
                    taken |= {operator}
            small = _small_gains(trials)
            if len(small) > 1:
                comparison, more = _timed_with_taken(processes, taken, small, seconds, tell)
                if all(trial.choice == "kernel" for trial in more):
                    trials += more
                    taken |= frozenset(small)
        except (KeyboardInterrupt, budget.OutOfTime) as stop:
            interrupted = isinstance(stop, KeyboardInterrupt)
            reason = "interrupted" if interrupted else "out of time"
            tell(f"{reason}: not timed beside {_name(taken)}: {', '.join(waiting or small)}")
        if late:
            tell(f"out of time: not compiled: {', '.join(late)}")
        if (waiting or late) and not interrupted and of_all and of_all[0].choice == "kernel":
            trials, comparison, taken = [*trials, *of_all], first, frozenset(names)
            waiting = late = []
            tell("taken: all kernels, which gain together")
        gain = comparison.speedup(_name(taken), over=PLAIN) if taken else Quantity(1.0, "×", 1.0, 1.0)
        return LoweringStudy(
            case,
            operators.calls,
            tuple(trials),
            comparison[PLAIN].quantity(),
            comparison[_name(taken)].quantity(),
            gain,
            comparison.speedup(CONTROL, over=PLAIN),
            (*waiting, *late),
            interrupted,
        )


def _timed_alone(
    processes: _Processes, seconds: float, tell: Callable[[str], None]
) -> tuple[Comparison, list[Trial], list[Trial]]:
    """Time all kernels together, and each alone, beside the plain step; what no time is left for has no trial.

    Returns:
        The comparison, the trials of each kernel, and those of all together, which have one outcome. The last only
        where variants compile one after another, so that the time may end before each was compiled.
    """
    singles = {name: frozenset([name]) for name in processes.names}
    everything = frozenset(processes.names)
    together = [everything] if processes.beside == 1 and len(singles) > 1 else []
    keys = [PLAIN_KEY, CONTROL, *together, *singles.values()]
    also = "all kernels together, " if together else ""
    tell(f"compiling {len(keys)} steps: every formula, the same again as the control, {also}each kernel alone")
    processes.begin(keys, seconds=seconds)
    if len(processes.late) == len(keys) - 2:
        raise budget.OutOfTime("no time was left to compile a kernel; give the run more with --budget")
    tell(f"timing them in alternation, {seconds * len(processes.running):.0f} s")
    comparison = _compare(processes, keys, seconds)
    trials = [
        _trial(processes, comparison, name, PLAIN_KEY) for name, key in singles.items() if key not in processes.late
    ]
    all_compiled = together and everything not in processes.late
    of_all = _trials_together(processes, comparison, processes.names, PLAIN_KEY) if all_compiled else []
    for trial in [*trials, *of_all[:1]]:
        tell(describe_trial(trial))
    return comparison, trials, of_all


def _timed_with_taken(
    processes: _Processes,
    taken: frozenset[str],
    operators: Sequence[str],
    seconds: float,
    tell: Callable[[str], None],
) -> tuple[Comparison, list[Trial]]:
    """Time the kernels of further operators, all at once, beside those that were taken; all have the same choice."""
    more = taken.union(operators)
    tell(f"compiling and timing {_name(more)}")
    processes.begin([more], seconds=seconds, running=3)
    if more in processes.late:
        raise budget.OutOfTime(f"no time was left for {_name(more)}")
    keys = [PLAIN_KEY, CONTROL, taken, more]
    comparison = _compare(processes, keys, seconds)
    trials = _trials_together(processes, comparison, operators, taken)
    tell(describe_trial(trials[0]))
    longer = min(_LONGER * seconds, _PART_OF_TIME_LEFT * budget.left() / len(keys))
    if trials[0].choice == "formula" and _value(trials[0].speedup) >= LEAST_GAIN and longer > _LEAST_LONGER * seconds:
        tell(f"timing {_name(more)} longer, {longer * len(keys):.0f} s: the noise is as large as the gain")
        comparison = _compare(processes, keys, longer)
        trials = _trials_together(processes, comparison, operators, taken)
        tell(describe_trial(trials[0]))
    return comparison, trials


def _trials_together(
    processes: _Processes, comparison: Comparison, operators: Sequence[str], beside: frozenset[str]
) -> list[Trial]:
    """The trials of operators whose kernels came into the step at once; all have the same choice."""
    return [
        _trial(processes, comparison, name, beside, [other for other in operators if other != name])
        for name in operators
    ]


def _small_gains(trials: Sequence[Trial]) -> list[str]:
    """The operators whose kernels were not taken, though their medians are gains."""
    latest = {trial.operator: trial for trial in trials}
    return [name for name, trial in latest.items() if trial.choice == "formula" and _value(trial.speedup) > 1]


def describe_trial(trial: Trial) -> str:
    """One line: what the kernel brought, and what is taken."""
    beside = f", {', '.join(trial.together)} together" if trial.together else ""
    beside += f" beside {', '.join(trial.beside)}" if trial.beside else ""
    if trial.speedup is None:
        return f"  {trial.operator}{beside}: failed: {trial.why}"
    return f"  {trial.operator}{beside}: {numbers.quantity(trial.speedup)}, {trial.choice}"


def _value(speedup: Quantity | None) -> float:
    return 0.0 if speedup is None else speedup.value


def _name(key: object) -> str:
    """The name of a variant in a comparison."""
    return " + ".join(sorted(key)) or PLAIN if isinstance(key, frozenset) else CONTROL


def _compare(processes: _Processes, keys: Sequence[object], seconds: float) -> Comparison:
    """Time variants in alternation; the figures are seconds of a step."""
    running = {_name(key): processes.running[key] for key in keys if key in processes.running}
    once = {name: partial(variant.call, "run", steps=1) for name, variant in running.items()}
    first = compare({PLAIN: once[PLAIN]}, clock="wall-clock", warmup_calls=1, rounds=3)
    steps = max(round(_SAMPLE_SECONDS / first[PLAIN].median), 1)
    rounds = min(max(round(seconds / (steps * first[PLAIN].median)), _FEWEST_ROUNDS), _MOST_ROUNDS)
    sampled = compare(
        {name: partial(variant.call, "run", steps=steps) for name, variant in running.items()},
        clock="wall-clock",
        warmup_calls=0,
        rounds=rounds,
    )
    if not sampled.speedup(CONTROL, over=PLAIN).decides:
        raise budget.OutOfTime(f"{len(sampled[PLAIN].samples)} rounds are too few for a choice")
    return Comparison(
        {
            name: replace(timing, samples=tuple(sample / steps for sample in timing.samples))
            for name, timing in sampled.timings.items()
        }
    )


def _trial(
    processes: _Processes, comparison: Comparison, operator: str, beside: frozenset[str], together: Sequence[str] = ()
) -> Trial:
    key = beside | {operator, *together}
    control = comparison.speedup(CONTROL, over=PLAIN)
    others = tuple(sorted(beside))
    if key in processes.failed:
        return Trial(operator, others, "formula", None, control, None, processes.failed[key], tuple(together))
    speedup = comparison.speedup(_name(key), over=_name(beside))
    assert speedup.low is not None
    assert control.high is not None
    bound = max(1.0, control.high)
    choice: Choice = "kernel" if speedup.low > bound and speedup.value >= LEAST_GAIN * bound else "formula"
    step = comparison[_name(key)].quantity()
    return Trial(operator, others, choice, speedup, control, step, together=tuple(together))


def measure_lowerings(
    harness: Harness, case: Case, *, seconds: float = 10.0, tell: Callable[[str], None] = lambda line: None
) -> LoweringStudy:
    """Measure and choose the lowerings of a target, each variant in a process of its own."""
    harness.toolchain_seconds()
    operators = harness.ask(in_child.operators, case)
    cache = harness.new_cache()
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}

    def start(choices: Mapping[str, Choice]) -> RemoteObject:
        arguments = {"case": case, "choices": choices}
        return RemoteObject(in_child.LoweredStep, arguments, environment=environment, limit=harness.limit)

    # A CPU compiles one variant with all its cores. Autotuning times candidates, which others would disturb.
    beside = 1 if case.device == "cpu" or case.untuned is not None else 2 + len(operators.names)
    return choose_lowerings(case, operators, start, seconds=seconds, beside=beside, tell=tell)
