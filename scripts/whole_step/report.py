"""The end-to-end report: sentences, tables and figures, computed from the records alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure as MatplotlibFigure

from benchkit import Quantity, Record, Results, numbers
from benchkit.environment import commit_label
from benchkit.report import Figure, ReportSpec, markdown_table, paired_ratio_note
from benchkit.report.plotting import COLOURS, HATCHES, hover, label_ticks, new_figure
from benchkit.timing.limits import datasheet
from engines.measure import steps_taken
from jax_baseline.timing.measurements import configure as configure_bench
from whole_step.causes import Share, changes, has_groups, parts_of_steps
from whole_step.dissection import dispatch_seconds
from whole_step.floor import floors

# The strongest way to run the step in PyTorch alone; each variant is compared with it beside the reference.
PEER = "compiled"

# The same step of PyTorch alone as one CUDA graph, which only a GPU has.
GRAPH_PEER = "compiled graph"

# nanoGPT's own model, which is measured at one further size.
NANOGPT = "nanogpt"


def finding(results: Results) -> str:
    """Say which variant is fastest, and what this repository's kernels give at best and at worst."""
    records = results.select("variant")
    if not records:
        return "Nothing was measured."
    own = [
        f"the {step} step runs at {numbers.quantity(low)}"
        f"{f' to {numbers.quantity(high)}' if high is not low else ''} of {_plain_pytorch(over)}'s speed"
        for over, step, low, high in _own_kernels(results)
    ]
    kernels = f" With this repository's kernels {', and '.join(own)}." if own else ""
    return f"{scope(results)}: {_fastest(results, numbers.quantity)}.{kernels}"


def headline(results: Results) -> str:
    """The finding in one sentence without intervals, with the worst result alone, for the index."""
    if not results.select("variant"):
        return "Nothing was measured."
    own = [(low, step) for _, step, low, _ in _own_kernels(results)]
    worst, step = min(own, key=lambda each: each[0].value, default=(None, ""))
    kernels = f"; this repository's kernels at worst {_without_interval(worst)} ({step})" if worst else ""
    return f"{scope(results)}: {_fastest(results, _without_interval)}{kernels}."


def _without_interval(ratio: Quantity) -> str:
    return numbers.with_unit(ratio.value, ratio.unit)


def scope(results: Results) -> str:
    """Say which step the run measured."""
    asked = results.configuration
    alone = ", one block alone" if asked.get("layers") == 1 else ""
    return f"`{asked['preset']}`{alone}, batch {asked['batch_size']}, {asked['dtype']}"


def _fastest(results: Results, shown: Callable[[Quantity], str]) -> str:
    best = _fastest_record(results)
    said = f"{_title(results, best)} is fastest at {numbers.count(best['rate'].value)} tokens/s"
    for over in (PEER, str(results.configuration["reference"])):
        if (ratio := ratio_over(results, best, over)) is not None:
            return f"{said}, {shown(ratio)} {_plain_pytorch(over)}{_with_graph(results, best, shown)}"
    return said


def _fastest_record(results: Results) -> Record:
    """The fastest variant of those that round the residual stream as the model does."""
    return max(_of_full_residual(results), key=lambda record: record["rate"].value)


def _of_full_residual(results: Results) -> list[Record]:
    return [r for r in results.select("variant") if not _engine(results, r).get("low_precision_residual")]


def _with_graph(results: Results, best: Record, shown: Callable[[Quantity], str]) -> str:
    """What a CUDA graph alone gives PyTorch, beside a variant that has one."""
    graph = [record for record in results.select("variant") if record.labels["variant"] == GRAPH_PEER]
    if not graph or not _engine(results, best).get("graph") or graph[0] is best:
        return ""
    return f" (a CUDA graph alone: {shown(graph[0]['change'])})"


def _plain_pytorch(name: str) -> str:
    return "torch.compile" if name == PEER else "eager PyTorch"


def _own_kernels(results: Results) -> list[tuple[str, str, Quantity, Quantity]]:
    """Compare the variants with this repository's kernels to PyTorch's own step, compiled and eager.

    Returns:
        For each of the two: what it is compared with, "compiled" or "eager", the worst and the best ratio.
    """
    found = []
    for plain, step in ((PEER, "compiled"), (str(results.configuration["reference"]), "eager")):
        ratios = [
            ratio
            for record in _of_full_residual(results)
            if (engine := _engine(results, record))["parts"] and engine["compiled"] == (plain == PEER)
            if (ratio := ratio_over(results, record, plain)) is not None
        ]
        if ratios:
            low, high = (choose(ratios, key=lambda ratio: ratio.value) for choose in (min, max))
            found.append((plain, step, low, high))
    return found


def _engine(results: Results, record: Record) -> dict[str, Any]:
    engine: dict[str, Any] = results.configuration["variants"][record.labels["variant"]]["engine"]
    return engine


def ratio_over(results: Results, record: Record, over: str) -> Quantity | None:
    """Return the paired speed of a variant over another; None if it is the same one, or the run has no such ratio.

    Args:
        results: The run.
        record: The record of the variant.
        over: Name of the other variant: the reference, :data:`PEER`, or what the variant is based on.
    """
    name = record.labels["variant"]
    if name == over:
        return None
    if over == results.configuration["reference"]:
        return record["speedup"]
    based_on = results.configuration["variants"][name]["over"]
    return record.values.get("change" if based_on == over else f"over {over}")


def context(results: Results) -> dict[str, Any]:
    """The template's variables."""
    return {
        "asked": results.configuration,
        "steps_before": steps_before(results),
        "variant_table": variant_table(results),
        "losses": losses(results),
        "disagreement": _disagreement(results),
        "scope": scope(results),
        "elsewhere": _batch_elsewhere(results),
        "changes": changes(results),
        "has_groups": has_groups(results),
        "size_table": _size_table(results),
        "size_sources": _size_sources(results),
        "has_nanogpt": any(record.labels["variant"] == NANOGPT for record in results.select("size")),
        "floor_table": _floor_table(results),
        "floor": _floor(results),
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


def _disagreement(results: Results) -> str:
    """Say where the medians of the rates and the paired ratios over the reference disagree."""
    records = results.select("variant")
    return paired_ratio_note(
        {_title(results, record): record["rate"].value for record in records},
        {_title(results, record): record["speedup"].value for record in records},
        results.configuration["variants"][results.configuration["reference"]]["title"],
    )


def _batch_elsewhere(results: Results) -> int:
    """Return the batch size of jax-baseline's table of the same step."""
    bench: Any = configure_bench("cuda" if results.environment.gpu else "cpu", False)["bench"]
    return int(bench["batch_size"])


def figures(results: Results) -> Sequence[Figure]:
    """Return the figures for which there are records."""
    found = []
    if results.select("variant"):
        found.append(
            Figure(
                "throughput",
                f"Tokens per second of the same training step ({scope(results)}); whiskers from the 20th to the 80th "
                "percentile of the rounds, × is the paired ratio over eager PyTorch."
                + (" The dashed line is the rate at the least time of a step." if floors(results) else ""),
                lambda: _draw_throughput(results),
                alt="Speed of each variant of the step",
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
                alt="Parts of each step's time",
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
    peer = results.configuration["variants"].get(PEER, {}).get("title", "")
    header = ["the step", "tokens/s", "against eager", *([f"against {peer}"] if peer else [])]
    header += ["MFU", "peak memory"] if has_mfu else []
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
                *([_over_peer(results, record)] if peer else []),
                *optional,
                numbers.with_unit(record["first step"].value, "s"),
                f"{record['last loss'].value:.4f}" if "last loss" in record.values else "–",
            ]
        )
    return markdown_table(header, rows)


_SIZE_PEERS = {"eager": "eager", PEER: "torch.compile", NANOGPT: "nanoGPT"}


def _size_table(results: Results) -> str:
    records = results.select("size")
    if not records:
        return ""
    has_memory = any("peak memory" in record.values for record in records)
    peers = {name: title for name, title in _SIZE_PEERS.items() if any(f"over {name}" in r.values for r in records)}
    header = ["step", "variant", "tokens/s", *(f"against {title}" for title in peers.values())]
    rows, last = [], ""
    for record in records:
        size = str(record.labels["size"])
        rows.append(
            [
                "" if size == last else size,
                _title(results, record),
                numbers.quantity(record["rate"]).replace(" tokens/s", ""),
                *(_over(record, name) for name in peers),
                *([numbers.percent(record["MFU"].value)] if "MFU" in record.values else []),
                *([_optional(record, "peak memory")] if has_memory else []),
            ]
        )
        last = size
    mfu = ["MFU"] if any("MFU" in record.values for record in records) else []
    return markdown_table([*header, *mfu, *(["peak memory"] if has_memory else [])], rows, left=2)


def _size_sources(results: Results) -> str:
    """When and at which commits the sizes were measured; empty for records from before they said so."""
    told = [
        f"on {record.data['date']} at {commit_label(record.data['commit'], record.data['dirty'])}"
        for record in results.select("size")
        if record.data
    ]
    return f" ({', '.join(dict.fromkeys(told))})" if told else ""


def _over(record: Record, peer: str) -> str:
    """The ratio over a peer: 1 for the peer itself, a dash where it was not measured."""
    ratio = record.values.get(f"over {peer}")
    if ratio is not None:
        return numbers.quantity(ratio)
    return "1" if record.labels["variant"] == peer else "–"


def _floor_table(results: Results) -> str:
    """Return each kernel group with its least work and time, beside its time in the fastest variants of torch."""
    found, shares = floors(results), parts_of_steps(results)
    if not found or not has_groups(results):
        return ""
    shown = [name for name in (results.configuration["reference"], PEER, _best_of_torch(results)) if name in shares]
    seconds = {name: {share.name: share.seconds for share in shares[name]} for name in dict.fromkeys(shown)}
    rows = []
    for floor in found:
        work = floor.work
        amount = numbers.with_unit(work.flops, "FLOP") if work.flops else numbers.with_unit(work.moved, "B")
        taken = [_taken(times.get(work.group), floor.seconds) for times in seconds.values()]
        rows.append([work.group, f"{amount}: {work.why}", numbers.with_unit(floor.seconds, "s"), *taken])
    titles = [results.configuration["variants"][name]["title"] for name in seconds]
    return markdown_table(["group", "least work", "least time", *titles], rows, left=2)


def _taken(seconds: float | None, least: float) -> str:
    if not seconds:
        return "–"
    return f"{numbers.with_unit(seconds, 's')} ({numbers.percent(least / seconds)})"


def _best_of_torch(results: Results) -> str:
    """Name of the fastest variant of torch with this repository's kernels."""
    own = [record for record in _of_full_residual(results) if _engine(results, record)["parts"]]
    return str(max(own, key=lambda record: record["rate"].value).labels["variant"]) if own else ""


def _floor(results: Results) -> dict[str, str] | None:
    """The sum of the least times, the rate that it allows, and the limits behind it; None if they were not measured."""
    found = floors(results)
    if not found:
        return None
    asked, seconds = results.configuration, sum(each.seconds for each in found)
    tokens = asked["batch_size"] * asked["model"]["block_size"]
    copy = next(r for r in results.select("memory limit") if r.labels["traffic"] == "1 read 1 write")
    product = next(r for r in results.select("product limit") if r.labels["dtype"] == asked["dtype"])
    best = _fastest_record(results)["rate"].value
    return {
        "seconds": numbers.with_unit(seconds, "s"),
        "rate": numbers.count(tokens / seconds),
        "share": numbers.percent(best * seconds / tokens),
        "memory": numbers.quantity(copy["bandwidth"]),
        "products": numbers.quantity(product["rate"]),
    }


def _over_peer(results: Results, record: Record) -> str:
    if record.labels["variant"] == PEER:
        return "1"
    ratio = ratio_over(results, record, PEER)
    return "–" if ratio is None else numbers.quantity(ratio)


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
    named = results.configuration["variants"]
    if "size" in record.labels:
        named = named | results.configuration["sweep"][record.labels["size"]].get("peers", {})
    name = str(record.labels["variant"])  # a sweep may have one that a later main run does not
    title: str = named.get(name, {"title": name})["title"]
    return title


def losses(results: Results) -> str:
    """Say how far the last losses lie apart; empty where no two are known."""
    records = results.select("variant")
    known = [record["last loss"].value for record in records if "last loss" in record.values]
    if len(known) < 2:
        return ""
    which = f"all {len(known)} variants" if len(known) == len(records) else f"the {len(known)} variants with a loss"
    said = (
        f"After {steps_before(results)} equal steps the losses of {which} lie within "
        f"{numbers.error_size(max(known) - min(known))} nats of one another."
    )
    of_seeds = [record["last loss"].value for record in results.select("seed")]
    of_seeds += [r["last loss"].value for r in records if r.labels["variant"] == PEER and "last loss" in r.values]
    if len(of_seeds) > 1:
        peer = results.configuration["variants"][PEER]["title"]
        said += (
            f" {peer} from {len(of_seeds)} seeds of the initial weights: within "
            f"{numbers.error_size(max(of_seeds) - min(of_seeds))} nats."
        )
    return said


def _draw_throughput(results: Results) -> MatplotlibFigure:
    records = results.select("variant")
    figure, axes = new_figure(7.5, 0.55 * len(records) + 0.9)
    for index, record in enumerate(records):
        rate = record["rate"]
        assert rate.low is not None
        assert rate.high is not None
        look = index % len(COLOURS)
        bar = axes.barh(index, rate.value, height=0.68, color=COLOURS[look], hatch=HATCHES[look], edgecolor="white")
        hover(bar[0], f"{_title(results, record)}: {numbers.quantity(rate)}")
        axes.errorbar(
            rate.value, index, xerr=[[rate.value - rate.low], [rate.high - rate.value]], color="black", capsize=3
        )
        reference = record.labels["variant"] == results.configuration["reference"]
        speedup = "" if reference else f"  {numbers.significant(record['speedup'].value)}×"
        label = axes.text(rate.high, index, f"  {numbers.count(rate.value)}{speedup}", va="center", fontsize=9)
        label.set_bbox({"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 2})
    axes.set_yticks(range(len(records)), [_title(results, record) for record in records])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    most = 1.35 * max(record["rate"].high or 0.0 for record in records)
    if found := floors(results):
        tokens = results.configuration["batch_size"] * results.configuration["model"]["block_size"]
        bound = tokens / sum(each.seconds for each in found)
        axes.axvline(bound, color="black", linestyle="--", linewidth=1, zorder=0)
        axes.annotate(
            "at the least time", (bound, 0), xytext=(3, 4), textcoords="offset points", fontsize=9,
            xycoords=axes.get_xaxis_transform(),
        )  # fmt: skip
        most = max(most, 1.2 * bound)
    axes.set_xlim(0, most)
    axes.locator_params(axis="x", nbins=6)
    label_ticks(axes.xaxis)
    axes.set_xlabel("tokens/s, higher is better")
    return figure


def _draw_shares(results: Results) -> MatplotlibFigure:
    shares: Mapping[str, list[Share]] = parts_of_steps(results)
    figure, axes = new_figure(7.5, 0.55 * len(shares) + 1.3)
    for row, (name, parts) in enumerate(shares.items()):
        left, whole = 0.0, sum(part.seconds for part in parts)
        for index, share in enumerate(parts):
            bar = axes.barh(
                row,
                share.seconds * 1e3,
                left=left,
                height=0.68,
                color=COLOURS[index % len(COLOURS)],
                hatch=HATCHES[(index + index // len(COLOURS)) % len(HATCHES)],
                edgecolor="white",
                label=share.name if row == 0 else None,
            )
            hover(bar[0], f"{results.configuration['variants'][name]['title']}, {share.name}: {_share(share, whole)}")
            left += share.seconds * 1e3
    axes.set_yticks(range(len(shares)), [results.configuration["variants"][name]["title"] for name in shares])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("ms a step, lower is better")
    figure.legend(loc="outside upper center", ncols=4, fontsize=9, frameon=False)
    return figure


REPORT = ReportSpec("whole_step", context, figures, finding, headline=headline)
