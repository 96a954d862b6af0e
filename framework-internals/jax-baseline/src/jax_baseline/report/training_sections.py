"""The report sections on parity, meshes and scaling: sentences, tables and figures, computed from the records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from benchkit import Quantity, Results, numbers
from benchkit.environment import commit_label
from benchkit.report import Axis, Chart, Column, Panel, Point, Section, Series, Table
from jax_baseline.parity import REPORTED
from jax_baseline.parity.records import ConvergedRecord, ConvergenceRecord, MeshRecord, MistakeRecord, ParityRecord
from jax_baseline.report.engine_sections import first_step, interval
from jax_baseline.timing.records import ScalingFigures, ScalingRecord

_REPORTED_AS = ("loss (nats)", "gradient norm", "gradients", "weights", "optimizer state")

# A mistake counts as caught if the comparison finds it in this many steps, which take seconds.
_CAUGHT_WITHIN = 4


def headline(results: Results) -> str:
    """Whether JAX computes the same as torch; empty if nothing was compared."""
    parities = ParityRecord.select(results)
    outside = [record.dtype for record in parities if record.divergence is not None]
    if not parities:
        return ""
    if outside:
        return f"JAX deviates from torch in {' and '.join(outside)}"
    dtypes = f"all {len(parities)} dtypes" if len(parities) > 1 else parities[0].dtype
    return f"JAX computes the same as torch in {dtypes}"


def use(results: Results) -> str:
    """What the comparison is good for: how many planted mistakes it catches."""
    mistakes = _mistakes(results)
    caught = f": of {len(mistakes)} planted mistakes it catches {sum(map(_caught, mistakes))}" if mistakes else ""
    return f"you port a training step and have to know that it computes the same{caught}."


def parity(results: Results) -> Section:
    """Whether JAX computes the same as torch, in each dtype."""
    compared = [(record, index) for record in ParityRecord.select(results) for index in range(len(REPORTED))]

    def once(text: Callable[[ParityRecord], str]) -> Callable[[tuple[ParityRecord, int]], str]:
        """A cell of the first line of each dtype."""
        return lambda row: "" if row[1] else text(row[0])

    def of(field: Literal["jax", "control"]) -> Callable[[tuple[ParityRecord, int]], str]:
        return lambda row: numbers.error_size(getattr(row[0].deviations[REPORTED[row[1]]], field).value)

    return Section(
        "Parity",
        [
            "How far JAX is from torch at most, and how far rounding alone takes torch from itself: *permuted "
            "references* are torch with its units renumbered. *Times rounding* is the largest ratio of JAX's deviation "
            f"to what they had reached by that step; its bound is {bound_factors(results)}.",
            Table(
                compared,
                [
                    Column("dtype", once(lambda record: record.dtype)),
                    Column("of", lambda row: _REPORTED_AS[row[1]], left=True),
                    Column("JAX", of("jax")),
                    Column("permuted references", of("control")),
                    Column(
                        "times rounding",
                        lambda row: numbers.significant(row[0].deviations[REPORTED[row[1]]].ratio.value),
                    ),
                    Column("verdict", once(lambda record: "outside" if record.divergence else "within")),
                    Column("steps", once(lambda record: str(record.steps))),
                    Column("batch", once(lambda record: str(record.batch_size))),
                ],
            ),
        ],
    )


def bound_factors(results: Results) -> str:
    """Multiples of the permuted references' deviation that bound JAX's, by dtype."""
    records = ParityRecord.select(results)
    return ", ".join(f"{numbers.count(record.times_control.value)} in {record.dtype}" for record in records)


def sections(results: Results) -> list[Section]:
    """Losses, planted mistakes, whole runs, the first step, meshes and several GPUs."""
    return [
        _losses(results),
        _planted_mistakes(results),
        _convergence(results),
        first_step(results),
        _meshes(results),
        _scaling(results),
    ]


def _losses(results: Results) -> Section:
    parities = ParityRecord.select(results)
    rows = [(record, step) for record in parities if record.dtype == "float32" for step in _shown_steps(record)]
    outside = (
        f"In {record.dtype} the first quantity outside its bound is {record.divergence}."
        for record in parities
        if record.divergence
    )
    table = Table(
        rows,
        [
            Column("step", lambda row: str(row[1])),
            Column("torch", lambda row: f"{row[0].torch[row[1]]:.7f}"),
            Column("JAX", lambda row: f"{row[0].jax[row[1]]:.7f}"),
            Column("|Δ| JAX", lambda row: numbers.error_size(_distances(row[0], row[0].jax)[row[1]])),
            Column(
                "largest |Δ| of a permuted reference",
                lambda row: numbers.error_size(max(_distances(row[0], losses)[row[1]] for losses in row[0].controls)),
            ),
        ],
    )
    return Section("", [*outside, _differences(parities), Section("", [table], fold="Losses side by side (float32)")])


def _shown_steps(record: ParityRecord) -> list[int]:
    steps = len(record.torch)
    return sorted({step for step in (0, 1, 2, 4, 9, 19, 29, 39, steps - 1) if step < steps})


def _distances(record: ParityRecord, losses: Sequence[float]) -> list[float]:
    return [abs(loss - torch) for loss, torch in zip(losses, record.torch, strict=True)]


def _differences(records: Sequence[ParityRecord]) -> Chart:
    def points(record: ParityRecord, losses: Sequence[float]) -> list[Point]:
        distances = _distances(record, losses)
        return [Point(step, distance) for step, distance in enumerate(distances) if distance > 0]

    def panel(record: ParityRecord) -> Panel:
        permuted = [point for losses in record.controls for point in points(record, losses)]
        bound = [Point(step, bound, mark=False) for step, bound in enumerate(record.bounds)]
        return Panel(
            [
                Series("permuted references", permuted, look=0, line="", hollow=True),
                Series("JAX", points(record, record.jax), look=5, line=""),
                Series("JAX's bound", bound, look=1, line="step"),
            ],
            record.dtype,
        )

    return Chart(
        "losses",
        "lines",
        [panel(record) for record in records],
        Axis("|Δ loss| to torch (nats per byte), lower is closer", log=10),
        "Difference of the loss from torch at each step: JAX (filled) and permuted references (hollow), which show "
        "the effect of rounding. The line is the bound for JAX. Steps with equal losses have no marker.",
        "Difference of the loss from torch by step, one panel for each dtype",
        places=Axis("training step"),
        share="none",
    )


def _mistakes(results: Results) -> list[MistakeRecord]:
    return [record for record in MistakeRecord.select(results) if record.mistake]


def _caught(record: MistakeRecord) -> bool:
    return record.step is not None and record.step < _CAUGHT_WITHIN


def _planted_mistakes(results: Results) -> Section:
    mistakes = _mistakes(results)
    if not mistakes:
        return Section("")
    correct = MistakeRecord.one(results, mistake="")
    passes = "passes" if correct.step is None else f"is caught too ({correct.where})"
    missed = [record.mistake for record in mistakes if not _caught(record)]
    shorter = " (A full run on a CPU plants a longer list; these are its last.)"
    number = len(mistakes)
    return Section(
        "Planted mistakes",
        [
            f"This section shows that the comparison can fail. The run plants {number} porting mistakes one at a time "
            "in the correct step, on a small model in float32, and judges them with the same bounds."
            f"{shorter if results.configuration['mutations']['last'] else ''} **{number - len(missed)} of {number} are "
            f"caught within {_CAUGHT_WITHIN} steps.** The correct step {passes}."
            + (f" Not caught: {'; '.join(missed)}." if missed else ""),
            Section("", [_mistake_table(mistakes)], fold="Each mistake, and where it is seen first"),
        ],
    )


def _mistake_table(mistakes: Sequence[MistakeRecord]) -> Table[MistakeRecord]:
    return Table(
        mistakes,
        [
            Column("mistake", "mistake"),
            Column("caught at step", lambda record: None if record.step is None else str(record.step)),
            Column("first seen in", lambda record: record.where or None),
            Column("times over the bound", lambda record: None if record.step is None else record.times.value),
        ],
    )


def _meshes(results: Results) -> Section:
    records = MeshRecord.select(results)
    if not records:
        return Section("")
    one_device, *others = records
    permuted = max(
        abs(loss - expected)
        for losses in one_device.controls
        for loss, expected in zip(losses, one_device.losses, strict=True)
    )
    largest = max(record.difference.value for record in others)
    return Section(
        "Beyond one device",
        [
            f"The same {len(one_device.losses)} steps on meshes of emulated CPU devices. The batch is divided over all "
            "devices; weights and moments are replicated along `data` and sharded along `fsdp`. Losses differ from "
            f"those of one device by at most {numbers.error_size(largest)} nats. On one device, another order of the "
            f"rows of the batch changes them by {numbers.error_size(permuted)}.",
            Table(
                records,
                [
                    Column("data × fsdp", _shape),
                    Column("largest |Δ loss| (nats)", lambda record: numbers.error_size(record.difference.value)),
                    Column("state on one device", "state"),
                    Column("collectives in the compiled step", _collectives),
                ],
            ),
        ],
    )


def _shape(record: MeshRecord | ScalingRecord) -> str:
    return f"{record.data} × {record.fsdp}"


def _collectives(record: MeshRecord | ScalingRecord) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(record.collectives.items())) or "none"


def _scaling(results: Results) -> Section:
    records = ScalingRecord.select(results)
    if not records:
        return Section("")
    asked = results.configuration["sweep"]
    sources = {record.source for record in records}
    dates = sorted({f"{source.date[:10]} at {commit_label(source.commit, source.dirty)}" for source in sources})
    measured = [(record, record.figures) for record in records if record.figures]
    return Section(
        "Several GPUs",
        [
            f"`{asked['preset']}` with {asked['batch_size']} sequences a GPU in {asked['dtype']}, attention "
            f"`{asked['attention']}`. Each mesh is timed against one GPU in the same run, in {asked['rounds']} rounds. "
            "Efficiency is the time of a step on one GPU over that on the mesh: 100 % means that the rate is "
            f"proportional to the number of GPUs. Measured on {'; '.join(dates)}.",
            # Only texts are left where every mesh failed.
            *([_scaling_table(measured)] if measured else []),
            *(f"{_shape(record)} failed: {record.failed}." for record in records if record.failed),
        ],
    )


def _scaling_table(rows: Sequence[tuple[ScalingRecord, ScalingFigures]]) -> Table[tuple[ScalingRecord, ScalingFigures]]:
    return Table(
        rows,
        [
            Column("data × fsdp", lambda row: _shape(row[0])),
            Column("tokens/s", lambda row: interval(row[1].rate)),
            Column("step", lambda row: row[1].step),
            Column("one GPU's step", lambda row: row[1].step_of_one),
            Column("efficiency", lambda row: _percent(row[1].efficiency)),
            Column("peak memory of a GPU", lambda row: row[1].peak_memory),
            Column("collectives in the compiled step", lambda row: _collectives(row[0])),
        ],
    )


def _percent(share: Quantity) -> str:
    ends = (share.value if end is None else end for end in (share.low, share.high))
    return f"{numbers.percent(share.value)} ({'–'.join(map(numbers.percent, ends))})"


def _convergence(results: Results) -> Section:
    runs = ConvergedRecord.select(results)
    if not runs:
        return Section("")
    summary, asked = ConvergenceRecord.one(results), results.configuration["convergence"]
    difference = f"{summary.difference.value:+.4f}".replace("-", "−")
    return Section(
        "Full training runs",
        [
            f"`{asked['preset']}` trains for {asked['steps']} steps at the preset's learning rate, with validation "
            f"after the last step. Both frameworks {'reach' if summary.alike else 'do not reach'} the same loss. The "
            f"mean of JAX's loss minus torch's over the seeds is {difference} bits per byte. The standard deviation of "
            f"torch's loss over the seeds is {summary.seed_noise.value:.4f}. The unigram entropy is "
            f"{summary.unigram.value:.3f} bits.",
            Table(
                runs,
                [
                    Column("seed", lambda record: str(record.seed)),
                    Column("torch, bits per held-out byte", lambda record: f"{record.torch.value:.4f}"),
                    Column("JAX", lambda record: f"{record.jax.value:.4f}"),
                ],
            ),
        ],
    )
