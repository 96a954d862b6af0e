"""The speed targets of the operators, met and missed, and the worst results of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchkit import Record, Results, numbers
from custom_ops.bench.cases import COMPILED, OURS
from custom_ops.bench.training import BASELINE
from custom_ops.report.attention import best_of_torch, own, range_of, same_error, tokens_of

MISALIGNED = "from the second element on"


@dataclass(frozen=True)
class AttentionTarget:
    """The speed-up over PyTorch's fastest fused back end that attention should reach, at no larger error.

    Attributes:
        dtype: Dtype of the tensors.
        direction: ``"forward"`` or ``"backward"``.
        speedup: The speed-up to reach at every length and with either mask.
        shortest: Fewest tokens of a sequence.
        longest: Most tokens of a sequence; None if unlimited.
        head_size: Elements of a head; None for every head size of the run.
    """

    dtype: str
    direction: str
    speedup: float
    shortest: int
    longest: int | None = None
    head_size: int | None = None

    @property
    def what(self) -> str:
        """The target's shapes, as text."""
        heads = "" if self.head_size is None else f", head size {self.head_size}"
        tokens = f", {numbers.count(self.shortest)} tokens" if self.shortest > 1 else ""
        more = " and more" if self.shortest > 1 and self.longest is None else ""
        return f"attention, {self.direction}, {self.dtype}{heads}{tokens}{more}"

    def records(self, results: Results) -> list[Record]:
        """The records of this package's attention at these shapes."""
        return [
            record
            for record in own(results, dtype=self.dtype, direction=self.direction)
            if self.shortest <= tokens_of(record) <= (self.longest or tokens_of(record))
            and self.head_size in (None, record.labels["head_size"])
        ]


ATTENTION_ON_A_GPU = (
    AttentionTarget("float32", "forward", 3.0, 4096, head_size=64),
    AttentionTarget("float32", "forward", 2.5, 4096, head_size=128),
    AttentionTarget("float32", "backward", 1.5, 4096, head_size=64),
    AttentionTarget("float32", "backward", 1.5, 4096, head_size=128),
    AttentionTarget("bfloat16", "forward", 0.95, 4096, head_size=64),
    AttentionTarget("bfloat16", "forward", 0.7, 4096, head_size=128),
    AttentionTarget("bfloat16", "backward", 0.95, 4096),
    AttentionTarget("bfloat16", "forward", 0.95, 1024, longest=1024),
    AttentionTarget("bfloat16", "backward", 0.95, 1024, longest=1024),
)


def rows(results: Results) -> list[tuple[str, ...]]:
    """One row per target that this run measured: what, the bound, the worst value, whether it is met.

    Attention and bias_gelu on a CPU have targets of their own, see :mod:`custom_ops.report.cpu_targets`.
    """
    found = []
    if results.environment.gpu:
        found = [
            _attention_row(results, target, records)
            for target in ATTENTION_ON_A_GPU
            if (records := target.records(results))
        ]
    for what, bound, show, values in _operators(results):
        if measured := list(values):
            value, where = min(measured)
            text = f"{show(value)}{f' ({where})' if where else ''}"
            found.append((what, f"≥ {show(bound)}", text, "yes" if round(value, 3) >= bound else "**no**"))
    return found


def _attention_row(results: Results, target: AttentionTarget, records: list[Record]) -> tuple[str, ...]:
    worst = min(records, key=lambda record: record["speedup"].value)
    peer = best_of_torch(results, worst).labels["form"]
    if not all(same_error(results, record) for record in records):
        met = "**no**, the error is larger"
    else:
        met = "yes" if worst["speedup"].value >= target.speedup else "**no**"
    speeds = range_of(record["speedup"].value for record in records)
    return target.what, f"≥ {target.speedup:.2f}×", f"{speeds} ({peer}'s speed)", met


Measured = Iterable[tuple[float, str]]


def _operators(results: Results) -> Iterator[tuple[str, float, Callable[[float], str], Measured]]:
    """The targets of the other operators: what, the bound, how to show it, and the values with their cases."""

    def times(value: float) -> str:
        return numbers.with_unit(value, "×") if value != 1 else "1.00×"

    def share(value: float) -> str:
        return numbers.percent(value, 0)

    for op, bound in (("bias_gelu", 0.95), ("bias_gelu_backward", 0.90)) if results.environment.gpu else ():
        values = [(found, str(record.labels["dtype"])) for record, found in shares(results, op)]
        yield f"{op}, of the memory limit", bound, share, values
    adds = [(record["speedup"].value, str(record.labels["dtype"])) for record in largest(results, "vector_add")]
    yield "vector_add, against torch.add", 0.98, times, adds
    for record in results.select("layout", form="custom_ops.vector_add"):
        layout = str(record.labels["layout"])
        if layout != "contiguous":
            what = "misaligned operands" if layout == MISALIGNED else layout
            yield f"vector_add, {what}, against torch.add", 0.95, times, [(record["speedup"].value, "")]
    for record in results.select("training"):
        if record.labels["part"] != BASELINE:
            what = f"the eager training step with {record.labels['part']}, against torch"
            yield what, 1.0, times, [(record["speedup"].value, "")]


def largest(results: Results, op: str) -> list[Record]:
    """This package's records of an operator at the largest size, one per dtype."""
    records = results.select("speed", op=op, form=OURS)
    most = max((int(record.labels["count"]) for record in records), default=0)
    return [record for record in records if record.labels["count"] == most]


def shares(results: Results, op: str) -> Iterator[tuple[Record, float]]:
    """The share of the memory limit at the largest size."""
    for record in largest(results, op):
        for limit in results.select("memory limit", traffic=record.labels["limit"]):
            yield record, record["rate"].value / limit["bandwidth"].value


def beside_the_strongest(results: Results, record: Record) -> tuple[float, str]:
    """The speed of an operator relative to the faster of torch's operators and torch.compile, and which it is."""
    same = {key: record.labels[key] for key in ("op", "dtype", "count")}
    peers = {
        str(r.labels["form"]): r for form in ("torch", COMPILED) for r in results.select("speed", form=form, **same)
    }
    name = min(peers, key=lambda form: peers[form]["time"].value)
    return peers[name]["time"].value / record["time"].value, "torch's operators" if name == "torch" else name


def finding(results: Results) -> str:
    """The best and the worst of the run beside the strongest other implementation; at most two sentences."""
    best = [text for text in (_operators_clause(results), _attention_clause(results)) if text]
    worst = [text for text in (_worst_attention(results), _worst_other(results)) if text]
    if not best:
        return "This run's measurements failed."
    return f"{'; '.join(best)}." + (f" Its worst: {' and '.join(worst)}." if worst else "")


def headline(results: Results) -> str:
    """Both directions of attention over every shape, and the share of the memory limit: the line of the index."""
    gelu = [numbers.percent(share, 0) for record, share in shares(results, "bias_gelu")][:1]
    parts = [f"bias_gelu reaches {share} of the memory limit" for share in gelu]
    speeds = [
        f"{range_of(record['speedup'].value for record in records)} ({dtype})"
        for dtype in dict.fromkeys(str(record.labels["dtype"]) for record in own(results))
        if (records := own(results, dtype=dtype))
    ]
    if speeds:
        parts.append(f"attention, forward and backward, runs at {' and '.join(speeds)} the speed of PyTorch's fastest")
    return f"{'; '.join(parts)}." if parts else finding(results)


def _operators_clause(results: Results) -> str | None:
    for record in largest(results, "bias_gelu"):
        if record.labels["dtype"] == "float32":
            speed, peer = beside_the_strongest(results, record)
            of_limit = [share for other, share in shares(results, "bias_gelu") if other is record]
            share = f" and {numbers.percent(of_limit[0], 0)} of the memory limit" if of_limit else ""
            return (
                f"bias_gelu on {numbers.count(int(record.labels['count']))} float32 elements reaches "
                f"{numbers.with_unit(speed, '×')} the speed of {peer}{share}"
            )
    return None


def _attention_clause(results: Results) -> str | None:
    records = own(results, direction="forward")
    if not records:
        return None
    longest = max(map(tokens_of, records))
    speeds = {
        dtype: range_of(r["speedup"].value for r in records if r.labels["dtype"] == dtype and tokens_of(r) == longest)
        for dtype in dict.fromkeys(str(r.labels["dtype"]) for r in records if tokens_of(r) == longest)
    }
    clauses = " and ".join(f"{found} ({dtype})" for dtype, found in speeds.items())
    return f"attention forward on {numbers.count(longest)} tokens {clauses} that of PyTorch's fastest back end"


def _worst_attention(results: Results) -> str | None:
    record = min(own(results), key=lambda record: record["speedup"].value, default=None)
    if record is None:
        return None
    labels, speed = record.labels, numbers.with_unit(record["speedup"].value, "×")
    return (
        f"attention {labels['direction']} at {speed} ({labels['dtype']}, head size {labels['head_size']}, "
        f"{numbers.count(tokens_of(record))} tokens)"
    )


def _worst_other(results: Results) -> str | None:
    """Misaligned operands, or the training step with one of the operators or both."""
    found = [
        (record["speedup"].value, "misaligned operands at {} of torch.add")
        for record in results.select("layout", form="custom_ops.vector_add", layout=MISALIGNED)
    ]
    found += [
        (
            record["speedup"].value,
            f"the `{record.labels['preset']}` training step with {record.labels['part']} at {{}} of torch's",
        )
        for record in results.select("training")
        if record.labels["part"] != BASELINE
    ]
    if not found:
        return None
    speed, what = min(found)
    return what.format(numbers.with_unit(speed, "×"))
