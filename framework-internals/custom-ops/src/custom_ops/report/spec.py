"""The report's text and tables, computed from the results alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchkit import Quantity, Record, Results, numbers
from benchkit.report import Figure, ReportSpec, must_and_aim
from custom_ops.bench import build_costs
from custom_ops.bench.cases import COMPILED, OURS
from custom_ops.report import attention, cpu_targets, targets
from custom_ops.report.figures import attention_figure, calls_figure, speed_figure
from custom_ops.roads.wrappers import SHIPPED

# Facts that are not measured: for each road what it works with, and what it lacks.
_ROADS = {
    build_costs.JUST_IN_TIME: (
        "the sources and a compiler on every user's machine",
        "no dispatch, derivative or graph: a function, until Python registers it",
    ),
    build_costs.WHEEL: ("one Python, one torch", "the same, and it is built again for each torch"),
    build_costs.TORCH_LIBRARY: ("every Python from 3.11, one torch", "derivatives need more C++"),
    build_costs.STABLE: (
        "every Python from 3.11, torch 2.10 to 2.15",
        "no autograd nodes: derivatives are registered from Python, or compiled as nodes for one torch",
    ),
    build_costs.RUN_TIME: ("every torch with CUDA; no compiler", "no CPU; launches run through Python"),
}


def _context(results: Results) -> dict[str, Any]:
    """The variables of the template. A failed measurement has no records, and its table is empty."""
    counts = [_count(record) for record in results.select("call")]
    smallest, largest = min(counts, default=0), max(counts, default=0)
    largest_speeds = _largest_of_each(results)
    reached = list(cpu_targets.reached(results))
    return {
        "serving": results.one("serving"),
        "build_rows": [_build_row(record) for record in results.select("build")],
        "call_rows": _call_rows(results, smallest, largest),
        "smallest": smallest,
        "largest": largest,
        "own_call": _own_call(results, smallest),
        "speed_rows": [_speed_row(results, record) for record in largest_speeds],
        "large": max((_count(record) for record in largest_speeds), default=0),
        "compiled": _compiled_how(results),
        "limits": [
            (record.labels["traffic"], record["bandwidth"], record.values.get("ordinary"))
            for record in results.select("memory limit")
        ],
        "limit_tensor": next((record["tensor"] for record in results.select("memory limit")), None),
        "products": [(record.labels["dtype"], record["rate"]) for record in results.select("product limit")],
        "clock": next((record.labels["clock"] for record in results.select("speed", form=OURS)), None),
        "placements": results.configuration.get("placements", 1),
        "fusion_rows": [_fusion_row(results, record) for record in results.select("fusion")],
        "fusion_count": max(map(_count, results.select("fusion")), default=0),
        "launches_agree": _launches_agree(results),
        "layout_rows": _layout_rows(results),
        "layout_count": max(map(_count, results.select("layout")), default=0),
        "convolution_rows": [_convolution_row(record) for record in results.select("convolution")],
        "convolution": next(iter(results.select("convolution")), None),
        "access_rows": [_choice_row(record, "access") for record in results.select("access")],
        "plan_rows": [_plan_row(record) for record in _best_plans(results)],
        "memory_rows": [_memory_row(record) for record in results.select("peak memory")],
        "correctness_rows": [_correctness_row(record) for record in results.select("correctness")],
        "cancelled": _cancelled(results),
        "accuracy_rows": [_accuracy_row(record) for record in results.select("accuracy")],
        "bit_equal": _bit_equal(results),
        "loss_rows": [_loss_row(record) for record in results.select("loss")],
        "loss": next(iter(results.select("loss")), None),
        "training_rows": [_training_row(record) for record in results.select("training")],
        "preset": next((record.labels["preset"] for record in results.select("training")), None),
        "target_rows": (target_rows := targets.rows(results)),
        "must_header": must_and_aim.HEADER,
        "must_rows": must_and_aim.rows(reached),
        "must_reasons": must_and_aim.reasons(reached),
        "beyond_cache_rows": cpu_targets.beyond_cache_rows(results),
        "one_element_rows": _one_element_rows(results),
        "targets_met": sum(row[3] == "yes" for row in target_rows),
        "above_the_limit": _above_the_limit(results),
        **_gains(results),
        **attention.context(results),
    }


def _count(record: Record) -> int:
    return int(record.labels["count"])


def _share(results: Results, record: Record) -> str:
    limits = results.select("memory limit", traffic=record.labels["limit"])
    return numbers.percent(record["rate"].value / limits[0]["bandwidth"].value, 0) if limits else "–"


def _above_the_limit(results: Results) -> str:
    """The operator that exceeds its limit by the most at the largest size; empty if none does."""
    over = [
        (share, f"{record.labels['op']} in {record.labels['dtype']} ({record.labels['form']})")
        for record in results.select("speed", count=_largest_count(results))
        for limit in results.select("memory limit", traffic=record.labels["limit"])
        if (share := record["rate"].value / limit["bandwidth"].value) > 1.005
    ]
    if not over:
        return ""
    share, what = max(over)
    return f"{what} reaches {numbers.percent(share, 0)} of the limit"


def _largest_count(results: Results) -> int:
    return max(map(_count, results.select("speed", form=OURS)), default=0)


def _largest_of_each(results: Results) -> list[Record]:
    largest = _largest_count(results)
    return [record for record in results.select("speed", form=OURS) if _count(record) == largest]


def _bit_equal(results: Results) -> bool:
    return all(record["differing"].value == 0 for record in results.select("correctness", op="vector_add"))


def _own_call(results: Results, count: int) -> str | None:
    """The overhead of a call compared with torch.add, and its consequence for small operands."""
    if not results.select("call"):
        return None
    own, graded = (results.one("call", form=SHIPPED, count=count, grad=grad) for grad in (False, True))
    peer, other = (results.one("call", form="torch.add", count=count, grad=grad) for grad in (False, True))
    slower = any((record["ratio"].low or 0.0) > 1 for record in (own, graded))
    consequence = (
        "on operands so small that this matters, a custom kernel gains only if it replaces several calls"
        if slower
        else "the call is no reason against a custom kernel at any size"
    )
    return f"{_beside(own, peer)} without a gradient and {_beside(graded, other)} with one: {consequence}"


def _beside(own: Record, peer: Record) -> str:
    ratio = own["ratio"]
    if (ratio.low or ratio.value) <= 1 <= (ratio.high or ratio.value):
        return "the same as torch.add"
    difference = own["time"].value - peer["time"].value
    return f"{numbers.with_unit(abs(difference), 's')} {'more' if ratio.value > 1 else 'less'} than torch.add"


def _build_row(record: Record) -> tuple[str, ...]:
    fits, cannot = _ROADS[str(record.labels["road"])]
    load = record.values.get("load")
    return (
        str(record.labels["road"]),
        numbers.quantity(record["build"]),
        numbers.quantity(load) if load else "–",
        numbers.quantity(record["library"]),
        fits,
        cannot,
    )


def _call_rows(results: Results, smallest: int, largest: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for wrapper in results.select("wrapper") if results.select("call") else ():
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


def _one_element_rows(results: Results) -> list[tuple[str, ...]]:
    return [
        (
            str(record.labels["op"]),
            numbers.quantity(record["time"]),
            numbers.quantity(results.one("one element", op=record.labels["op"], form="torch")["time"]),
            numbers.quantity(record["speedup"]),
        )
        for record in results.select("one element", form=OURS)
    ]


def _speed_row(results: Results, record: Record) -> tuple[str, ...]:
    same = {"op": record.labels["op"], "dtype": record.labels["dtype"], "count": record.labels["count"]}
    compiled = results.select("speed", form=COMPILED, **same)
    return (
        str(record.labels["op"]),
        str(record.labels["dtype"]),
        numbers.quantity(record["time"]),
        numbers.quantity(record["rate"]),
        _share(results, record),
        numbers.quantity(results.one("speed", form="torch", **same)["time"]),
        numbers.quantity(compiled[0]["time"]) if compiled else "–",
        numbers.quantity(record["speedup"]),
    )


def _compiled_how(results: Results) -> str:
    """Whether torch compiled once per size or once for all sizes; empty if it did not compile."""
    records = results.select("speed", form=COMPILED)
    if not records:
        return ""
    return "for each size" if all((record.data or {}).get("compiled") for record in records) else "for all sizes"


def _fusion_row(results: Results, record: Record) -> tuple[str, ...]:
    speeds = results.select("speed", form=OURS, **record.labels)

    def launched(prefix: str) -> str:
        predicted, counted = record[f"{prefix}predicted_launches"].value, record[f"{prefix}launches"].value
        return f"{numbers.count(predicted)}, {numbers.count(counted)}"

    return (
        str(record.labels["op"]),
        launched("unfused_"),
        launched(""),
        numbers.quantity(record["unfused_bytes"]),
        numbers.quantity(record["bytes"]),
        numbers.quantity(record["predicted_speedup"]),
        numbers.quantity(speeds[0]["speedup"]) if speeds else "–",
    )


def _launches_agree(results: Results) -> bool:
    counted = [record for record in results.records if "predicted_launches" in record.values]
    return all(record["launches"].value == record["predicted_launches"].value for record in counted)


def _layout_rows(results: Results) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for record in results.select("layout", form="custom_ops.vector_add"):
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


def _convolution_row(record: Record) -> tuple[str, ...]:
    return (
        str(record.labels["form"]),
        numbers.count(record["launches"].value),
        numbers.quantity(record["bytes"]),
        numbers.quantity(record["time"]),
        numbers.quantity(record["speedup"]),
    )


def _choice_row(record: Record, label: str) -> tuple[str, ...]:
    return (
        str(record.labels[label]),
        str(record.labels["dtype"]),
        numbers.quantity(record["time"]),
        numbers.quantity(record["rate"]),
        numbers.quantity(record["speedup"]),
    )


def _best_plans(results: Results) -> list[Record]:
    """The record with the best number of blocks, for each dtype and width."""
    best: dict[tuple[Any, Any], Record] = {}
    for record in results.select("plan"):
        key = (record.labels["dtype"], record.labels["across"])
        if key not in best or record["time"].value < best[key]["time"].value:
            best[key] = record
    return list(best.values())


def _plan_row(record: Record) -> tuple[str, ...]:
    labels = record.labels
    texts = (str(labels["dtype"]), str(labels["across"]), str(labels["blocks"]))
    return (*texts, numbers.quantity(record["time"]), numbers.quantity(record["rate"]))


def _memory_row(record: Record) -> tuple[str, ...]:
    figures = (numbers.quantity(record[name]) for name in ("operand", "saved", "peak"))
    return str(record.labels["form"]), str(record.labels["dtype"]), *figures


def _correctness_row(record: Record) -> tuple[str, ...]:
    return (
        str(record.labels["op"]),
        str(record.labels["dtype"]),
        numbers.count(record["elements"].value),
        numbers.count(record["differing"].value),
        _ulps(record["error"].value),
        _ulps(record["torch_error"].value),
    )


def _ulps(error: float) -> str:
    """Format an error in ulp: small errors with four decimals, which tell one rounding from two."""
    return f"{error:.4f}" if error < 10 else numbers.count(error)


def _cancelled(results: Results) -> str:
    """Torch's largest error of a product and a sum, if it exceeds two roundings of the result, else empty."""
    largest = max((record["torch_error"].value for record in results.select("correctness", op="axpb")), default=0.0)
    return f"{_ulps(largest)} ulp" if largest > 2 else ""


def _accuracy_row(record: Record) -> tuple[str, ...]:
    errors = (f"{record[name].value:.2e}" for name in ("error", "torch_error"))
    return str(record.labels["result"]), str(record.labels["dtype"]), *errors


def _loss_row(record: Record) -> tuple[str, ...]:
    return (
        str(record.labels["form"]),
        str(record.labels["dtype"]),
        numbers.quantity(record["time"]),
        numbers.quantity(record["speedup"]),
        numbers.quantity(record["peak"]) if "peak" in record.values else "–",
        f"{record['loss'].value:.6f}",
    )


def _training_row(record: Record) -> tuple[str, ...]:
    return (
        str(record.labels["part"]),
        numbers.quantity(record["time"]),
        numbers.quantity(record["speedup"]),
        f"{record['loss'].value:.6f}",
    )


def _gains(results: Results) -> dict[str, list[str]]:
    """The operators at the largest size and attention, as clauses.

    The interval of the speed-up lies above 1.05, below, or around it; for attention, the range over all shapes does.
    """
    clauses: dict[str, list[str]] = {"worth": [], "not_worth": [], "undecided": []}
    every: list[tuple[Quantity, str]] = []
    for record in _largest_of_each(results):
        gain = record["speedup"]
        text = (
            f"{record.labels['op']} in {record.labels['dtype']}, {numbers.quantity(gain)} as fast as torch's operators"
        )
        speed, peer = targets.beside_the_strongest(results, record)
        if peer == COMPILED:
            text += f", {numbers.with_unit(speed, '×')} as fast as torch.compile"
        every.append((gain, text))
    for gain, text in (*every, *attention.gains(results)):
        low, high = gain.low or gain.value, gain.high or gain.value
        verdict = "worth" if low > 1.05 else "not_worth" if high < 1.05 else "undecided"
        clauses[verdict].append(text)
    return clauses


def _figures(results: Results) -> Sequence[Figure]:
    """The figures for which there are records."""
    speeds, figures = results.select("speed", form=OURS), []
    if results.select("attention"):
        caption = (
            "Attention beside PyTorch's fastest back end over the length of the sequence: the operations of the "
            "definition, divided by the time. The dashed line is the rate of matrix products alone in the same run."
        )
        alt = "Lines by pass, dtype, head size: operations per second of attention over tokens, beside PyTorch's best"
        figures.append(Figure("attention", caption, lambda: attention_figure(results), alt))
    if speeds:
        replayed = speeds[0].labels["clock"] == "cuda-graph"
        timed = "kernels alone, replayed from a CUDA graph" if replayed else "whole calls"
        caption = (
            f"The bytes that a fused kernel must move, divided by the time of each form ({timed}), in float32. "
            "The dashed line is the memory limit; small operands fit in a cache and may exceed it."
        )
        figures.append(
            Figure(
                "speed", caption, lambda: speed_figure(results), "Lines: bandwidth of each operator over its elements"
            )
        )
    if results.select("call") and results.select("wrapper"):
        caption = (
            "The time of one call from Python, for each way to reach the same kernel. Bars are medians; lines reach "
            "from the 20th to the 80th percentile."
        )
        figures.append(
            Figure(
                "calls",
                caption,
                lambda: calls_figure(results),
                "Bars: time of a call, by the wrapper around the same kernel",
            )
        )
    return figures


REPORT = ReportSpec("custom_ops", _context, _figures, targets.finding, headline=targets.headline)
