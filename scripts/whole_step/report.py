"""The end-to-end report: sentences, tables and figures, computed from the records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure as MatplotlibFigure

from benchkit import Quantity, Record, Results, numbers
from benchkit.report import Figure, ReportSpec, markdown_table
from benchkit.report.plotting import COLOURS, HATCHES, label_ticks, new_figure
from benchkit.timing.limits import datasheet
from jax_baseline.timing.bench import steps_taken
from whole_step.dissection import dispatch_seconds


class Share(NamedTuple):
    """One part of a step's time."""

    name: str
    seconds: float


def finding(results: Results) -> str:
    """Sum the run up in one sentence."""
    records = results.select("variant")
    if not records:
        return "Nothing was measured."
    best = max(records, key=lambda record: record["rate"].value)
    first = results.one("variant", variant=results.configuration["reference"])
    return (
        f"One training step of {results.configuration['preset']} runs at {_rate(first)} in {_title(results, first)}, "
        f"and at {_rate(best)}, {numbers.quantity(best['speedup'])} as fast, in {_title(results, best)}"
        f"{_losses(results)}."
    )


def context(results: Results) -> dict[str, Any]:
    """The template's variables."""
    return {
        "asked": results.configuration,
        "steps_before": steps_before(results),
        "variant_count": variant_count(results),
        "variant_table": variant_table(results),
        "changes": _changes(results),
        "share_table": _share_table(results),
        "hop_rows": [(str(record.labels["kind"]), _hop_cost(record["cost"])) for record in results.select("hop")],
        "uncertain_hops": any((record["cost"].low or 0.0) <= 0 for record in results.select("hop")),
        "peak": _peak(results),
        "kernel_rows": _kernel_rows(results),
        "on_gpu": results.environment.gpu is not None,
    }


def _hop_cost(cost: Quantity) -> str:
    """Format the time of a hop, or its upper bound where it is not distinguishable from 0."""
    assert cost.low is not None
    assert cost.high is not None
    if cost.low > 0:
        return numbers.quantity(cost)
    return f"not distinguishable from 0 (at most {numbers.with_unit(max(cost.high, 0.0), 's')})"


def _peak(results: Results) -> str:
    """Format the peak rate that MFU refers to; empty where the report has no MFU."""
    gpu = results.environment.gpu
    sheet = None if gpu is None else datasheet(gpu.name)
    if sheet is None or not any("MFU" in record.values for record in results.select("variant")):
        return ""
    return numbers.with_unit(sheet.flops[results.configuration["dtype"]], "FLOP/s")


def variant_count(results: Results) -> str:
    """Return the number of variants as a word."""
    count = len(results.configuration["variants"])
    return {4: "four", 6: "six"}.get(count, str(count))


def figures(results: Results) -> Sequence[Figure]:
    """Return the figures for which there are records."""
    found = []
    if results.select("variant"):
        found.append(
            Figure(
                "throughput",
                f"Tokens per second of the same training step of {results.configuration['preset']}, "
                f"{variant_count(results)} variants; whiskers from the 20th to the 80th percentile of the rounds.",
                lambda: _draw_throughput(results),
            )
        )
    if parts_of_steps(results):
        found.append(
            Figure(
                "time",
                "Where the time of a step goes. "
                + (
                    "The GPU works, or it waits for the host."
                    if results.environment.gpu
                    else "The dispatcher's share is its hops times what a hop costs; the rest is Python, autograd's "
                    "engine, the optimizer's own code, and waiting."
                ),
                lambda: _draw_shares(results),
            )
        )
    return found


def steps_before(results: Results) -> int:
    """Return the number of steps that every variant takes before its last loss is read."""
    return steps_taken(results.configuration["rounds"], results.configuration["steps"])


def variant_table(results: Results) -> str:
    """Return a row for each variant: speed, memory, compilation, loss. The index of reports shows it too."""
    records = results.select("variant")
    has_mfu = any("MFU" in record.values for record in records)
    header = ["the step", "tokens/s", "against eager", *(["MFU", "peak memory"] if has_mfu else [])]
    header += ["first step", f"loss after {steps_before(results)} steps"]
    rows = []
    for record in records:
        optional = [numbers.percent(record["MFU"].value), _optional(record, "peak memory")] if has_mfu else []
        reference = record.labels["variant"] == results.configuration["reference"]
        rows.append(
            [
                _title(results, record),
                numbers.quantity(record["rate"]).replace(" tokens/s", ""),
                "1" if reference else numbers.quantity(record["speedup"]),
                *optional,
                numbers.with_unit(record["first step"].value, "s"),
                f"{record['last loss'].value:.4f}" if "last loss" in record.values else "–",
            ]
        )
    return markdown_table(header, rows)


def _changes(results: Results) -> list[dict[str, str]]:
    """Return what each variant changes and how fast it is, compared with the variant that it is based on."""
    found = []
    for record in results.select("variant"):
        variant = results.configuration["variants"][record.labels["variant"]]
        if "change" not in record.values:
            continue
        over = results.one("variant", variant=variant["over"])
        found.append(
            {
                "title": _title(results, record),
                "over": _title(results, over),
                "change": variant["change"],
                "lens": variant["lens"],
                "speedup": numbers.quantity(record["change"]),
                "verdict": _verdict(record["change"]),
                "counts": _counts(results, str(over.labels["variant"]), str(record.labels["variant"])),
            }
        )
    return found


def _verdict(change: Quantity) -> str:
    assert change.low is not None
    assert change.high is not None
    if change.low > 1:
        return "faster"
    return "slower" if change.high < 1 else "no difference that this run can resolve"


def _counts(results: Results, before: str, after: str) -> str:
    """Compare the numbers of operators, hops and kernels of two variants, where both were counted."""
    old, new = (results.select("dissection", variant=name) for name in (before, after))
    if not old or not new:
        return ""
    parts = [
        f"{what} {_change(old[0][key].value, new[0][key].value)}"
        for key, what in (("operators", "operator calls"), ("kernels", "GPU kernels"))
        if key in old[0].values and key in new[0].values
    ]
    hops = [sum(record.data["hops"].values()) for record in (old[0], new[0])]
    if all(hops):
        parts.append(f"hops above the backend {_change(*hops)}")
    return ", ".join(parts)


def _change(before: float, after: float) -> str:
    if before == after:
        return f"{numbers.count(before)} in both"
    return f"{numbers.count(before)} → {numbers.count(after)}"


def parts_of_steps(results: Results) -> dict[str, list[Share]]:
    """Return the parts of each profiled step, by variant.

    The parts add up to the step. Where the step was slower while it was profiled they add up to more, and the last
    part is 0.
    """
    costs = {str(record.labels["kind"]): record["cost"].value for record in results.select("hop")}
    found = {}
    for record in results.select("dissection"):
        step = results.one("variant", variant=record.labels["variant"])["step"].value
        if "kernel_seconds" in record.values:
            busy = min(record["kernel_seconds"].value, step)
            found[str(record.labels["variant"])] = [Share("kernels", busy), Share("GPU idle", step - busy)]
        elif "operator_seconds" in record.values:
            dispatch = dispatch_seconds(record.data["hops"], costs)
            # On a CPU the profiler slows what it times, and the machine may be faster or slower than it was before.
            scale = step / record["profiled_seconds"].value
            operators = max(record["operator_seconds"].value * scale - dispatch, 0.0)
            compiled = record["compiled_seconds"].value * scale
            rest = max(step - operators - compiled - dispatch, 0.0)
            found[str(record.labels["variant"])] = [
                Share("kernels of operators", operators),
                Share("compiled kernels", compiled),
                Share("dispatcher", dispatch),
                Share("rest", rest),
            ]
    return found


def _share_table(results: Results) -> str:
    shares = parts_of_steps(results)
    if not shares:
        return ""
    names = [share.name for share in next(iter(shares.values()))]
    rows = [
        [
            results.configuration["variants"][variant]["title"],
            numbers.with_unit(sum(share.seconds for share in parts), "s"),
            *(_share(share, sum(part.seconds for part in parts)) for share in parts),
        ]
        for variant, parts in shares.items()
    ]
    return markdown_table(["the step", "in all", *names], rows)


def _share(share: Share, whole: float) -> str:
    if share.seconds == 0:
        return "–"
    return f"{numbers.with_unit(share.seconds, 's')} ({numbers.percent(share.seconds / whole)})"


def _kernel_rows(results: Results) -> list[list[str]]:
    costs = {str(record.labels["kind"]): record["cost"].value for record in results.select("hop")}
    return [
        [
            results.configuration["variants"][record.labels["variant"]]["title"],
            _count(record, "operators"),
            numbers.count(sum(record.data["hops"].values())) if record.data["hops"] else "–",
            numbers.with_unit(dispatch_seconds(record.data["hops"], costs), "s") if record.data["hops"] else "–",
            *([_count(record, "kernels")] if results.environment.gpu else []),
        ]
        for record in results.select("dissection")
    ]


def _count(record: Record, key: str) -> str:
    return numbers.count(record[key].value) if key in record.values else "–"


def _optional(record: Record, key: str) -> str:
    return numbers.quantity(record[key]) if key in record.values else "–"


def _title(results: Results, record: Record) -> str:
    title: str = results.configuration["variants"][record.labels["variant"]]["title"]
    return title


def _rate(record: Record) -> str:
    return f"{numbers.count(record['rate'].value)} tokens/s"


def _losses(results: Results) -> str:
    """How far the last losses lie apart; empty where no two are known."""
    records = results.select("variant")
    losses = [record["last loss"].value for record in records if "last loss" in record.values]
    if len(losses) < 2:
        return ""
    which = "all" if len(losses) == len(records) else "the"
    return (
        f"; after {steps_before(results)} equal steps the losses of {which} {len(losses)} variants"
        f"{'' if which == 'all' else ' of which they are known'} lie within "
        f"{numbers.error_size(max(losses) - min(losses))} nats of one another"
    )


def _draw_throughput(results: Results) -> MatplotlibFigure:
    records = results.select("variant")
    figure, axes = new_figure(7.5, 0.55 * len(records) + 0.9)
    for index, record in enumerate(records):
        rate = record["rate"]
        assert rate.low is not None
        assert rate.high is not None
        axes.barh(index, rate.value, height=0.68, color=COLOURS[index], hatch=HATCHES[index], edgecolor="white")
        axes.errorbar(
            rate.value, index, xerr=[[rate.value - rate.low], [rate.high - rate.value]], color="black", capsize=3
        )
        reference = record.labels["variant"] == results.configuration["reference"]
        speedup = "" if reference else f"  {numbers.significant(record['speedup'].value)}×"
        axes.text(rate.high, index, f"  {numbers.count(rate.value)}{speedup}", va="center", fontsize=9)
    axes.set_yticks(range(len(records)), [_title(results, record) for record in records])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.35 * max(record["rate"].high or 0.0 for record in records))
    axes.locator_params(axis="x", nbins=6)
    label_ticks(axes.xaxis)
    axes.set_xlabel("tokens/s")
    return figure


def _draw_shares(results: Results) -> MatplotlibFigure:
    shares: Mapping[str, list[Share]] = parts_of_steps(results)
    figure, axes = new_figure(7.5, 0.55 * len(shares) + 1.3)
    for row, parts in enumerate(shares.values()):
        left = 0.0
        for index, share in enumerate(parts):
            axes.barh(
                row,
                share.seconds * 1e3,
                left=left,
                height=0.68,
                color=COLOURS[index],
                hatch=HATCHES[index],
                edgecolor="white",
                label=share.name if row == 0 else None,
            )
            left += share.seconds * 1e3
    axes.set_yticks(range(len(shares)), [results.configuration["variants"][name]["title"] for name in shares])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("ms a step")
    figure.legend(loc="outside upper center", ncols=4, fontsize=9, frameon=False)
    return figure


REPORT = ReportSpec("whole_step", context, figures, finding)
