"""The speed targets of this package, and what a run reached of them.

Shares are of the copy limit of the same run: one read and one write forward, two reads and one write backward, two
reads and two writes with a residual. On an NVIDIA H200 a target that names no back end applies to the best one of this
package, and a target for several shapes takes the shape where that best one is worst; the table also shows the other
implementations' values. On a CPU the targets are those of the C++ operators alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from benchkit import Record, Results, numbers
from benchkit.report import Reached, Target
from rmsnorm_fused.bench.candidates import COPY, EAGER, OWN
from rmsnorm_fused.report.queries import by_shape, fastest, name_of, others, records_of, shape_of

GPU = "H200"
SHAPE = ([32768, 4096], "bfloat16")

# What some implementations reach: the value, and the implementation with the shape where it is worst.
Measure = Callable[[Results, Sequence[str]], tuple[float, str] | None]


def reached(results: Results) -> list[Reached]:
    """What a run reached of each target of its machine; empty for a machine or shape without targets."""
    if results.environment.gpu is None:
        return list(_on_a_cpu(results))
    if GPU not in results.environment.gpu.name:
        return []
    if (results.configuration["headline"], results.configuration["dtype"]) != SHAPE:
        return []
    elsewhere = others((*results.select("forward"), *results.select("call")))
    lines = []
    for target, measure, own in ON_A_GPU:
        here, there = measure(results, own), measure(results, elsewhere)
        peer = None if there is None else f"{target.show(there[0])} ({there[1]})"
        value, where = (None, "") if here is None else here
        lines.append(Reached(target, value, where, peer=peer))
    return lines


def _worst(select: Callable[[Results], list[Record]], figure: str = "fraction", shapes: bool = False) -> Measure:
    """The largest figure of the implementations; of several shapes, the one where it is smallest."""

    def measure(results: Results, names: Sequence[str]) -> tuple[float, str] | None:
        records = [record for record in records_of(select(results), names) if figure in record.values]
        cases = by_shape(records).values() if shapes else filter(None, [records])
        best = [max(timed, key=lambda record: record[figure].value) for timed in cases]
        where = _with_shape if shapes else name_of
        return min(((record[figure].value, where(record)) for record in best), default=None)

    return measure


def _reached_in(name: str, figure: str = "fraction", **labels: str) -> Measure:
    return _worst(lambda results: results.select(name, **labels), figure)


def _over_widths(which: str, narrowest: int, widest: int) -> Measure:
    def select(results: Results) -> list[Record]:
        records = results.select(which, group="headline") + results.select(which, group="widths")
        return [record for record in records if narrowest <= int(record.labels["columns"]) <= widest]

    return _worst(select, shapes=True)


def _small_kernels(results: Results, names: Sequence[str]) -> tuple[float, str] | None:
    """The shortest time of all other implementations divided by that of ``names``, at the worst shape."""
    speeds = []
    for records in by_shape(results.select("forward", group="batches")).values():
        here = fastest(records, names)
        there = fastest(records, [name for name in (*others(records), *OWN) if name not in names])
        if here is not None and there is not None:
            speeds.append((there["time"].value / here["time"].value, _with_shape(here)))
    return min(speeds, default=None)


def _small_calls(results: Results, names: Sequence[str]) -> tuple[float, str] | None:
    """The shortest time of a call without gradients, at the worst shape."""
    shapes = by_shape(records_of(results.select("call", gradient=False), names)).values()
    calls = [record for records in shapes if (record := fastest(records, names)) is not None]
    return max(((record["time"].value, _with_shape(record)) for record in calls), default=None)


def _with_shape(record: Record) -> str:
    return f"{name_of(record)} at {shape_of(record)}"


def _share(what: str, bound: float) -> Target:
    return Target(what, bound, digits=1)


def _times(what: str, bound: float) -> Target:
    return Target(what, bound, kind="times")


_CUDA, _TRITON = ("cuda",), ("triton",)

ON_A_GPU: tuple[tuple[Target, Measure, Sequence[str]], ...] = (
    (_share("forward, CUDA", 0.97), _reached_in("forward", group="headline"), _CUDA),
    (_share("forward, Triton", 0.97), _reached_in("forward", group="headline"), _TRITON),
    (_share("backward, CUDA", 0.93), _reached_in("backward", group="headline"), _CUDA),
    (_share("backward, Triton", 0.84), _reached_in("backward", group="headline"), _TRITON),
    (_share("forward, every width", 0.95), _over_widths("forward", 512, 262144), OWN),
    (_share("backward, every width up to 131072", 0.92), _over_widths("backward", 512, 131072), OWN),
    (_share("backward, 262144 columns", 0.90), _over_widths("backward", 262144, 262144), OWN),
    (_share("forward with a residual", 1.00), _reached_in("forward", group="add"), OWN),
    (_share("backward with a residual", 0.95), _reached_in("backward", group="add"), OWN),
    (_times("small batches, kernel, against the fastest of the others", 1.0), _small_kernels, OWN),
    (Target("small batches, call from Python", 10e-6, kind="seconds"), _small_calls, OWN),
    (_times(f"forward, against the {EAGER}", 12.0), _reached_in("forward", "speedup", group="headline"), OWN),
    (_times(f"backward, against the {EAGER}", 16.0), _reached_in("backward", "speedup", group="headline"), OWN),
    (_share("forward in float32", 0.97), _reached_in("forward", group="dtypes", dtype="float32"), OWN),
    (_share("backward in float32, CUDA", 0.93), _reached_in("backward", group="dtypes", dtype="float32"), _CUDA),
    (_share("backward in float32, Triton", 0.93), _reached_in("backward", group="dtypes", dtype="float32"), _TRITON),
    (_share("a float8 result", 0.90), _reached_in("quantised"), OWN),
    (_times("the eager training step, against nn.RMSNorm", 1.0), _reached_in("training", "speedup", mode="eager"), OWN),
    (
        _times("the compiled training step, against nn.RMSNorm", 1.0),
        _reached_in("training", "speedup", mode="compiled"),
        OWN,
    ),
)

ON_A_CPU = {
    ("forward", "float32"): Target("rms_norm, forward, float32", 0.90, 0.97),
    ("backward", "float32"): Target("rms_norm, backward, float32", 0.85, 0.95),
    ("forward", "bfloat16"): Target("rms_norm, forward, bfloat16", 0.80, 0.95),
    ("backward", "bfloat16"): Target("rms_norm, backward, bfloat16", 0.75, 0.90),
}
_LIMITS = {"forward": "1 read 1 write", "backward": "2 reads 1 write"}


def _on_a_cpu(results: Results) -> Iterator[Reached]:
    for (which, dtype), target in ON_A_CPU.items():
        for own in results.select("operator", **{"pass": which}, dtype=dtype, implementation="cpp"):
            copy = results.one("operator", **{**own.labels, "implementation": COPY})
            limits = results.select("memory limit", traffic=_LIMITS[which])
            why = f"the operator moves {_rate(own, limits)}, the copy {_rate(copy, limits)}."
            yield Reached(replace(target, what=f"{target.what}, {shape_of(own)}"), own["fraction"].value, why=why)


def _rate(record: Record, limits: Sequence[Record]) -> str:
    """The rate beside the memory limit, which a copy within the caches exceeds."""
    rate = record["bandwidth"].value
    shares = [numbers.percent(rate / limit["bandwidth"].value, 0) for limit in limits]
    return numbers.with_unit(rate, "B/s") + "".join(f" ({share} of the memory limit)" for share in shares)
