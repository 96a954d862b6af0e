"""The end-to-end report: its sections in order, computed from the records alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchkit import Quantity, Record, Results, numbers
from benchkit.environment import commit_label
from benchkit.report import (
    Axis,
    Cell,
    Chart,
    Column,
    Limit,
    Panel,
    Point,
    Report,
    Section,
    Series,
    Share,
    Table,
    paired_ratio_note,
)
from benchkit.timing.limits import datasheet
from jax_baseline.timing.measurements import configure as configure_bench
from whole_step.causes import Change, Part, changes, parts_of_steps
from whole_step.dissection import dispatch_seconds, steps_before_loss
from whole_step.floor import Floor, floors

# The strongest way to run the step in PyTorch alone; each variant is compared with it beside the reference.
PEER = "compiled"

# The same step of PyTorch alone as one CUDA graph, which only a GPU has.
GRAPH_PEER = "compiled graph"

# nanoGPT's own model, which is measured at one further size.
NANOGPT = "nanogpt"

_SIZE_PEERS = {"eager": "eager", PEER: "torch.compile", NANOGPT: "nanoGPT"}


def report(results: Results) -> Report:
    """The report of one run."""
    on_gpu = results.environment.gpu is not None
    return Report(
        title="One training step, end to end",
        finding=finding(results),
        headline=headline(results),
        answer=[_throughput(results), _variants(results), losses(results), _disagreement(results)],
        findings=[_causes(results), _batch_elsewhere(results), _sizes(results), _least_time(results)],
        details=[_parts(results)],
        asked=[
            "What happens to one training step when each lens contributes its part? The same GPT "
            f"({scope(results)}), the same weights, the same batches; forward, backward, clipping, AdamW. How fast is "
            "each variant, how long does its first step take, does it learn the same, and which lens explains the "
            "difference?"
        ],
        method=_method(results),
        limits=[
            "One model at one size: a larger model spends more of its step in matrix products, which are the same in "
            "every variant.",
            "The step alone: no data loading, no validation, no checkpoint.",
            f"Profiling and tracing slow a step down. Only counts and {'kernel times' if on_gpu else 'shares'} come "
            "from them; the step itself is timed without them.",
        ],
    )


def finding(results: Results) -> str:
    """Say which variant is fastest, and what this repository's kernels give at best and at worst."""
    if not results.select("variant"):
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
    worst, step = min(own, key=lambda ratio: ratio[0].value, default=(None, ""))
    kernels = f"; this repository's kernels at worst {_without_interval(worst)} ({step})" if worst else ""
    return f"{scope(results)}: {_fastest(results, _without_interval)}{kernels}."


def scope(results: Results) -> str:
    """Say which step the run measured."""
    asked = results.configuration
    alone = {None: "", 1: ", one block alone"}.get(asked["layers"], f", {asked['layers']} blocks")
    short = f" of {asked['block_size']} tokens" if asked.get("block_size") else ""
    return f"`{asked['preset']}`{alone}, batch {asked['batch_size']}{short}, {asked['dtype']}"


def _without_interval(ratio: Quantity) -> str:
    return numbers.with_unit(ratio.value, ratio.unit)


def _fastest(results: Results, shown: Callable[[Quantity], str]) -> str:
    exact = _of_full_residual(results)
    if not exact:
        return "only variants with a rounded residual stream were measured"
    best = max(exact, key=lambda record: record["rate"].value)
    said = f"{_title(results, best)} is fastest at {numbers.count(best['rate'].value)} tokens/s"
    for over in (PEER, str(results.configuration["reference"])):
        if (ratio := ratio_over(results, best, over)) is not None:
            return f"{said}, {shown(ratio)} {_plain_pytorch(over)}{_with_graph(results, best, shown)}"
    return said


def _of_full_residual(results: Results) -> list[Record]:
    """The variants that round the residual stream as the model does."""
    return [r for r in results.select("variant") if not _engine(results, r).get("low_precision_residual")]


def _with_graph(results: Results, best: Record, shown: Callable[[Quantity], str]) -> str:
    """What a CUDA graph alone gives PyTorch, beside a variant that has one."""
    graph = results.select("variant", variant=GRAPH_PEER)
    if not graph or "change" not in graph[0].values or not _engine(results, best).get("graph") or graph[0] is best:
        return ""
    return f" (a CUDA graph alone: {shown(graph[0]['change'])})"


def _plain_pytorch(name: str) -> str:
    return "torch.compile" if name == PEER else "eager PyTorch"


def _own_kernels(results: Results) -> list[tuple[str, str, Quantity, Quantity]]:
    """This repository's kernels beside PyTorch's own step, compiled and eager.

    For each of the two: its name, "compiled" or "eager", and the worst and the best ratio.
    """
    compared = []
    for plain, step in ((PEER, "compiled"), (str(results.configuration["reference"]), "eager")):
        own = [
            record
            for record in _of_full_residual(results)
            if _engine(results, record)["parts"] and _engine(results, record)["compiled"] == (plain == PEER)
        ]
        ratios = [ratio for record in own if (ratio := ratio_over(results, record, plain)) is not None]
        if ratios:
            low, high = (choose(ratios, key=lambda ratio: ratio.value) for choose in (min, max))
            compared.append((plain, step, low, high))
    return compared


def _engine(results: Results, record: Record) -> dict[str, Any]:
    engine: dict[str, Any] = results.configuration["variants"][record.labels["variant"]]["engine"]
    return engine


def _title(results: Results, record: Record) -> str:
    named = results.configuration["variants"]
    if "size" in record.labels:
        named = named | results.configuration["sweep"][record.labels["size"]].get("peers", {})
    name = str(record.labels["variant"])  # a sweep may have one that a later main run does not
    title: str = named.get(name, {"title": name})["title"]
    return title


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


def steps_before(results: Results) -> int:
    """Return the number of steps that every variant takes before its last loss is read."""
    return steps_before_loss(results.configuration["rounds"], results.configuration["steps"])


def _throughput(results: Results) -> Chart:
    reference = results.configuration["reference"]
    points = [
        Point(
            _title(results, record),
            record["rate"],
            text=numbers.count(record["rate"].value)
            + ("" if record.labels["variant"] == reference else f"  {_without_interval(record['speedup'])}"),
            own=bool(_engine(results, record)["parts"]),
        )
        for record in results.select("variant")
    ]
    least = floors(results)
    limits = [Limit(_tokens(results) / sum(floor.seconds for floor in least), "at the least time")] if least else []
    most = max([*(1.35 * (r["rate"].high or r["rate"].value) for r in results.select("variant")), 0.0])
    return Chart(
        "throughput",
        "bars",
        [Panel([Series("", points)], limits=limits)],
        Axis(
            "thousand tokens/s, higher is better",
            scale=1e-3,
            high=max([most, *(1.2 * limit.value for limit in limits)]),
        ),
        caption=f"Tokens per second of the same training step ({scope(results)}); whiskers from the 20th to the 80th "
        "percentile of the rounds, × is the paired ratio over eager PyTorch. Blue has this repository's kernels."
        + (" The dashed line is the rate at the least time of a step." if limits else ""),
        alt="Speed of each variant of the step",
    )


def _tokens(results: Results) -> int:
    return int(results.configuration["batch_size"] * results.configuration["model"]["block_size"])


def _variants(results: Results) -> Table[Record]:
    """A row for each variant: speed, memory, compilation, loss."""
    asked = results.configuration
    compiled = asked["variants"].get(PEER)

    def beside(over: str) -> Callable[[Record], Cell]:
        return lambda record: "1" if record.labels["variant"] == over else ratio_over(results, record, over)

    return Table(
        results.select("variant"),
        [
            Column("the step", lambda record: _title(results, record)),
            Column("tokens/s", _rate),
            Column("against eager", beside(str(asked["reference"]))),
            *([Column(f"against {compiled['title']}", beside(PEER))] if compiled else []),
            Column("MFU", lambda record: _share_of(record, "MFU"), optional=True),
            Column("peak memory", "peak memory", optional=True),
            Column("first step", lambda record: _without_interval(record["first step"])),
            Column(f"loss after {steps_before(results)} steps", _last_loss),
        ],
    )


def _rate(record: Record) -> str:
    return numbers.quantity(record["rate"]).replace(" tokens/s", "")


def _share_of(record: Record, value: str) -> Share | None:
    return Share(record[value].value) if value in record.values else None


def _last_loss(record: Record) -> str | None:
    return f"{record['last loss'].value:.4f}" if "last loss" in record.values else None


def losses(results: Results) -> str:
    """Say how far the last losses lie apart; empty where no two are known."""
    records = results.select("variant")
    known = _apart(records)
    if not known:
        return ""
    said = (
        f"After {steps_before(results)} equal steps the losses of the variants lie within {known} nats of one another."
    )
    seeds = [*results.select("seed"), *(record for record in records if record.labels["variant"] == PEER)]
    if of_seeds := _apart(seeds):
        said += f" From {len(seeds)} seeds of the initial weights, those of torch.compile lie within {of_seeds} nats."
    return said


def _apart(records: Iterable[Record]) -> str:
    """How far the last losses of records lie apart; empty where no two are known."""
    known = [record["last loss"].value for record in records if "last loss" in record.values]
    return numbers.error_size(max(known) - min(known)) if len(known) > 1 else ""


def _disagreement(results: Results) -> str:
    """Say where the medians of the rates and the paired ratios over the reference disagree."""
    records = results.select("variant")
    return paired_ratio_note(
        {_title(results, record): record["rate"].value for record in records},
        {_title(results, record): record["speedup"].value for record in records},
        results.configuration["variants"][results.configuration["reference"]]["title"],
    )


def _causes(results: Results) -> Section:
    def reasons(change: Change) -> str:
        return f"[{change.lens}](../../{change.lens}/reports/{results.environment.machine}/report.md)"

    on_gpu = results.environment.gpu is not None
    parts = "a step's kernel time and of the GPU's idle time" if on_gpu else "the parts of a step"
    return Section(
        "What explains the difference",
        [
            f"The changes are those of {parts}, the largest first. A fused kernel counts whole for one group; "
            "*elementwise* is what no other group claims.",
            Table(
                changes(results),
                [
                    Column("the step", "title"),
                    Column("beside", "over"),
                    Column("what is different", "change"),
                    Column("reasons", reasons, left=True),
                    Column("speed over it", "speedup"),
                    Column("verdict", "verdict"),
                    Column("changes", "parts"),
                    Column("calls", "counts"),
                ],
            ),
            _time_chart(results),
        ],
    )


def _batch_elsewhere(results: Results) -> Section:
    """That jax-baseline's table has the same step at another batch size."""
    bench: Any = configure_bench("cuda" if results.environment.gpu else "cpu", False)["bench"]
    here, elsewhere = results.configuration["batch_size"], int(bench["batch_size"])
    text = (
        f"[jax-baseline](../../jax-baseline/reports/{results.environment.machine}/report.md) times the same step at "
        f"batch {elsewhere}, this report at {here}. Work that does not grow with the batch (the optimizer, launches, "
        "Python) weighs more here, so the ratios differ."
    )
    return Section("", [text if here != elsewhere else ""])


def _time_chart(results: Results) -> Chart:
    """The parts of each profiled step."""
    steps = parts_of_steps(results)
    titles = {name: results.configuration["variants"][name]["title"] for name in steps}
    wholes = {name: sum(part.seconds for part in parts) for name, parts in steps.items()}
    names = dict.fromkeys(part.name for parts in steps.values() for part in parts)
    series = [
        Series(
            name,
            [
                Point(
                    titles[step],
                    part.seconds,
                    hover=f"{titles[step]}, {name}: {_with_share(part.seconds, wholes[step])}",
                )
                for step, parts in steps.items()
                for part in parts
                if part.name == name
            ],
        )
        for name in names
    ]
    how = (
        "The GPU works, or it waits for the host."
        if results.environment.gpu
        else "The dispatcher's share is its hops times what a hop costs; the rest is Python, autograd's engine, the "
        "optimizer's own code, and waiting."
    )
    return Chart(
        "time",
        "stacked",
        [Panel(series)],
        Axis("ms a step, lower is better", scale=1e3),
        caption=f"Where the time of a step goes. {how}",
        alt="Parts of each step's time",
    )


def _with_share(seconds: float, whole: float) -> str | None:
    return f"{numbers.with_unit(seconds, 's')} ({numbers.percent(seconds / whole)})" if seconds else None


def _sizes(results: Results) -> Section:
    records = results.select("size")
    first = [record for index, record in enumerate(records) if not index or _size(record) != _size(records[index - 1])]
    sources = dict.fromkeys(
        f"on {record.data['date']} at {commit_label(record.data['commit'], record.data['dirty'])}"
        for record in records
        if record.data
    )
    how = f" ({', '.join(sources)})" if sources else ""

    def over(peer: str) -> Callable[[Record], Cell]:
        return lambda record: "1" if record.labels["variant"] == peer else record.values.get(f"over {peer}")

    present = {name: title for name, title in _SIZE_PEERS.items() if any(f"over {name}" in r.values for r in records)}
    nanogpt = (
        "nanoGPT is its own model (Karpathy, github.com/karpathy/nanoGPT, `model.py` with this SHA-256) of the same "
        "size under `torch.compile`, with our batches, clipping and fused AdamW: LayerNorm for RMSNorm, learned "
        "positions for rotary ones, the erf form of GELU, torch's cross-entropy. With `NANOGPT=` the folder of a "
        "checkout of it, a GPU measures it too."
    )
    return Section(
        "At other sizes",
        [
            Table(
                records,
                [
                    Column("step", lambda record: _size(record) if record in first else ""),
                    Column("variant", lambda record: _title(results, record), left=True),
                    Column("tokens/s", _rate),
                    *(Column(f"against {title}", over(name)) for name, title in present.items()),
                    Column("MFU", lambda record: _share_of(record, "MFU"), optional=True),
                    Column("peak memory", "peak memory", optional=True),
                ],
            ),
            f"Measured as above by `scripts/end_to_end.py --sweep`{how}, each size in rounds of its own; the ratios "
            "are paired within them.",
            nanogpt if results.environment.gpu or results.select("size", variant=NANOGPT) else "",
        ],
    )


def _size(record: Record) -> str:
    return str(record.labels["size"])


def _least_time(results: Results) -> Section:
    """Each kernel group with its least work and time, beside its time in the fastest variants of torch."""
    least, steps = floors(results), parts_of_steps(results)
    own = [record for record in _of_full_residual(results) if _engine(results, record)["parts"]]
    best = max(own, key=lambda record: record["rate"].value, default=None)
    shown = (results.configuration["reference"], PEER, best.labels["variant"] if best else "")
    taken = {name: {part.name: part.seconds for part in steps[name]} for name in dict.fromkeys(shown) if name in steps}

    def measured(times: dict[str, float]) -> Callable[[Floor], Cell]:
        def cell(floor: Floor) -> Cell:
            if not (seconds := times.get(floor.work.group)):
                return None
            return f"{numbers.with_unit(seconds, 's')} ({numbers.percent(floor.seconds / seconds)})"

        return cell

    def work(floor: Floor) -> str:
        amount = (floor.work.flops, "FLOP") if floor.work.flops else (floor.work.moved, "B")
        return f"{numbers.with_unit(*amount)}: {floor.work.why}"

    on_cpu = (
        " Bytes count at the memory's rate: a group whose operands stay in the caches can take less. The compiled "
        "kernels have no group on a CPU."
    )
    return Section(
        "What is left to the least time",
        [
            _least_time_in_words(results, least),
            Table(
                least,
                [
                    Column("group", lambda floor: floor.work.group),
                    Column("least work", work, left=True),
                    Column("least time", lambda floor: numbers.with_unit(floor.seconds, "s")),
                    *(
                        Column(results.configuration["variants"][name]["title"], measured(times))
                        for name, times in taken.items()
                    ),
                ],
            ),
            f"In brackets, the least time as a share of the measured one.{'' if results.environment.gpu else on_cpu}",
        ],
    )


def _least_time_in_words(results: Results, least: list[Floor]) -> str:
    rates = [record["rate"].value for record in _of_full_residual(results)]
    if not least or not rates:
        return ""
    seconds, dtype = sum(floor.seconds for floor in least), results.configuration["dtype"]
    rate = _tokens(results) / seconds
    (memory, *_), (products, *_) = (
        results.select("memory limit", traffic="1 read 1 write"),
        results.select("product limit", dtype=dtype),
    )
    share = numbers.percent(max(rates) / rate)
    return (
        f"A step that moves and computes no more than it must takes {numbers.with_unit(seconds, 's')} here, "
        f"{numbers.count(rate)} tokens/s; the fastest variant reaches {share} of that. The limits are measured in the "
        f"same run: a copy at {_without_interval(memory['bandwidth'])}, {dtype} products at "
        f"{_without_interval(products['rate'])}."
    )


def _parts(results: Results) -> Section:
    steps = parts_of_steps(results)
    names = list(dict.fromkeys(part.name for parts in steps.values() for part in parts))
    titles = {name: variant["title"] for name, variant in results.configuration["variants"].items()}
    costs = {str(record.labels["kind"]): record["cost"].value for record in results.select("hop")}

    def whole(parts: list[Part]) -> float:
        return sum(part.seconds for part in parts)

    def share(name: str) -> Callable[[str], Cell]:
        def cell(step: str) -> Cell:
            seconds = sum(part.seconds for part in steps[step] if part.name == name)
            return _with_share(seconds, whole(steps[step]))

        return cell

    def counted(value: str) -> Callable[[Record], Cell]:
        return lambda record: numbers.count(record[value].value) if value in record.values else None

    def dispatch(record: Record) -> str | None:
        hops = record.data["hops"]
        known = hops and hops.keys() <= costs.keys()
        return numbers.with_unit(dispatch_seconds(hops, costs), "s") if known else None

    return Section(
        "",
        [
            Table(
                list(steps),
                [
                    Column("the step", lambda step: titles[step]),
                    Column("in all", lambda step: numbers.with_unit(whole(steps[step]), "s")),
                    *(Column(name, share(name)) for name in names),
                ],
            ),
            Table(
                results.select("dissection"),
                [
                    Column("the step", lambda record: _title(results, record)),
                    Column("operator calls", counted("operators")),
                    Column("hops above the backend", lambda record: sum(record.data["hops"].values()) or None),
                    Column("time they take", dispatch),
                    Column("GPU kernels", counted("kernels"), optional=True),
                ],
            ),
            Section(
                "",
                [
                    "What a hop costs here:",
                    Table(
                        results.select("hop"),
                        [Column("hop", "kind"), Column("time (95 %)", lambda record: _hop_cost(record["cost"]))],
                    ),
                    "A time that is not distinguishable from 0 enters the dispatcher's share with its median, or with "
                    "0 if the median is negative.",
                ],
            ),
        ],
        fold="Parts of each step, operator calls, and the dispatcher's hops",
    )


def _hop_cost(cost: Quantity) -> str:
    """The time of a hop, or its upper bound where it is not distinguishable from 0."""
    low, high = (cost.value if end is None else end for end in (cost.low, cost.high))
    if low > 0:
        return numbers.quantity(cost)
    return f"not distinguishable from 0 (at most {numbers.with_unit(max(high, 0.0), 's')})"


def _method(results: Results) -> list[str]:
    asked, gpu = results.configuration, results.environment.gpu
    caches = (
        "the compiled variants of torch share a cache folder that is empty at the start, so only the first of them "
        "includes Inductor's one-time check of the compiler. The first variant with rmsnorm-fused or custom-ops also "
        "builds its extension if it is missing."
        if asked["empty_caches"]
        else "Inductor's cache survives from one quick run to the next, so a first step does not measure compilation."
    )
    sheet = None if gpu is None else datasheet(gpu.name)
    mfu = (
        " MFU, model FLOPs utilisation, is the model's operations a second over the datasheet's "
        f"{numbers.with_unit(sheet.flops[asked['dtype']], 'FLOP/s')} ({asked['dtype']}, dense)."
        if sheet is not None and any("MFU" in record.values for record in results.select("variant"))
        else ""
    )
    profiled = (
        "Overlapping kernels count once; the rest of the step is idle time of the GPU. The dispatcher runs on the "
        "host, beside the GPU: its time is part of the step only where the GPU waits for it."
        if gpu
        else "The profiler slows everything down, so an operator's own time (without its callees) counts with its "
        "share of the profiled step. The dispatcher's time is the number of hops above the backend times the cost of a "
        "hop of that kind, as dispatcher-trace measures it on this machine. The profiler counts it as operator time, "
        "so it is subtracted there."
    )
    return [
        f"Each variant has its own process. One runs at a time: {asked['steps']} steps a sample, {asked['rounds']} "
        "rounds, in a new random order each round. A rate is the median with its 20th and 80th percentile; a ratio is "
        "the median of the rounds' ratios with a bootstrap interval. The first step traces, compiles and runs; "
        f"{caches} Nothing is timed unless the first losses agree. The last loss is read after {steps_before(results)} "
        f"steps.{mfu}",
        f"Then each variant of torch is profiled for three steps, and dispatcher-trace traces one step. {profiled} A "
        "kernel belongs to a group by its own name, by the operators that launch it and, in the backward pass, by the "
        "forward operator of its autograd node; what runs between the last matmul of the forward pass and the first of "
        "the backward pass is the loss."
        if asked["dissect"]
        else "",
    ]
