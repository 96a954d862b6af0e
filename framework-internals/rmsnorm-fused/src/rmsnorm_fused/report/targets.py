"""The speed targets of this package on an NVIDIA H200, and their values in a run.

Shares are of the copy limit of the same run: one read and one write forward, two reads and one write backward, two
reads and two writes with a residual. A target that names no back end applies to the best one of this package. A target
for several shapes takes the shape where that best one is worst. The table also shows the other implementations' values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchkit import Record, Results
from rmsnorm_fused.bench.candidates import COPY, EAGER, OWN

GPU = "H200"
SHAPE = ([32768, 4096], "bfloat16")


@dataclass(frozen=True)
class Measured:
    """The value of a target in a run.

    Attributes:
        value: The value to compare with the target.
        where: The implementation, and the shape if the target covers several.
    """

    value: float
    where: str


Measure = Callable[[Results, Sequence[str]], Measured | None]


@dataclass(frozen=True)
class Target:
    """One line of the table of targets.

    Attributes:
        what: What is to be reached.
        bound: The number to reach.
        kind: ``"share"`` of the limit or ``"times"`` as fast are minima; ``"seconds"`` is a maximum.
        measure: Finds the value for some implementations in the records; None if the records lack it.
        own: The implementations that are to reach it.
    """

    what: str
    bound: float
    kind: Literal["share", "times", "seconds"]
    measure: Measure
    own: tuple[str, ...] = OWN

    def met(self, measured: Measured) -> bool:
        """Whether the value reaches the bound, in the digits that the table shows."""
        if self.kind == "seconds":
            return measured.value <= self.bound
        return round(measured.value, 3) >= self.bound


def applies(results: Results) -> bool:
    """Whether a run has the machine, the shape and the dtype of the targets."""
    gpu = results.environment.gpu
    shape = results.configuration["headline"], results.configuration["dtype"]
    return gpu is not None and GPU in gpu.name and shape == SHAPE


def others(records: Iterable[Record]) -> list[str]:
    """The names of the implementations outside this package."""
    names = dict.fromkeys(str(record.labels["implementation"]) for record in records)
    return [name for name in names if name not in (COPY, *OWN)]


def fastest(records: Iterable[Record], names: Sequence[str]) -> Record | None:
    """The record with the shortest time among those of some implementations; None if there is none."""
    return min(_of(records, names), key=lambda record: record["time"].value, default=None)


def _of(records: Iterable[Record], names: Sequence[str]) -> list[Record]:
    return [record for record in records if record.labels["implementation"] in names]


def _best(records: Iterable[Record], value: str) -> Record | None:
    return max((r for r in records if value in r.values), key=lambda record: record[value].value, default=None)


def _shapes(records: Iterable[Record]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((int(r.labels["rows"]), int(r.labels["columns"])) for r in records))


def _with_shape(record: Record) -> str:
    return f"{record.labels['implementation']} at {record.labels['rows']} × {record.labels['columns']}"


def _at_headline(which: str, value: str, group: str = "headline") -> Measure:
    def measure(results: Results, names: Sequence[str]) -> Measured | None:
        best = _best(_of(results.select(which, group=group), names), value)
        return None if best is None else Measured(best[value].value, str(best.labels["implementation"]))

    return measure


def _over_widths(which: str, columns: range) -> Measure:
    def measure(results: Results, names: Sequence[str]) -> Measured | None:
        records = [
            record
            for group in ("headline", "widths")
            for record in _of(results.select(which, group=group), names)
            if record.labels["columns"] in columns
        ]
        best = [
            _best((r for r in records if r.labels["columns"] == width), "fraction") for _, width in _shapes(records)
        ]
        found = [Measured(record["fraction"].value, _with_shape(record)) for record in best if record is not None]
        return min(found, key=lambda measured: measured.value, default=None)

    return measure


def _in_dtype(which: str, dtype: str) -> Measure:
    def measure(results: Results, names: Sequence[str]) -> Measured | None:
        best = _best(_of(results.select(which, group="dtypes", dtype=dtype), names), "fraction")
        return None if best is None else Measured(best["fraction"].value, str(best.labels["implementation"]))

    return measure


def _quantised(results: Results, names: Sequence[str]) -> Measured | None:
    best = _best(_of(results.select("quantised"), names), "fraction")
    return None if best is None else Measured(best["fraction"].value, str(best.labels["implementation"]))


def _training_step(mode: str) -> Measure:
    def measure(results: Results, names: Sequence[str]) -> Measured | None:
        best = _best((r for r in results.select("training", mode=mode) if r.labels["norm"] in names), "speedup")
        return None if best is None else Measured(best["speedup"].value, str(best.labels["norm"]))

    return measure


def _small_kernels(results: Results, names: Sequence[str]) -> Measured | None:
    """The shortest time of all other implementations divided by that of ``names``, at the worst shape."""
    found = []
    for rows, columns in _shapes(results.select("forward", group="batches")):
        records = results.select("forward", group="batches", rows=rows, columns=columns)
        here = fastest(records, names)
        there = fastest(records, [name for name in (*others(records), *OWN) if name not in names])
        if here is not None and there is not None:
            found.append(Measured(there["time"].value / here["time"].value, _with_shape(here)))
    return min(found, key=lambda measured: measured.value, default=None)


def _small_calls(results: Results, names: Sequence[str]) -> Measured | None:
    found = []
    for rows, columns in _shapes(results.select("call")):
        best = fastest(results.select("call", rows=rows, columns=columns, gradient=False), names)
        if best is not None:
            found.append(Measured(best["time"].value, _with_shape(best)))
    return max(found, key=lambda measured: measured.value, default=None)


TARGETS = (
    Target("forward, CUDA", 0.97, "share", _at_headline("forward", "fraction"), ("cuda",)),
    Target("forward, Triton", 0.97, "share", _at_headline("forward", "fraction"), ("triton",)),
    Target("backward, CUDA", 0.93, "share", _at_headline("backward", "fraction"), ("cuda",)),
    Target("backward, Triton", 0.84, "share", _at_headline("backward", "fraction"), ("triton",)),
    Target("forward, every width", 0.95, "share", _over_widths("forward", range(512, 262145))),
    Target("backward, every width up to 131072", 0.92, "share", _over_widths("backward", range(512, 131073))),
    Target("backward, 262144 columns", 0.90, "share", _over_widths("backward", range(262144, 262145))),
    Target("forward with a residual", 1.00, "share", _at_headline("forward", "fraction", "add")),
    Target("backward with a residual", 0.95, "share", _at_headline("backward", "fraction", "add")),
    Target("small batches, kernel, against the fastest of the others", 1.0, "times", _small_kernels),
    Target("small batches, call from Python", 10e-6, "seconds", _small_calls),
    Target(f"forward, against the {EAGER}", 12.0, "times", _at_headline("forward", "speedup")),
    Target(f"backward, against the {EAGER}", 16.0, "times", _at_headline("backward", "speedup")),
    Target("forward in float32", 0.97, "share", _in_dtype("forward", "float32")),
    Target("backward in float32, CUDA", 0.93, "share", _in_dtype("backward", "float32"), ("cuda",)),
    Target("backward in float32, Triton", 0.93, "share", _in_dtype("backward", "float32"), ("triton",)),
    Target("a float8 result", 0.90, "share", _quantised),
    Target("the eager training step, against nn.RMSNorm", 1.0, "times", _training_step("eager")),
    Target("the compiled training step, against nn.RMSNorm", 1.0, "times", _training_step("compiled")),
)
