"""The report's section on attention, computed from the results alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchkit import Quantity, Record, Results, numbers
from custom_ops.bench.cases import OURS

# Rounding of the same results dominates both errors; a tenth more is no difference between two kernels.
SAME_ERROR = 1.1


def context(results: Results) -> dict[str, Any]:
    """The variables of the template. Without records of attention, every table is empty."""
    return {
        "attention_summary_rows": _summary_rows(results),
        "attention_tables": {
            direction: [_speed_row(results, record) for record in own(results, direction=direction)]
            for direction in ("forward", "backward")
        },
        "attention_accuracy_rows": _accuracy_rows(results),
        "attention_kernel_rows": [_kernel_row(record) for record in results.select("attention kernel")],
        "attention_kernel_length": next((r.labels["length"] for r in results.select("attention kernel")), None),
        "attention_memory_rows": [_memory_row(record) for record in results.select("attention memory")],
        "resident_rows": _resident_rows(results),
        "attention_tokens": min(
            (tokens_of(record) * int(record.labels["batch"]) for record in results.select("attention")), default=0
        ),
        "same_error": SAME_ERROR,
    }


def own(results: Results, *, name: str = "attention", **labels: Any) -> list[Record]:
    """The records of this package's attention; ``name`` is that of the records."""
    return results.select(name, form=OURS, **labels)


def best_of_torch(results: Results, record: Record) -> Record:
    """The record of torch's fastest back end on the problem of ``record``."""
    same = {key: value for key, value in record.labels.items() if key not in ("form", "best", "clock")}
    return results.one(record.name, best=True, **same)


def ceilings(results: Results, dtype: str) -> dict[str, float]:
    """Measured matrix-product rates in operations per second, by name; the kernels are compared with the first."""
    rates = {str(record.labels["dtype"]): record["rate"].value for record in results.select("product limit")}
    found = {f"{dtype} product": rates[dtype]} if dtype in rates else {}
    if dtype == "float32" and "float16" in rates:  # on a GPU, a float32 product is three float16 products
        return {"float16 product ÷ 3": rates["float16"] / 3, **found}
    return found


def tokens_of(record: Record) -> int:
    """Tokens of a sequence."""
    return int(record.labels["length"])


def range_of(values: Iterable[float]) -> str:
    """The smallest and the largest ratio, or one number if both print the same."""
    in_order = sorted(values)
    ends = dict.fromkeys(numbers.significant(value) for value in (in_order[0], in_order[-1]))
    return f"{'–'.join(ends)}×"


def same_error(results: Results, record: Record) -> bool:
    """Whether the error is at most :data:`SAME_ERROR` times that of torch's fastest back end."""
    return _error_ratio(results, record) <= SAME_ERROR


def _error_ratio(results: Results, record: Record) -> float:
    return record["error"].value / best_of_torch(results, record)["error"].value


def _summary_rows(results: Results) -> list[tuple[str, ...]]:
    """One row per dtype and direction, over all shapes: the worst beside the best."""
    rows = []
    for dtype in dict.fromkeys(str(record.labels["dtype"]) for record in own(results)):
        limits = ceilings(results, dtype)
        for direction in ("forward", "backward"):
            records = sorted(own(results, dtype=dtype, direction=direction), key=lambda record: record["speedup"].value)
            if not records:
                continue
            shares = sorted(record["rate"].value / next(iter(limits.values())) for record in records) if limits else []
            rows.append(
                (
                    direction,
                    dtype,
                    *(f"{numbers.quantity(r['speedup'])}, {shape_of(r)}" for r in (records[0], records[-1])),
                    f"{numbers.percent(shares[0], 0)} to {numbers.percent(shares[-1], 0)}" if shares else "–",
                    range_of(_error_ratio(results, record) for record in records),
                )
            )
    return rows


def shape_of(record: Record) -> str:
    """Tokens, head size and mask, as text."""
    mask = ", causal" if record.labels["causal"] else ""
    return f"{numbers.count(tokens_of(record))} tokens, head size {record.labels['head_size']}{mask}"


def gains(results: Results) -> Iterator[tuple[Quantity, str]]:
    """The speed over PyTorch's fastest back end per dtype and direction: the range over all shapes, and its name."""
    for dtype in dict.fromkeys(str(record.labels["dtype"]) for record in own(results)):
        for direction in ("forward", "backward"):
            speeds = [record["speedup"] for record in own(results, dtype=dtype, direction=direction)]
            if speeds:
                low, high = min(speed.low or speed.value for speed in speeds), max(s.high or s.value for s in speeds)
                clause = f"flash_attention, {direction}, in {dtype}, {range_of(s.value for s in speeds)} as fast as"
                yield Quantity(speeds[0].value, "×", low, high), f"{clause} PyTorch's fastest back end"


def _speed_row(results: Results, record: Record) -> tuple[str, ...]:
    peer, limits = best_of_torch(results, record), ceilings(results, str(record.labels["dtype"]))
    return (
        str(record.labels["dtype"]),
        "causal" if record.labels["causal"] else "none",
        str(record.labels["head_size"]),
        numbers.count(tokens_of(record)),
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
        (str(record.labels["dtype"]), tokens_of(record)) for record in results.select("attention accuracy")
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
    return str(record.labels["form"]), str(record.labels["dtype"]), numbers.count(tokens_of(record)), *figures


def _resident_rows(results: Results) -> list[tuple[str, ...]]:
    """One row per form and length; the last column stays the same if the memory is linear in the tokens."""
    return [
        (
            str(record.labels["form"]),
            numbers.count(tokens_of(record)),
            *(numbers.quantity(record[name]) for name in ("operand", "forward", "peak")),
            f"{numbers.significant(record['peak'].value / record['operand'].value)}×",
        )
        for record in results.select("attention resident memory")
    ]
