"""What the report says of attention, computed from the results alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchkit import Quantity, Record, Results, numbers
from benchkit.report import Axis, Chart, Column, Limit, Panel, Point, Section, Series, Share, Table
from benchkit.timing.limits import product_ceiling
from custom_ops.bench.attention import MASKED
from custom_ops.bench.cases import OURS

# Rounding of the same results dominates both errors; a tenth more is no difference between two kernels.
SAME_ERROR = 1.1

DIRECTIONS = ("forward", "backward")

_BEYOND_CEILING = (
    "More than 100 % of the ceiling is possible: the ceiling is the rate of PyTorch's own square matrix products, and "
    "the products inside this package's kernel are faster than those."
)


@dataclass(frozen=True)
class Attended:
    """This package's attention on one problem, beside the fastest of torch's back ends in the same rounds."""

    own: Record
    peer: Record
    ceiling: float | None  # of products of its dtype, in operations per second

    @property
    def dtype(self) -> str:
        """Dtype of the tensors."""
        return str(self.own.labels["dtype"])

    @property
    def direction(self) -> str:
        """One of :data:`DIRECTIONS`."""
        return str(self.own.labels["direction"])

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        return int(self.own.labels["length"])

    @property
    def shape(self) -> str:
        """Tokens, head size and mask, as text."""
        mask = ", causal" if self.own.labels["causal"] else ""
        return f"{numbers.count(self.tokens)} tokens, head size {self.own.labels['head_size']}{mask}"

    @property
    def speedup(self) -> float:
        """Over the peer, paired."""
        return self.own["speedup"].value

    @property
    def share(self) -> float | None:
        """Of the ceiling; None if that was not measured."""
        return None if self.ceiling is None else self.own["rate"].value / self.ceiling

    @property
    def error_ratio(self) -> float:
        """The error over the peer's."""
        return self.own["error"].value / self.peer["error"].value

    @property
    def same_error(self) -> bool:
        """Whether the error is at most :data:`SAME_ERROR` times the peer's."""
        return self.error_ratio <= SAME_ERROR


def attended(results: Results, *, name: str = "attention", **labels: Any) -> list[Attended]:
    """This package's attention with these labels, as the records ``name`` have it."""
    pairs = []
    for record in results.select(name, form=OURS, **labels):
        same = {key: value for key, value in record.labels.items() if key not in ("form", "best", "clock")}
        limit = next(iter(ceilings(results, str(record.labels["dtype"])).values()), None)
        pairs += [Attended(record, peer, limit) for peer in results.select(name, best=True, **same)]
    return pairs


def dtypes_of(attended: Iterable[Attended]) -> list[str]:
    """The dtypes, each once."""
    return list(dict.fromkeys(pair.dtype for pair in attended))


def ceilings(results: Results, dtype: str) -> dict[str, float]:
    """Measured matrix-product rates in operations per second, by name; the kernels are compared with the first."""
    products = [product_ceiling(results, dtype)]
    named = {f"{record.labels['dtype']} product": record["rate"].value for record in products if record}
    if dtype == "float32" and (halves := product_ceiling(results, "float16")):
        # On a GPU, a float32 product is three float16 products.
        return {"float16 product ÷ 3": halves["rate"].value / 3, **named}
    return named


def _what_the_ceiling_is(results: Results, dtypes: Sequence[str]) -> str:
    said = "The ceiling is the rate of matrix products alone in the dtype."
    records = {dtype: product_ceiling(results, dtype) for dtype in dtypes}
    widened = [dtype for dtype, record in records.items() if record and record.labels["dtype"] != dtype]
    if widened:
        said += (
            f" For {' and '.join(widened)} it is float32's, because PyTorch's products in 16 bits are slower here, "
            "and operands can be widened."
        )
    if results.environment.gpu:
        said += " For float32 it is a third of float16's, because each product is three float16 products."
    return said


def range_of(values: Iterable[float]) -> str:
    """The smallest and the largest ratio, or one number if both print the same."""
    in_order = sorted(values)
    ends = dict.fromkeys(numbers.significant(value) for value in (in_order[0], in_order[-1]))
    return f"{'–'.join(ends)}×"


def without_interval(quantity: Quantity) -> str:
    """A quantity's value and unit."""
    return numbers.with_unit(quantity.value, quantity.unit)


def summary(results: Results) -> Table[list[Attended]]:
    """One row per dtype and direction, over all shapes: the worst beside the best."""
    every = attended(results)
    groups = [
        sorted((p for p in every if (p.dtype, p.direction) == key), key=lambda pair: pair.speedup)
        for key in ((dtype, direction) for dtype in dtypes_of(every) for direction in DIRECTIONS)
    ]

    def with_shape(pair: Attended) -> str:
        return f"{numbers.quantity(pair.own['speedup'])}, {pair.shape}"

    def of_ceiling(pairs: list[Attended]) -> str | None:
        shares = sorted(pair.share for pair in pairs if pair.share is not None)
        return f"{numbers.percent(shares[0], 0)} to {numbers.percent(shares[-1], 0)}" if shares else None

    return Table(
        [pairs for pairs in groups if pairs],
        [
            Column("pass", lambda pairs: pairs[0].direction),
            Column("dtype", lambda pairs: pairs[0].dtype, left=True),
            Column("slowest beside it", lambda pairs: with_shape(pairs[0])),
            Column("fastest beside it", lambda pairs: with_shape(pairs[-1])),
            Column("of the ceiling", of_ceiling),
            Column("error beside its", lambda pairs: range_of(pair.error_ratio for pair in pairs)),
        ],
        beyond=_BEYOND_CEILING,
    )


def chart(results: Results) -> Chart:
    """Operations per second over the length: one column per dtype and head size, forward above backward."""
    every = attended(results)
    heads = list(dict.fromkeys((pair.dtype, pair.own.labels["head_size"]) for pair in every))
    fastest = max((pair.own["rate"].value for pair in every), default=0.0)
    scale, unit = (1e-12, "TFLOP/s") if fastest > 1e12 else (1e-9, "GFLOP/s")

    def panel(direction: str, dtype: str, head_size: Any) -> Panel:
        pairs = [
            pair
            for pair in every
            if (pair.direction, pair.dtype, pair.own.labels["head_size"]) == (direction, dtype, head_size)
        ]
        series = []
        for causal in (False, True):
            chosen = [pair for pair in pairs if pair.own.labels["causal"] == causal]
            mask = ", causal" if causal else ""
            for own, name in ((True, "custom_ops"), (False, "PyTorch's best")):
                points = [Point(pair.tokens, (pair.own if own else pair.peer)["rate"].value) for pair in chosen]
                series.append(Series(name + mask, points, own=own, look=0 if own else 1, line=":" if causal else "-"))
        limits = [Limit(rate, name) for name, rate in ceilings(results, dtype).items()]
        rates = [record["rate"].value for pair in pairs for record in (pair.own, pair.peer)]
        highest = max([*rates, *(limit.value for limit in limits)], default=1.0)
        label = f"{unit} (higher is better)" if (dtype, head_size) == heads[0] else ""
        axis = Axis(label, "FLOP/s", scale, low=0, high=1.15 * highest)
        return Panel(series, f"{direction}, {dtype}, head {head_size}", limits, values=axis)

    return Chart(
        "attention",
        "lines",
        [panel(direction, *head) for direction in DIRECTIONS for head in heads],
        Axis(unit, scale=scale),
        caption="Attention beside PyTorch's fastest back end over the length of the sequence: the operations of the "
        "definition, divided by the time. The dashed line is the rate of matrix products alone in the same run.",
        alt="Lines by pass, dtype, head size: operations per second of attention over tokens, beside PyTorch's best",
        places=Axis("tokens of a sequence", log=2, ticks=sorted({pair.tokens for pair in every})),
        columns=max(len(heads), 1),
        share="none",
        size=(2.5 * len(heads) + 0.8, 6.0),
    )


def sections(results: Results) -> list[Section]:
    """Every shape, the kernels, their memory and their errors: folded."""
    return [_every_shape(results), _features(results), _kernels_and_memory(results), _errors(results)]


def _features(results: Results) -> Section:
    def own(record: Record) -> Record:
        labels = {name: value for name, value in record.labels.items() if name != "form"}
        return results.select("attention feature", form=OURS, **labels)[0]

    rivals = [record for record in results.select("attention feature") if "speedup" in record.values]
    return Section(
        "Windows, packed sequences and a bias",
        [
            "One batch with a causal mask, of which a window or ragged sequences leave less. Tiles that no query sees "
            "are not computed; operations are those on the scores that are seen. FlexAttention is compiled, and its "
            f'block mask is made beforehand; "{MASKED}" is `scaled_dot_product_attention` with a boolean mask, or with '
            "the bias, beside which there is no causal mask; gradients are those of q, k and v.",
            Table(
                rivals,
                [
                    Column("feature", "feature", left=True),
                    Column("dtype", "dtype", left=True),
                    Column("head size", "head_size"),
                    Column("rows", lambda record: int(record.labels["length"])),
                    Column("direction", "direction", left=True),
                    Column("time", lambda record: own(record)["time"]),
                    Column("rate", lambda record: without_interval(own(record)["rate"])),
                    Column("beside", "form", left=True),
                    Column("its time", lambda record: without_interval(record["time"])),
                    Column("speed over it", "speedup"),
                ],
            ),
        ],
        fold="Windows, packed sequences and a bias",
    )


def _every_shape(results: Results) -> Section:
    every = attended(results)
    tokens = min((pair.tokens * int(pair.own.labels["batch"]) for pair in every), default=0)
    columns = [
        Column[Attended]("mask", lambda pair: "causal" if pair.own.labels["causal"] else "none"),
        Column[Attended]("head size", lambda pair: str(pair.own.labels["head_size"])),
        Column[Attended]("tokens", lambda pair: pair.tokens),
        Column[Attended]("time", lambda pair: pair.own["time"]),
        Column[Attended]("of the ceiling", lambda pair: None if pair.share is None else Share(pair.share, 0)),
        Column[Attended]("error", lambda pair: numbers.error_size(pair.own["error"].value)),
        Column[Attended]("PyTorch's best", lambda pair: str(pair.peer.labels["form"])),
        Column[Attended]("its time", lambda pair: without_interval(pair.peer["time"])),
        Column[Attended]("its error", lambda pair: numbers.error_size(pair.peer["error"].value)),
        Column[Attended]("speed over it", lambda pair: pair.own["speedup"]),
    ]
    return Section(
        "Attention",
        [
            f"A batch has {numbers.count(tokens)} tokens, in many short sequences or a long one, or is one longer "
            "sequence. PyTorch's fused back ends that support the operands were timed in the same rounds, and the "
            "fastest one is named. Operations are 4·S²·D per head (half with a causal mask), and 2.5 times as many "
            f"backward. {_what_the_ceiling_is(results, dtypes_of(every))} Errors are ‖x − exact‖ / ‖exact‖ of the "
            "first head against float64; backward, the largest over dq, dk and dv.",
            Section(
                "",
                [
                    Section(
                        "",
                        [
                            f"The {direction} pass, {dtype}:",
                            Table(
                                [pair for pair in every if (pair.direction, pair.dtype) == (direction, dtype)],
                                columns,
                                beyond=_BEYOND_CEILING,
                            ),
                        ],
                    )
                    for direction in DIRECTIONS
                    for dtype in dtypes_of(every)
                ],
            ),
        ],
        fold="Attention at every shape",
    )


def _kernels_and_memory(results: Results) -> Section:
    kernels, resident = results.select("attention kernel"), results.select("attention resident memory")
    length = next((int(record.labels["length"]) for record in kernels), 0)
    return Section(
        "",
        [
            Section(
                "The attention kernels",
                [
                    f'Forward, two sequences of {numbers.count(length)} tokens, no mask. "math" is PyTorch with the '
                    'scores written to memory; "chosen" is the kernel that the operator selects; "naive" loops over '
                    "the keys with plain multiply-adds.",
                    Table(
                        kernels,
                        [
                            Column("kernel", "kernel"),
                            Column("dtype", "dtype", left=True),
                            Column("head size", "head_size"),
                            Column("time", "time"),
                            Column("rate", lambda record: without_interval(record["rate"])),
                            Column("speed over math", "speedup"),
                        ],
                    ),
                ],
            ),
            Section(
                "Memory of attention",
                [
                    "Forward and backward of one sequence, without q, k and v themselves. The peak includes their "
                    "gradients.",
                    Table(
                        results.select("attention memory"),
                        [
                            Column("form", "form"),
                            Column("dtype", "dtype", left=True),
                            Column("tokens", lambda record: int(record.labels["length"])),
                            Column("q", "operand"),
                            Column("kept for the backward pass", "saved"),
                            Column("peak", "peak"),
                        ],
                    ),
                ],
            ),
            Section(
                "Memory of attention",
                [
                    "By how much a process of its own grows (its largest resident set), float32, one sequence, "
                    "without a mask and without q, k, v and the gradient of the output. Both passes include the "
                    "gradients. The memory is linear in the tokens if it stays the same multiple of q.",
                    Table(
                        resident,
                        [
                            Column("form", "form"),
                            Column("tokens", lambda record: int(record.labels["length"])),
                            Column("q", "operand"),
                            Column("forward", "forward"),
                            Column("both passes", "peak"),
                            Column("over q", lambda r: f"{numbers.significant(r['peak'].value / r['operand'].value)}×"),
                        ],
                    ),
                ],
            ),
        ],
        fold="Kernels and memory of attention",
    )


def _errors(results: Results) -> Section:
    def largest(form: str, names: Sequence[str]) -> Column[tuple[str, int]]:
        def cell(row: tuple[str, int]) -> str | None:
            records = results.select("attention accuracy", dtype=row[0], length=row[1], form=form)
            errors = [record[name].value for record in records for name in names]
            return numbers.error_size(max(errors)) if errors else None

        return Column("PyTorch's" if form == "torch" else names[0] if len(names) == 1 else "gradients", cell)

    records = results.select("attention accuracy")
    return Section(
        "Errors of attention over the length",
        [
            "‖x − exact‖ / ‖exact‖ of one head against float64. Each entry is the larger of the errors with and "
            "without a causal mask; for the gradients, the largest over dq, dk and dv. PyTorch's error is that of its "
            "flash back end, or of the next one that supports the dtype.",
            Table(
                list(dict.fromkeys((str(record.labels["dtype"]), int(record.labels["length"])) for record in records)),
                [
                    Column("dtype", lambda row: row[0]),
                    Column("tokens", lambda row: row[1]),
                    *(largest(form, names) for names in (("out",), ("dq", "dk", "dv")) for form in (OURS, "torch")),
                ],
            ),
        ],
        fold="Errors of attention over the length",
    )
