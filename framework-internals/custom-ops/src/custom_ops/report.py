"""The report, from the results alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure as MatplotlibFigure

from benchkit import Quantity, Record, Results, numbers
from benchkit.plotting import COLOURS, HATCHES, MARKERS, draw_limit, new_figure
from benchkit.report import Figure, ReportSpec
from custom_ops.roads.wrappers import SHIPPED

OURS = "custom_ops.vector_add"
_AS_FAST = 0.95  # of torch.add's speed, where a size is called as fast as it


def _context(results: Results) -> dict[str, Any]:
    serving = results.one("serving")
    counts = [_count(record) for record in results.select("call")]
    smallest, largest = min(counts), max(counts)
    bare = results.one("call", form="pybind11 function", count=smallest, grad=False)["time"].value
    shipped = results.one("call", form=SHIPPED, count=smallest, grad=False)["time"].value
    fused = results.one("fusion", form="custom_ops.axpb")
    return {
        "serving": serving,
        "build_rows": [_build_row(record) for record in results.select("build")],
        "call_rows": _call_rows(results, smallest, largest),
        "smallest": smallest,
        "largest": largest,
        "python_registration": numbers.with_unit(shipped - bare, "s"),
        "limit": _limit(results),
        "size_rows": [_size_row(results, record) for record in results.select("bandwidth", form=OURS)],
        "clock": results.select("bandwidth", form=OURS)[0].labels["clock"],
        "as_fast": _as_fast_from(results),
        "as_fast_share": numbers.percent(_AS_FAST, 0),
        "correctness_rows": [_correctness_row(record) for record in results.select("correctness")],
        "bit_equal": _bit_equal(results),
        "fusion_rows": [_fusion_row(record) for record in results.select("fusion")],
        "fusion_count": _count(fused),
        "fusion_verdict": _fusion_verdict(fused),
        "layout_rows": _layout_rows(results),
        "layout_count": _count(results.select("layout")[0]),
        "launches_agree": _launches_agree(results),
    }


def _finding(results: Results) -> str:
    top = _largest(results.select("bandwidth", form=OURS, dtype="float32"))
    share = top["rate"].value / _limit(results).value
    smallest = min(_count(record) for record in results.select("call"))
    times = {
        form: numbers.with_unit(results.one("call", form=form, count=smallest, grad=False)["time"].value, "s")
        for form in ("torch.add", "pybind11 function", SHIPPED)
    }
    dtypes = len(results.select("correctness", op="vector_add"))
    exact = "bit-equal to torch.add" if _bit_equal(results) else "not bit-equal to torch.add"
    return (
        f"vector_add is {exact} over the {dtypes} dtypes tried and runs at "
        f"{numbers.quantity(top['speedup'])} its speed on {numbers.count(_count(top))} float32 elements "
        f"({numbers.percent(share, 0)} of the 2-reads-1-write limit); from Python, a call on {smallest} element costs "
        f"{times['torch.add']} as torch.add, {times['pybind11 function']} as a bare pybind11 function and "
        f"{times[SHIPPED]} as an operator registered with autograd."
    )


def _count(record: Record) -> int:
    return int(record.labels["count"])


def _limit(results: Results) -> Quantity:
    return results.one("memory limit", traffic="2 reads 1 write")["bandwidth"]


def _largest(records: Sequence[Record]) -> Record:
    return max(records, key=_count)


def _bit_equal(results: Results) -> bool:
    return all(record["differing"].value == 0 for record in results.select("correctness", op="vector_add"))


def _as_fast_from(results: Results) -> str:
    """From which size on the operator is never slower than the share of torch.add's speed, per dtype, as a clause."""
    clauses = []
    for dtype in dict.fromkeys(record.labels["dtype"] for record in results.select("bandwidth", form=OURS)):
        records = sorted(results.select("bandwidth", form=OURS, dtype=dtype), key=_count)
        slow = [index for index, record in enumerate(records) if record["speedup"].value < _AS_FAST]
        first = slow[-1] + 1 if slow else 0
        clauses.append(
            f"from {numbers.count(_count(records[first]))} elements on in {dtype}"
            if first < len(records)
            else f"at no size tried in {dtype}"
        )
    return ", ".join(clauses)


def _build_row(record: Record) -> tuple[str, ...]:
    wheel = record.values.get("wheel")
    needs = {"just-in-time": "yes", "ahead-of-time": "no"}[str(record.labels["road"])]
    return (
        str(record.labels["road"]),
        numbers.quantity(record["build"]),
        numbers.quantity(record["load"]),
        numbers.quantity(record["library"]),
        needs,
        f"`{record.data['wheel']}`, {numbers.quantity(wheel)}" if wheel else "the sources",
    )


def _call_rows(results: Results, smallest: int, largest: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for wrapper in results.select("wrapper"):
        form = wrapper.labels["form"]
        small = results.one("call", form=form, count=smallest, grad=False)
        graded = results.one("call", form=form, count=smallest, grad=True)
        large = results.one("call", form=form, count=largest, grad=False)
        rows.append(
            (
                str(form),
                numbers.quantity(small["time"]),
                numbers.quantity(small["ratio"]),
                numbers.quantity(graded["time"]),
                numbers.quantity(large["time"]),
                "yes" if wrapper.labels["differentiable"] else "no",
                "yes" if wrapper.labels["compilable"] else "no",
            )
        )
    return rows


def _size_row(results: Results, record: Record) -> tuple[str, ...]:
    labels = {"dtype": record.labels["dtype"], "count": record.labels["count"]}
    peer = results.one("bandwidth", form="torch.add", **labels)
    in_place = results.one("bandwidth", form="torch.add, out=", **labels)
    return (
        str(labels["dtype"]),
        numbers.count(_count(record)),
        numbers.quantity(record["rate"]),
        numbers.quantity(peer["rate"]),
        numbers.quantity(in_place["rate"]),
        numbers.quantity(record["speedup"]),
        numbers.quantity(record["over_bare"]),
    )


def _correctness_row(record: Record) -> tuple[str, ...]:
    return (
        str(record.labels["op"]),
        str(record.labels["dtype"]),
        numbers.count(record["elements"].value),
        numbers.count(record["differing"].value),
        f"{record['error'].value:.4f}",
        f"{record['torch_error'].value:.4f}",
    )


def _fusion_row(record: Record) -> tuple[str, ...]:
    return (
        f"`{record.labels['form']}`",
        numbers.count(record["predicted_launches"].value),
        numbers.count(record["launches"].value),
        numbers.quantity(record["bytes"]),
        numbers.quantity(record["predicted_speedup"]),
        numbers.quantity(record["speedup"]),
        numbers.quantity(record["time"]),
    )


def _fusion_verdict(fused: Record) -> str:
    speedup, predicted = fused["speedup"], fused["predicted_speedup"].value
    low, high = speedup.low or speedup.value, speedup.high or speedup.value
    relation = "more than" if low > predicted else "less than" if high < predicted else "as much as"
    return (
        f"The bytes predict {numbers.quantity(fused['predicted_speedup'])}; the fused kernel gives "
        f"{numbers.quantity(speedup)}, {relation} they say."
    )


def _layout_rows(results: Results) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for record in results.select("layout", form=OURS):
        peer = results.one("layout", form="torch.add", layout=record.labels["layout"])
        rows.append(
            (
                str(record.labels["layout"]),
                numbers.count(record["predicted_launches"].value),
                numbers.count(record["launches"].value),
                numbers.quantity(record["bytes"]),
                numbers.quantity(record["time"]),
                numbers.quantity(peer["time"]),
                numbers.quantity(record["speedup"]),
            )
        )
    return rows


def _launches_agree(results: Results) -> bool:
    counted = [record for record in results.records if "predicted_launches" in record.values]
    return all(record["launches"].value == record["predicted_launches"].value for record in counted)


def _figures(results: Results) -> list[Figure]:
    clock = results.select("bandwidth", form=OURS)[0].labels["clock"]
    timed = "the kernels alone, replayed from a CUDA graph" if clock == "cuda-graph" else "whole calls"
    return [
        Figure(
            "bandwidth",
            f"Bytes moved over time against size ({timed}); small operands lie in a cache and may pass the limit of "
            "memory.",
            lambda: _bandwidth_figure(results),
        ),
        Figure(
            "calls",
            "What one call costs Python, by the way the same built function is reached; bars are medians, lines reach "
            "from the 20th to the 80th percentile.",
            lambda: _calls_figure(results),
        ),
    ]


def _bandwidth_figure(results: Results) -> MatplotlibFigure:
    figure, axes = new_figure(7.5, 4.8)
    dtypes = list(dict.fromkeys(record.labels["dtype"] for record in results.select("bandwidth")))
    forms = ("torch.add", "torch.add, out=", OURS)
    for dtype, line in zip(dtypes, ("-", ":"), strict=False):
        for index, form in enumerate(forms):
            records = results.select("bandwidth", form=form, dtype=dtype)
            rates = [record["rate"] for record in records]
            axes.errorbar(
                [_count(record) for record in records],
                [rate.value / 1e9 for rate in rates],
                yerr=[
                    [(rate.value - (rate.low or rate.value)) / 1e9 for rate in rates],
                    [((rate.high or rate.value) - rate.value) / 1e9 for rate in rates],
                ],
                label=f"{form}, {dtype}",
                color=COLOURS[index],
                marker=MARKERS[index],
                markersize=4,
                linestyle=line,
                linewidth=1.4,
                elinewidth=0.8,
            )
    draw_limit(axes, _limit(results).value / 1e9, "2 reads 1 write, measured")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("elements")
    axes.set_ylabel("3 · N · itemsize / time (GB/s)")
    figure.legend(loc="outside lower center", ncols=len(dtypes), fontsize=8)
    return figure


def _calls_figure(results: Results) -> MatplotlibFigure:
    figure, axes = new_figure(7.5, 3.6)
    forms = [str(record.labels["form"]) for record in results.select("wrapper")]
    smallest = min(_count(record) for record in results.select("call"))
    for offset, (grad, label) in enumerate(
        ((False, "no gradient asked for"), (True, "an operand requires a gradient"))
    ):
        times = [results.one("call", form=form, count=smallest, grad=grad)["time"] for form in forms]
        axes.barh(
            [index + (offset - 0.5) * 0.38 for index in range(len(forms))],
            [time.value * 1e6 for time in times],
            height=0.36,
            xerr=[
                [(time.value - (time.low or time.value)) * 1e6 for time in times],
                [((time.high or time.value) - time.value) * 1e6 for time in times],
            ],
            label=label,
            color=COLOURS[offset],
            hatch=HATCHES[offset],
            edgecolor="white",
            error_kw={"elinewidth": 0.8},
        )
    axes.set_yticks(range(len(forms)), forms)
    axes.invert_yaxis()
    axes.set_xlabel(f"µs a call, {smallest} element")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


REPORT = ReportSpec("custom_ops", _context, _figures, _finding)
