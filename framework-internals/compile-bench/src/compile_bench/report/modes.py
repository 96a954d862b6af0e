"""The report's sections on models and modes: verdicts, what each cell showed, and what is missing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from benchkit import numbers
from benchkit.device import Device
from benchkit.environment import commit_label
from benchkit.report import Block, Column, Section, Table, bullets
from benchkit.results import Results
from compile_bench.capture.text import plural
from compile_bench.measure.records import Accuracy, Bench, FailedCell, SweepCall
from compile_bench.measure.verdict import Advice, judge
from compile_bench.report.autotuning import MARK, Autotuned, autotuning_section
from compile_bench.report.charts import autotuning_chart, speedup_chart
from compile_bench.report.details import count_columns, eager_to_compiled, peak_memory
from compile_bench.report.queries import Model, in_order, mode_index, title
from compile_bench.report.regressions import explain_slower
from compile_bench.sweep import missing
from compile_bench.targets.case import MODES
from compile_bench.targets.workloads import workload

Cell = Bench | FailedCell

# Marks the accuracy of cells whose results could not be compared.
NOT_COMPARED = "ᵇ"

# Marks the compile cost of a model that was compiled alone, in a table of models that were not.
ALONE = "ᶜ"


@dataclass(frozen=True)
class Models:
    """The cells of all models and modes: the measured cases and those that failed, in order."""

    results: Results  # the results that they are from
    cases: Sequence[Bench]  # all measured cases, those of compiled blocks included

    @property
    def on_gpu(self) -> bool:
        """Whether the run measured a GPU."""
        return self.results.environment.gpu is not None

    @property
    def failed(self) -> list[FailedCell]:
        """The cells that failed."""
        return in_order(self.results, FailedCell.select(self.results))

    @property
    def cells(self) -> list[Cell]:
        """The measured and the failed cells of whole models."""
        whole = [case for case in self.cases if case.scope == "whole"]
        return in_order(self.results, [*whole, *self.failed])

    @property
    def measured(self) -> list[Bench]:
        """The measured cells."""
        return [cell for cell in self.cells if isinstance(cell, Bench)]

    @property
    def swept(self) -> list[Bench]:
        """The cells that ``run.py --sweep`` measured."""
        return [cell for cell in self.measured if cell.swept]

    @property
    def calls(self) -> list[SweepCall]:
        """The calls of the sweep."""
        return SweepCall.select(self.results)

    @property
    def processes(self) -> int:
        """How many processes compiled at the same time, at most."""
        return max((case.processes for case in self.cases), default=1)

    def marked_alone(self, case: Bench) -> bool:
        """Whether the compile cost stands among others that were measured while several models compiled."""
        return case.compiled_alone and self.processes > 1

    def of_mode(self, mode: str) -> list[Cell]:
        """The cells of a mode."""
        return [cell for cell in self.cells if cell.variant == mode]


def answer_blocks(models: Models) -> list[Block]:
    """The first screen: every case of mode default, and what its marks mean."""
    stopped = ", while the others were stopped" if models.calls else ""
    return [
        speedup_chart(models.results, models.cases),
        Section(
            "",
            [
                models_table(models, models.of_mode("default")),
                "A case is worth compiling *only for runs over* its break-even: until then the steps gain less than "
                "compiling costs. The *control* is a step of eager over another one in the same rounds; a difference "
                "counts only beyond it.",
                f"Up to {models.processes} processes compiled side by side, so compile costs and break-evens are above "
                "those of a machine that compiles one model; steps were measured one process at a "
                f"time{stopped}."
                if models.processes > 1
                else "",
                f"{ALONE} Measured by the main job, with nothing else running."
                if any(map(models.marked_alone, models.measured))
                else "",
            ],
        ),
        listed(
            f"{NOT_COMPARED} Judged by speed alone, since the results could not be compared:",
            [f"{titles}: {why}" for titles, why in _not_compared(models.measured)],
        ),
    ]


def listed(text: str, lines: Sequence[str]) -> Section:
    """A list with a text before it; empty without lines."""
    return Section("", [text, bullets(lines)] if lines else [])


def modes_section(models: Models, tuned: Sequence[Autotuned]) -> Section:
    """How many cells are worth compiling, whether autotuning was, every mode, and the cells that are missing.

    The speed-ups of two modes have no common table: each was measured in a process of its own.
    """
    return Section(
        "The modes",
        [
            _counted(models),
            f"Measured by `run.py --sweep`: {'; '.join(_call(call, models) for call in models.calls)}."
            if models.calls
            else "",
            _drift(models.swept),
            autotuning_section(tuned, autotuning_chart(models.results, tuned)),
            Section("Each mode against eager", [_mode_section(models, mode) for mode in MODES]),
            Section(
                "",
                [bullets(f"{title(cell)}: {cell.why}" for cell in models.failed)],
                fold="The cells that failed, and why",
            ),
            listed(
                "Not measured yet (`run.py --sweep` continues with these):",
                [f"{model}: {modes}" for model, modes in _missing(models.results)] if models.calls else [],
            ),
        ],
    )


def _counted(models: Models) -> str:
    counts = _counts(models.cells)
    alone = counts["by speed alone"]
    failed = f"; {counts['failed']} failed ({_failed_models(models.failed)})" if models.failed else ""
    return (
        f"Of {len(models.cells)} cells (a model, training or inference, a mode), {counts['compile']} are faster than "
        f"eager{f' ({alone} of them by speed alone {NOT_COMPARED})' if alone else ''}, {counts['inconclusive']} "
        f"""inconclusive and {counts["don't"]} not worth compiling{failed}."""
    )


def _mode_section(models: Models, mode: str) -> Section:
    """The tables of a mode; that of mode default stands on the first screen."""
    cells = models.of_mode(mode)
    shown = [] if mode == "default" else cells
    swept = [case for case in models.swept if case.variant == mode]
    measured = [cell for cell in cells if isinstance(cell, Bench)]
    counts = _counts(cells)
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return Section(
        "",
        [
            models_table(models, shown),
            Section(
                "",
                [
                    "What each cell costs, and what its step does, eager → compiled:",
                    cell_table(swept, on_gpu=models.on_gpu),
                ],
            ),
            f"{MARK} Its caches contained the choices of max-autotune-no-cudagraphs: without them, the compile cost "
            "and the break-even are higher."
            if any(case.tuned for case in measured)
            else "",
            f"{NOT_COMPARED} Judged by speed alone; the reasons stand below the first table."
            if any(isinstance(cell, Bench) and cell.accuracy.skipped for cell in shown)
            else "",
        ],
        fold=f"Mode {mode}: {counts['compile']} faster, {counts['inconclusive']} inconclusive, "
        f"""{counts["don't"]} not worth compiling{failed}""",
    )


def models_table(models: Models, cells: Sequence[Cell]) -> Table[Cell]:
    """What each case of a mode is, whether compiling it is worth its cost, and what that rests on."""
    device: Device = "cuda" if models.on_gpu else "cpu"

    def measured(value: Callable[[Bench], Any], failed: str | None = None) -> Callable[[Cell], Any]:
        return lambda cell: value(cell) if isinstance(cell, Bench) else failed

    def cost(case: Bench) -> str:
        marks = MARK * case.tuned + ALONE * models.marked_alone(case)
        return numbers.with_unit(judge(case).cost, "s") + marks

    return Table(
        cells,
        [
            Column("case", lambda cell: " ".join(cell.model)),
            Column("model, batch", lambda cell: str(workload(cell.model[0], device) or "–")),
            Column("speed-up: eager / compiled step (95 %)", measured(_speedup, "failed")),
            Column(
                "compile? (break-even, empty caches)", measured(lambda case: _verdict(case, models.cases)), left=True
            ),
            Column("control: eager / eager (95 %)", measured(lambda case: case.steady.control)),
            Column("compile cost", measured(cost)),
            Column("results compared", measured(lambda case: _compared(case.accuracy))),
        ],
    )


def _verdict(case: Bench, cases: Sequence[Bench]) -> str:
    """The verdict with its break-even or its reason; for a slower step with the cause and what to do."""
    verdict = judge(case)
    if verdict.advice == "don't" and case.accuracy.holds:
        return f"**don't**: {explain_slower(case, cases)}"
    return verdict.text


def _speedup(case: Bench) -> str:
    text = numbers.quantity(case.steady.speedup)
    return f"**{text}**" if judge(case).advice == "don't" else text


def _counts(cells: Sequence[Cell]) -> dict[str, int]:
    """How many cells have each verdict and how many failed; of those worth compiling, how many by speed alone."""
    verdicts = [judge(cell) for cell in cells if isinstance(cell, Bench)]
    counts = Counter(verdict.advice for verdict in verdicts)
    return {
        **{advice: counts[advice] for advice in get_args(Advice)},
        "by speed alone": sum(verdict.advice == "compile" and bool(verdict.not_compared) for verdict in verdicts),
        "failed": len(cells) - len(verdicts),
    }


def _failed_models(failed: Sequence[FailedCell]) -> str:
    """The models with failed cells, each with the modes."""
    modes: dict[str, set[str]] = {}
    for cell in failed:
        modes.setdefault(cell.target, set()).add(cell.mode)
    return "; ".join(f"{target} in {', '.join(sorted(names, key=mode_index))}" for target, names in modes.items())


def _call(call: SweepCall, models: Models) -> str:
    """How many cells a call of the sweep measured, when, and at which commit."""
    measured = sum(case.sweep_call == call.number for case in models.cases)
    failed = sum(cell.sweep_call == call.number for cell in models.failed)
    return f"{plural(measured + failed, 'cell')} on {call.date} at {commit_label(call.commit, call.dirty)}"


def _missing(results: Results) -> list[tuple[str, str]]:
    """Models and kinds with modes that no call of the sweep has reached, and these modes."""
    modes: dict[str, list[str]] = {}
    for case in missing(results):
        modes.setdefault(f"{case.target} {case.kind}", []).append(case.mode)
    return [(model, ", ".join(left)) for model, left in modes.items()]


def cell_table(cases: Sequence[Bench], *, on_gpu: bool) -> Table[Bench]:
    """What the cells of a mode cost, and what their step does, eager → compiled."""
    return Table(
        cases,
        [
            Column("case", lambda case: " ".join(case.model)),
            Column("first steps", lambda case: numbers.with_unit(case.cold.total, "s") + MARK * case.tuned),
            Column("compiling", lambda case: numbers.with_unit(sum(case.cold.phases.values()), "s")),
            Column("step", lambda case: eager_to_compiled(case.steady.eager.value, case.steady.compiled.value, "s")),
            Column("peak memory", peak_memory),
            *(count_columns() if on_gpu else ()),
            Column("graphs", lambda case: case.compilation.graphs),
            Column("breaks", lambda case: len(case.compilation.breaks)),
        ],
    )


def _compared(accuracy: Accuracy) -> str:
    if accuracy.skipped:
        return f"no{NOT_COMPARED}"
    return "yes, within bounds" if accuracy.holds else "yes, **outside their bounds**"


def _drift(cases: Sequence[Bench]) -> str:
    """Why modes are not compared: the eager steps of a model's cells differ; empty without two cells of any model."""
    steps: dict[Model, list[float]] = {}
    for case in cases:
        steps.setdefault(case.model, []).append(case.steady.eager.value)
    ratios = {model: max(seconds) / min(seconds) for model, seconds in steps.items() if len(seconds) > 1}
    if not ratios:
        return ""
    most = max(ratios, key=lambda model: ratios[model])
    return (
        "The speed-ups of two modes are not compared here: each mode was sampled against eager in a process of its "
        "own, and the eager step differs between the processes of a model, by "
        f"{numbers.with_unit(statistics.median(ratios.values()), '×')} in the middle and "
        f"{numbers.with_unit(ratios[most], '×')} at most ({' '.join(most)}), since it waits for the host where kernels "
        "are small. Modes are compared only where both were sampled in alternation in one process: a mode that "
        "autotunes, and the same mode without. For `reduce-overhead` against `default` there is no such measurement."
    )


def _not_compared(cases: Sequence[Bench]) -> list[tuple[str, str]]:
    """Models whose results could not be compared, by reason."""
    titles: dict[str, dict[str, None]] = {}
    for case in cases:
        if case.accuracy.skipped:
            titles.setdefault(case.accuracy.skipped, {})[title(case, mode=False)] = None
    return [(", ".join(names), why) for why, names in titles.items()]
