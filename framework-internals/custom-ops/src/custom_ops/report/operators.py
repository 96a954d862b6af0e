"""What the report says of the operators other than attention, computed from the results alone."""

from __future__ import annotations

from typing import Any

from benchkit import Record, Results, numbers
from benchkit.report import Axis, Cell, Chart, Column, Limit, Panel, Point, Section, Series, Share, Table
from custom_ops.bench import avx2
from custom_ops.bench.cases import COMPILED, OURS
from custom_ops.report.attention import without_interval
from custom_ops.report.targets import largest, share_of_limit

BEYOND_LIMIT = (
    "More than 100 % of the limit is possible: the limit is the rate of one kernel, and another access pattern can "
    "suit the memory better."
)


def answer(results: Results) -> list[Section]:
    """The memory-bound operators at the largest size, and bias_gelu beyond a CPU's cache."""
    speeds = largest(results)
    count = max((int(record.labels["count"]) for record in speeds), default=0)
    return [
        Section(
            "",
            [
                f"The memory-bound operators on {numbers.count(count)} elements:",
                Table(
                    speeds,
                    [
                        Column("operator", "op"),
                        Column("dtype", "dtype", left=True),
                        Column("time", "time"),
                        Column("bandwidth", "rate"),
                        Column("of the limit", lambda record: _percent(share_of_limit(results, record))),
                        Column("torch", lambda record: _of(results, record, "torch", "time")),
                        Column("torch.compile", lambda record: _of(results, record, COMPILED, "time"), optional=True),
                        Column("speed over torch", "speedup"),
                    ],
                    beyond=BEYOND_LIMIT,
                ),
            ],
        ),
        Section(
            "",
            [
                "bias_gelu on tensors beyond the last-level cache, with results in memory that is in use, beside a "
                "copy of the same bytes in the same rounds:",
                Table(
                    results.select("beyond the cache", form=OURS),
                    [
                        Column("operator", "op"),
                        Column("dtype", "dtype", left=True),
                        Column("elements", _count),
                        Column("time", "time"),
                        Column("bandwidth", "rate"),
                        Column("of the copy", lambda record: _percent(record["share"].value)),
                        Column("torch", lambda record: _of(results, record, "torch", "time")),
                        Column("speed over torch", "speedup"),
                    ],
                    beyond="More than 100 % of the copy is possible: other accesses can suit the memory better.",
                ),
            ],
        ),
    ]


def _count(record: Record) -> int:
    return int(record.labels["count"])


def _percent(share: float | None) -> Share | None:
    return None if share is None else Share(share, 0)


def _of(results: Results, record: Record, form: str, value: str) -> Cell:
    """A value of another form of the same operator at the same size; None if it was not measured."""
    same = {key: label for key, label in record.labels.items() if key in ("op", "dtype", "count", "layout")}
    return next((other.values.get(value) for other in results.select(record.name, form=form, **same)), None)


def calls_and_sizes(results: Results) -> list[Section]:
    """What a call costs by each way to reach the kernel, and the operators over sizes."""
    return [
        _calls(results),
        Section("How fast the operators are", [_sizes_chart(results)], fold="The operators over sizes"),
    ]


def _calls(results: Results) -> Section:
    calls = results.select("call")
    counts = [_count(record) for record in calls]
    smallest, largest = min(counts, default=0), max(counts, default=0)

    def measured(value: str, count: int, grad: bool) -> Any:
        def cell(wrapper: Record) -> Cell:
            same = results.select("call", form=wrapper.labels["form"], count=count, grad=grad)
            return same[0][value] if same else None

        return cell

    nodes = any(record.labels.get("autograd") == "compiled nodes" for record in results.select("serving"))
    derivatives = (
        "those of the elementwise operators and bias_gelu are compiled separately, for this version of torch only."
        if nodes
        else "derivatives are registered from Python, which accounts for the cost of a gradient."
    )
    return Section(
        "",
        [
            Section(
                "What a call costs",
                [
                    Table(
                        results.select("wrapper") if calls else [],
                        [
                            Column("reached through", "form"),
                            Column(f"N = {smallest}", measured("time", smallest, False)),
                            Column("× torch.add", measured("ratio", smallest, False)),
                            Column(f"N = {smallest}, with a gradient", measured("time", smallest, True)),
                            Column(f"N = {numbers.count(largest)}", measured("time", largest, False)),
                            Column("differentiable", "differentiable"),
                            Column("full graph", "compilable"),
                        ],
                    ),
                    "On small operands, where a call costs more than torch.add, a custom kernel gains only if it "
                    'replaces several calls. "Full graph" says whether `torch.compile(fullgraph=True)` succeeds. The '
                    f"stable ABI has no autograd nodes: {derivatives}",
                    _calls_chart(results, smallest),
                ],
            ),
            Section(
                "Calls on one element",
                [
                    Table(
                        results.select("one element", form=OURS),
                        [
                            Column("operator", "op"),
                            Column("time", "time"),
                            Column("torch", lambda record: _of(results, record, "torch", "time")),
                            Column("speed over torch", "speedup"),
                        ],
                    )
                ],
            ),
        ],
        fold="What a call costs",
    )


def _calls_chart(results: Results, count: int) -> Chart:
    forms = [str(record.labels["form"]) for record in results.select("wrapper")]
    series = [
        Series(
            name,
            [
                Point(form, record["time"])
                for form in forms
                for record in results.select("call", form=form, count=count, grad=grad)
            ],
        )
        for grad, name in ((False, "no gradient needed"), (True, "an operand requires a gradient"))
    ]
    return Chart(
        "calls",
        "bars",
        [Panel(series)],
        Axis(f"µs a call, {count} element (lower is better)", scale=1e6),
        caption="The time of one call from Python, for each way to reach the same kernel. Bars are medians; lines "
        "reach from the 20th to the 80th percentile.",
        alt="Bars: time of a call, by the wrapper around the same kernel",
        legend=2,
    )


def _sizes_chart(results: Results) -> Chart:
    """Bandwidth over size, with one panel per operator."""
    records = results.select("speed", dtype="float32")
    forms = list(dict.fromkeys(str(record.labels["form"]) for record in records))

    def panel(op: str) -> Panel:
        own = [record for record in records if record.labels["op"] == op]
        traffic = str(own[0].labels["limit"])
        series = [
            Series(
                form,
                [Point(_count(r), r["rate"].value) for r in own if r.labels["form"] == form],
                own=form == OURS,
            )
            for form in forms
        ]
        limits = [
            Limit(limit["bandwidth"].value, "memory limit", left=True)
            for limit in results.select("memory limit", traffic=traffic)
        ]
        return Panel([line for line in series if line.points], f"{op}: {traffic}", limits)

    rates = [record["rate"].value for record in records]
    counts = sorted({_count(record) for record in records})
    low, high = 0.8 * min(rates, default=1.0), 2.0 * max(rates, default=1.0)
    replayed = any(record.labels["clock"] == "cuda-graph" for record in records)
    timed = "kernels alone, replayed from a CUDA graph" if replayed else "whole calls"
    how = "torch.compile compiles torch's operators anew for each size. " if COMPILED in forms else ""
    return Chart(
        "speed",
        "lines",
        [panel(op) for op in dict.fromkeys(str(record.labels["op"]) for record in records)],
        Axis("GB/s (higher is better)", unit="B/s", scale=1e-9, log=10, low=low, high=high),
        caption=f"The bytes that a fused kernel must move, divided by the time of each form ({timed}), in float32. "
        f"{how}The dashed line is the memory limit; small operands fit in a cache and may exceed it.",
        alt="Lines: bandwidth of each operator over its elements",
        places=Axis("elements", log=2, ticks={count: numbers.significant(count, 2) for count in counts[::3]}),
    )


def details(results: Results) -> list[Section]:
    """Launches, variants of kernels, memory, correctness and layouts: folded."""
    return [
        _linears(results), _launches(results), _variants(results), _memory(results), _correctness(results),
        _layouts(results),
    ]  # fmt: skip


def _linears(results: Results) -> Section:
    records = [*results.select("linear"), *results.select(avx2.LINEAR)]
    sizes = [numbers.count(int(records[0].labels[name])) for name in ("rows", "depth", "columns")] if records else []
    return Section(
        "Linear layers in 16 bits",
        [
            f"Rows, depth and columns {' × '.join(sizes)}, with a bias; backward, the gradients of all three operands. "
            "Only dtypes whose products torch sums in plain loops, because oneDNN has none for the processor (or for "
            "AVX2, to which a process was limited): elsewhere `custom_ops.linear` is torch's.",
            Table(
                records,
                [
                    Column("form", "form"),
                    Column("dtype", "dtype", left=True),
                    Column("limited to", lambda record: "AVX2" if record.name == avx2.LINEAR else None, optional=True),
                    Column("direction", "direction", left=True),
                    Column("time", "time"),
                    Column("rate", lambda record: without_interval(record["rate"])),
                    Column("of float32's speed", "share"),
                    Column("speed over torch", "speedup"),
                ],
            ),
        ],
        fold="Linear layers in 16 bits",
    )


def _launches(results: Results) -> Section:
    def launched(prefix: str) -> Any:
        return lambda record: ", ".join(
            numbers.count(record[f"{prefix}{name}"].value) for name in ("predicted_launches", "launches")
        )

    fusions, convolutions = results.select("fusion"), results.select("convolution")
    count = max(map(_count, fusions), default=0)
    images, side = (convolutions[0].labels[name] for name in ("batch", "side")) if convolutions else (0, 0)
    counted = [record for record in results.records if "predicted_launches" in record.values]
    agree = all(record["launches"].value == record["predicted_launches"].value for record in counted)
    return Section(
        "Launches and bytes, predicted and measured",
        [
            Section(
                "",
                [
                    f'{numbers.count(count)} float32 elements. Launches are given as "predicted, counted". The '
                    f"predictions for this package's operators {'agree' if agree else 'do not agree'} with the "
                    "profiler's counts.",
                    Table(
                        fusions,
                        [
                            Column("operator", "op"),
                            Column("torch's launches", launched("unfused_")),
                            Column("launches", launched("")),
                            Column("torch's bytes", "unfused_bytes"),
                            Column("bytes", "bytes"),
                            Column("speed-up predicted", "predicted_speedup"),
                            Column("measured", lambda record: _speedup(results, record)),
                        ],
                    ),
                ],
            ),
            Section(
                "",
                [
                    f"Convolution, batch-norm and ReLU on {images} images with 64 channels and {side} × {side} pixels. "
                    "The bytes are those moved after the convolution:",
                    Table(
                        convolutions,
                        [
                            Column("form", "form"),
                            Column("launches", lambda record: numbers.count(record["launches"].value)),
                            Column("bytes after it", "bytes"),
                            Column("time", "time"),
                            Column("speed over the modules", "speedup"),
                        ],
                    ),
                ],
            ),
        ],
        fold="Launches and bytes",
    )


def _speedup(results: Results, record: Record) -> Cell:
    return next((speed.values.get("speedup") for speed in results.select("speed", form=OURS, **record.labels)), None)


def _variants(results: Results) -> Section:
    best: dict[tuple[Any, Any], Record] = {}  # for each dtype and width the best number of blocks
    for record in results.select("plan"):
        key = (record.labels["dtype"], record.labels["across"])
        if key not in best or record["time"].value < best[key]["time"].value:
            best[key] = record
    return Section(
        "Variants of the bias_gelu kernels",
        [
            Section(
                "",
                [
                    "Forward, by the width of each thread's memory accesses:",
                    Table(
                        results.select("access"),
                        [
                            Column("access", "access"),
                            Column("dtype", "dtype", left=True),
                            Column("time", "time"),
                            Column("bandwidth", "rate"),
                            Column("speed over one element", "speedup"),
                        ],
                    ),
                ],
            ),
            Section(
                "",
                [
                    "Backward, by the number of threads across a row, each with its best number of blocks per "
                    "multiprocessor:",
                    Table(
                        list(best.values()),
                        [
                            Column("dtype", "dtype"),
                            Column("threads across", "across"),
                            Column("blocks", "blocks"),
                            Column("time", "time"),
                            Column("bandwidth", "rate"),
                        ],
                    ),
                ],
            ),
        ],
        fold="Variants of the bias_gelu kernels",
    )


def _memory(results: Results) -> Section:
    return Section(
        "Memory",
        [
            "gelu(x + bias), forward and backward, without x and the bias themselves. The peak includes their "
            "gradients:",
            Table(
                results.select("peak memory"),
                [
                    Column("form", "form"),
                    Column("dtype", "dtype", left=True),
                    Column("x", "operand"),
                    Column("kept for the backward pass", "saved"),
                    Column("peak", "peak"),
                ],
            ),
        ],
        fold="Memory of bias_gelu",
    )


def _correctness(results: Results) -> Section:
    records = results.select("correctness")
    equal = all(record["differing"].value == 0 for record in records if record.labels["op"] == "vector_add")
    return Section(
        "Correctness",
        [
            Section(
                "",
                [
                    f"vector_add {'is bit-equal to torch.add' if equal else 'differs from torch.add'}. A sum that is "
                    "rounded once is off by at most half a unit. axpb rounds once (the 16-bit dtypes once more, from "
                    "float32); `alpha * x + b` rounds twice.",
                    Table(
                        records,
                        [
                            Column("operator", "op"),
                            Column("dtype", "dtype", left=True),
                            Column("elements", lambda record: numbers.count(record["elements"].value)),
                            Column("differ from torch's", lambda record: numbers.count(record["differing"].value)),
                            Column("largest error, ulp", lambda record: _ulps(record["error"].value)),
                            Column("torch's, ulp", lambda record: _ulps(record["torch_error"].value)),
                        ],
                    ),
                    "An ulp is the distance between neighbouring numbers of the dtype at the exact result. Thousands "
                    "of ulp of torch's two operators are cancellation, not a mistake: if `alpha * x` and `b` nearly "
                    "cancel, half an ulp from rounding the product is many ulp of the small difference. In bfloat16 "
                    "`1.25 * -104.5 + 131` is 0.375; with the product first rounded to −131 it is 0, which is 192 ulp "
                    "away. axpb does not round the product, so its error stays at half an ulp.",
                ],
            ),
            Section(
                "",
                [
                    "bias_gelu and its gradients, ‖error‖ / ‖exact‖ against float64 (the reference is torch's own "
                    "float64 result, so its error is 0):",
                    Table(
                        results.select("accuracy"),
                        [
                            Column("result", "result"),
                            Column("dtype", "dtype", left=True),
                            Column("error", lambda record: f"{record['error'].value:.2e}"),
                            Column("torch's", lambda record: f"{record['torch_error'].value:.2e}"),
                        ],
                    ),
                ],
            ),
        ],
        fold="Correctness",
    )


def _ulps(error: float) -> str:
    """Small errors with four decimals, which tell one rounding from two."""
    return f"{error:.4f}" if error < 10 else numbers.count(error)


def _layouts(results: Results) -> Section:
    records = results.select("layout", form="custom_ops.vector_add")
    count = max(map(_count, records), default=0)
    return Section(
        "Operands with an awkward layout",
        [
            f"{numbers.count(count)} float32 elements. A second launch is the copy of an operand that is not "
            "contiguous; torch.add reads it through its strides.",
            Table(
                records,
                [
                    Column("layout", "layout"),
                    Column("launches predicted", lambda record: numbers.count(record["predicted_launches"].value)),
                    Column("counted", lambda record: numbers.count(record["launches"].value)),
                    Column("bytes", "bytes"),
                    Column("time", "time"),
                    Column("torch.add", lambda record: _of(results, record, "torch.add", "time")),
                    Column("speed over torch.add", "speedup"),
                ],
            ),
        ],
        fold="Operands with an awkward layout",
    )
