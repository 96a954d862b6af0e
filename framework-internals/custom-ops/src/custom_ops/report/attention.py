"""The report's section on attention, computed from the results alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchkit import Record, Results, numbers
from custom_ops.bench.cases import OURS

# Rounding of the same results dominates both errors; a tenth more is no difference between two kernels.
SAME_ERROR = 1.1


@dataclass(frozen=True)
class SpeedTarget:
    """The speed-up over PyTorch's fastest fused back end that the operator should reach from ``length`` tokens on."""

    dtype: str
    direction: str
    head_size: int
    speedup: float
    length: int = 4096


SPEED_TARGETS = (
    SpeedTarget("float32", "forward", 64, 3.0),
    SpeedTarget("float32", "forward", 128, 2.5),
    SpeedTarget("float32", "backward", 64, 1.5),
    SpeedTarget("float32", "backward", 128, 1.5),
    SpeedTarget("bfloat16", "forward", 64, 0.8),
    SpeedTarget("bfloat16", "forward", 128, 0.7),
)


def context(results: Results) -> dict[str, Any]:
    """The variables of the template. Without records of attention, every table is empty."""
    return {
        "attention_summaries": _summaries(results),
        "attention_verdicts": [text for target in SPEED_TARGETS if (text := _verdict(results, target))],
        "attention_tables": {
            direction: [_speed_row(results, record) for record in own(results, direction=direction)]
            for direction in ("forward", "backward")
        },
        "attention_accuracy_rows": _accuracy_rows(results),
        "attention_kernel_rows": [_kernel_row(record) for record in results.select("attention kernel")],
        "attention_kernel_length": next((r.labels["length"] for r in results.select("attention kernel")), None),
        "attention_memory_rows": [_memory_row(record) for record in results.select("attention memory")],
        "attention_tokens": max(
            (_length(record) * int(record.labels["batch"]) for record in results.select("attention")), default=0
        ),
        "same_error": SAME_ERROR,
    }


def finding(results: Results) -> str | None:
    """A sentence about the longest sequences; None without records of attention."""
    records = own(results, direction="forward")
    if not records:
        return None
    longest = max(_length(record) for record in records)
    speeds = {
        dtype: _range(r["speedup"].value for r in records if r.labels["dtype"] == dtype and _length(r) == longest)
        for dtype in dict.fromkeys(str(r.labels["dtype"]) for r in records if _length(r) == longest)
    }
    clauses = " and ".join(f"{found} ({dtype})" for dtype, found in speeds.items())
    return (
        f"On sequences of {numbers.count(longest)} tokens, the forward pass of attention runs at {clauses} the speed "
        "of PyTorch's fastest fused back end."
    )


def own(results: Results, **labels: Any) -> list[Record]:
    """The records of this package's attention."""
    return results.select("attention", form=OURS, **labels)


def best_of_torch(results: Results, record: Record) -> Record:
    """The record of torch's fastest back end on the problem of ``record``."""
    same = {key: value for key, value in record.labels.items() if key not in ("form", "best", "clock")}
    return results.one("attention", best=True, **same)


def ceilings(results: Results, dtype: str) -> dict[str, float]:
    """Measured matrix-product rates in operations per second, by name; the kernels are compared with the first."""
    rates = {str(record.labels["dtype"]): record["rate"].value for record in results.select("product limit")}
    found = {f"{dtype} product": rates[dtype]} if dtype in rates else {}
    if dtype == "float32" and "float16" in rates:  # on a GPU, a float32 product is three float16 products
        return {"float16 product ÷ 3": rates["float16"] / 3, **found}
    return found


def _length(record: Record) -> int:
    return int(record.labels["length"])


def _range(values: Iterable[float]) -> str:
    """The smallest and the largest ratio, or one number if both print the same."""
    in_order = sorted(values)
    ends = dict.fromkeys(numbers.significant(value) for value in (in_order[0], in_order[-1]))
    return f"{'–'.join(ends)}×"


def _error_ratio(results: Results, record: Record) -> float:
    return record["error"].value / best_of_torch(results, record)["error"].value


def _summaries(results: Results) -> list[str]:
    """One clause per dtype and direction, over all shapes."""
    clauses = []
    for dtype in dict.fromkeys(str(record.labels["dtype"]) for record in own(results)):
        for direction in ("forward", "backward"):
            records = own(results, dtype=dtype, direction=direction)
            if records:
                speeds = _range(record["speedup"].value for record in records)
                errors = _range(_error_ratio(results, record) for record in records)
                clauses.append(f"{dtype}, {direction}: {speeds} as fast as PyTorch, at {errors} its error")
    return clauses


def _verdict(results: Results, target: SpeedTarget) -> str | None:
    """A sentence that says whether a target is met; None if this run has no such shapes."""
    records = own(results, dtype=target.dtype, direction=target.direction, head_size=target.head_size)
    records = [record for record in records if _length(record) >= target.length]
    if not records:
        return None
    speeds = [record["speedup"].value for record in records]
    errors = [_error_ratio(results, record) for record in records]
    if max(errors) > SAME_ERROR:
        verdict = "not met, because the error is larger"
    else:
        verdict = "met" if min(speeds) >= target.speedup else "not met"
    rivals = "/".join(dict.fromkeys(str(best_of_torch(results, record).labels["form"]) for record in records))
    return (
        f"{target.dtype}, {target.direction}, head size {target.head_size}, {numbers.count(target.length)} tokens "
        f"and more: {_range(speeds)} as fast as {rivals}, at {_range(errors)} its error; the target is at least "
        f"{target.speedup}×: **{verdict}**"
    )


def _speed_row(results: Results, record: Record) -> tuple[str, ...]:
    peer, limits = best_of_torch(results, record), ceilings(results, str(record.labels["dtype"]))
    return (
        str(record.labels["dtype"]),
        "causal" if record.labels["causal"] else "none",
        str(record.labels["head_size"]),
        numbers.count(_length(record)),
        numbers.quantity(record["time"]),
        numbers.with_unit(record["rate"].value, "FLOP/s"),
        numbers.percent(record["rate"].value / next(iter(limits.values())), 0) if limits else "–",
        numbers.error_size(record["error"].value),
        str(peer.labels["form"]),
        numbers.with_unit(peer["time"].value, "s"),
        numbers.with_unit(peer["rate"].value, "FLOP/s"),
        numbers.error_size(peer["error"].value),
        numbers.quantity(record["speedup"]),
    )


def _accuracy_rows(results: Results) -> list[tuple[str, ...]]:
    """One row per dtype and length, with the larger of the errors with and without a mask."""
    rows = []
    for dtype, length in dict.fromkeys(
        (str(record.labels["dtype"]), _length(record)) for record in results.select("attention accuracy")
    ):

        def largest(form: str, names: Sequence[str], dtype: str = dtype, length: int = length) -> str:
            records = results.select("attention accuracy", dtype=dtype, length=length, form=form)
            return numbers.error_size(max((record[name].value for record in records for name in names), default=0.0))

        columns: list[tuple[str, Sequence[str]]] = [
            (form, names) for names in (("out",), ("dq", "dk", "dv")) for form in (OURS, "torch")
        ]
        rows.append((dtype, numbers.count(length), *(largest(form, names) for form, names in columns)))
    return rows


def _kernel_row(record: Record) -> tuple[str, ...]:
    return (
        str(record.labels["kernel"]),
        str(record.labels["dtype"]),
        str(record.labels["head_size"]),
        numbers.quantity(record["time"]),
        numbers.with_unit(record["rate"].value, "FLOP/s"),
        numbers.quantity(record["speedup"]),
    )


def _memory_row(record: Record) -> tuple[str, ...]:
    figures = (numbers.quantity(record[name]) for name in ("operand", "saved", "peak"))
    return str(record.labels["form"]), str(record.labels["dtype"]), numbers.count(_length(record)), *figures
