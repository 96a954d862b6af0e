"""The end-to-end report: its sections in order, computed from the records alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from benchkit import Quantity, Record, Results, numbers
from benchkit.environment import commit_label
from benchkit.report import (
    WHOSE,
    Axis,
    Cell,
    Chart,
    Code,
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
    series_by,
)
from benchkit.timing.limits import datasheet, product_ceiling
from jax_baseline.timing.measurements import configure as configure_bench
from whole_step.causes import Change, Part, changes, parts_of_steps
from whole_step.dissection import dispatch_seconds, steps_before_loss
from whole_step.floor import Floor, floors
from whole_step.gpus import on_several_gpus

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
        headline=headline(results),
        use=use(results),
        avoid=avoid(results),
        worst=worst(results),
        answer=[_throughput(results), _variants(results), losses(results), _disagreement(results)],
        findings=[
            _causes(results),
            _tuning(results),
            _batch_elsewhere(results),
            _sizes(results),
            on_several_gpus(results),
            _least_time(results),
        ],
        details=[_parts(results)],
        asked=[
            "What happens to one training step when each lens contributes its part? The same GPT "
            f"({scope(results)}), the same weights, the same batches; forward, backward, clipping, AdamW. How fast is "
            "each variant, how long does its first step take, does it learn the same, and which lens explains the "
            "difference?"
        ],
        method=_method(results),
        limits=[
            f"One model; sizes measured: {1 + len({_size(record) for record in results.select('size')})}. At others "
            "the share of matrix products in a step differs, and with it each ratio.",
            "The step alone: no data loading, no validation, no checkpoint.",
            f"Profiling and tracing slow a step down. Only counts and {'kernel times' if on_gpu else 'shares'} come "
            "from them; the step itself is timed without them.",
        ],
    )


def headline(results: Results) -> str:
    """Say which variant is fastest, and how fast beside torch.compile."""
    records = results.select("variant")
    if not records:
        return "Nothing was measured."
    best = max(records, key=lambda record: record["rate"].value)
    said = (
        f"The fastest step of {scope(results)} is “{_full_title(results, best)}”: "
        f"{numbers.count(best['rate'].value)} tokens/s"
    )
    for over in (PEER, str(results.configuration["reference"])):
        if (ratio := ratio_over(results, best, over)) is not None:
            return f"{said}, {_without_interval(ratio)} {_name_of_pytorchs(over)}."
    return f"{said}."


def use(results: Results) -> str:
    """Say what this repository's kernels give to a compiled and to an eager step, each without further rounding."""
    gains = [
        f"“{_title(results, record)}” runs at {numbers.quantity(ratio)} of {_name_of_pytorchs(over)}"
        for over, ratio, record in (max(ratios, key=_speed) for ratios in _comparable_ratios(results) if ratios)
        if ratio.value > 1
    ]
    return f"you train a model of this kind and size: {', and '.join(gains)}." if gains else ""


def avoid(results: Results) -> str:
    """Say which parts bring nothing, and what the fastest variant asks for."""
    reasons = []
    idle = [
        f"“{change.over}” to “{change.title}” ({_without_interval(change.speedup)})"
        for change in changes(results)
        if change.own and change.speedup and change.speedup.decides and change.verdict != "faster"
    ]
    if idle:
        reasons.append(f"all that you would do is go from {', or from '.join(idle)}")
    graph = results.select("variant", variant=GRAPH_PEER)
    if graph and "change" in graph[0].values:
        reasons.append(f"a CUDA graph is enough: it alone gives torch.compile {_without_interval(graph[0]['change'])}")
    rounded = [record for record in results.select("variant") if record not in _of_full_residual(results)]
    exact = max(_of_full_residual(results), key=lambda record: record["rate"].value, default=None)
    if rounded and exact is not None and (ratio := ratio_over(results, exact, PEER)) is not None:
        reasons.append(f"the residual stream must stay in float32, which leaves {_without_interval(ratio)}")
    return f"{'; or '.join(reasons)}." if reasons else "the first step counts: compiling takes seconds to minutes."


def worst(results: Results) -> str:
    """Say which variant with this repository's kernels is slowest beside each way of PyTorch's own."""
    ratios = [entry for over in _pytorchs_variants(results) for entry in _ratios_of_own(results, over)]
    if not ratios:
        return ""
    alike = [min(entries, key=_speed) for entries in _comparable_ratios(results) if entries]
    slowest = min(ratios, key=_speed)
    return " Of those compiled as their peer: ".join(
        f"{', '.join(_said(results, *entry) for entry in entries)}."
        for entries in ([slowest], [entry for entry in alike if entry != slowest])
        if entries
    )


def _said(results: Results, over: str, ratio: Quantity, record: Record) -> str:
    return f"“{_title(results, record)}” at {numbers.quantity(ratio)} of {_name_of_pytorchs(over)}"


def scope(results: Results) -> str:
    """Say which step the run measured."""
    asked = results.configuration
    alone = {None: "", 1: ", one block alone"}.get(asked["layers"], f", {asked['layers']} blocks")
    short = f" of {asked['block_size']} tokens" if asked.get("block_size") else ""
    return f"`{asked['preset']}`{alone}, batch {asked['batch_size']}{short}, {asked['dtype']}"


def _without_interval(ratio: Quantity) -> str:
    return numbers.with_unit(ratio.value, ratio.unit)


def _of_full_residual(results: Results) -> list[Record]:
    """The variants that round the residual stream as the model does."""
    return [r for r in results.select("variant") if not _engine(results, r).get("low_precision_residual")]


def _name_of_pytorchs(name: str) -> str:
    return "torch.compile" if name == PEER else "eager PyTorch"


def _pytorchs_variants(results: Results) -> tuple[str, str]:
    """The variants that are PyTorch alone: compiled, and eager."""
    return PEER, str(results.configuration["reference"])


def _ratios_of_own(results: Results, over: str) -> list[tuple[str, Quantity, Record]]:
    """The speed of each variant with this repository's kernels over one of PyTorch's own ways."""
    own = [record for record in results.select("variant") if _engine(results, record)["parts"]]
    return [(over, ratio, record) for record in own if (ratio := ratio_over(results, record, over)) is not None]


def _comparable_ratios(results: Results) -> list[list[tuple[str, Quantity, Record]]]:
    """For each of PyTorch's own ways, the ratios of what is compiled and rounds the residual stream as it does."""
    exact = _of_full_residual(results)
    return [
        [
            entry
            for entry in _ratios_of_own(results, over)
            if entry[2] in exact and _engine(results, entry[2])["compiled"] == (over == PEER)
        ]
        for over in _pytorchs_variants(results)
    ]


def _speed(entry: tuple[str, Quantity, Record]) -> float:
    return entry[1].value


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


def _full_title(results: Results, record: Record) -> str:
    """A title that stands alone: "the same, …" names what it is the same as."""
    title, named = _title(results, record), results.configuration["variants"]
    base = named.get(named.get(record.labels["variant"], {}).get("over", ""), {}).get("title", "")
    return title.replace("the same,", f"{base},", 1) if base else title


def ratio_over(results: Results, record: Record, over: str) -> Quantity | None:
    """Return the paired speed of a variant over the reference, :data:`PEER` or what it is based on.

    None if it is the same one, or the run has no such ratio.
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


def _rounds(results: Results) -> str:
    """How many rounds there were, of those asked for: with a budget there may be fewer."""
    asked = int(results.configuration["rounds"])
    taken = {record["rate"].samples for record in results.select("variant")} or {asked}
    counts = " to ".join(f"{number}" for number in sorted({min(taken), max(taken)}))
    return f"{counts} rounds" if taken == {asked} else f"{counts} rounds ({asked} with more time)"


_BARS = 6


def _whose(results: Results, record: Record) -> str:
    engine = _engine(results, record)
    eager, compiled, own, jax = WHOSE
    if engine["framework"] == "jax":
        return jax
    return own if engine["parts"] else compiled if engine["compiled"] else eager


def _bars(results: Results) -> list[Record]:
    """The variants of the figure, fastest first: PyTorch's own, the best and worst with our kernels, and JAX."""
    records = sorted(results.select("variant"), key=lambda record: -record["rate"].value)
    own = [record for record in records if _engine(results, record)["parts"]]
    compiled = [record for record in own if _engine(results, record)["compiled"]]
    plain = [record for record in records if record not in own]
    eager = [record for record in own if record not in compiled]
    chosen = [*(r for r in plain if r.labels["variant"] != GRAPH_PEER), *compiled[:1], *eager[:1]]
    chosen += [r for r in plain if r not in chosen] + compiled[:0:-1] + eager[1:]
    return sorted(chosen[:_BARS], key=lambda record: -record["rate"].value)


def _throughput(results: Results) -> Chart:
    reference, shown = results.configuration["reference"], _bars(results)
    bars = series_by(
        shown,
        lambda record: _whose(results, record),
        lambda record: Point(
            _full_title(results, record),
            record["rate"],
            text=numbers.count(record["rate"].value)
            + ("" if record.labels["variant"] == reference else f"  {_without_interval(record['speedup'])}"),
        ),
    )
    series = {named.name: named for named in bars}
    least = least_times(results)
    limits = [Limit(_tokens(results) / sum(floor.seconds for floor in least), "at the least time")] if least else []
    most = max([*(1.35 * (r["rate"].high or r["rate"].value) for r in shown), 0.0])
    return Chart(
        "throughput",
        "bars",
        [Panel([replace(series[name], look=look) for name, look in WHOSE.items() if name in series], limits=limits)],
        Axis(
            "thousand tokens/s, higher is better",
            scale=1e-3,
            high=max([most, *(1.2 * limit.value for limit in limits)]),
        ),
        caption=f"Tokens per second of the same training step ({scope(results)}); whiskers from the 20th to the 80th "
        "percentile of the rounds, × is the paired ratio over eager PyTorch."
        + (" The dashed line is the rate at the least time of a step." if limits else "")
        + (" The table has the other variants." if len(shown) < len(results.select("variant")) else ""),
        alt="Speed of the step: PyTorch eager, torch.compile, this repository's kernels in either, and JAX",
        order=[_full_title(results, record) for record in shown],
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
            Column("tokens/s", _rate, keep=True),
            Column("against eager", beside(str(asked["reference"]))),
            *([Column(f"against {compiled['title']}", beside(PEER))] if compiled else []),
            Column("MFU", lambda record: _share_of(record, "MFU"), optional=True),
            Column("peak memory", "peak memory", optional=True),
            Column("first step", _first_step, optional=True),
            Column(f"loss after {steps_before(results)} steps", _last_loss),
        ],
    )


def _rate(record: Record) -> str:
    return numbers.quantity(record["rate"]).replace(" tokens/s", "")


def _first_step(record: Record) -> str | None:
    return _without_interval(record["first step"]) if "first step" in record.values else None


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
        return f"[{change.lens}](../../{change.lens}/README.md)"

    compared = changes(results)
    known = [change for change in compared if change.deltas]
    on_gpu = results.environment.gpu is not None
    what = "a step's kernels, and of the GPU's idle time" if on_gpu else "the parts of a step"
    either = [change for change in compared if "formula or kernel" in change.change]
    return Section(
        "What explains the difference",
        [
            Table(
                compared,
                [
                    Column("the step", "title"),
                    Column("beside", "over"),
                    Column("what is different", "change"),
                    Column("reasons", reasons, left=True),
                    Column("speed over it", "speedup"),
                    Column("verdict", "verdict", keep=True),
                ],
            ),
            "Which of the two each operator took, this run did not record."
            if either and all(change.kernels is None for change in either)
            else "",
            Section(
                "",
                [
                    f"What that changes in the time of {what}, in milliseconds:",
                    Table(
                        known,
                        [
                            Column("the step", "title"),
                            *(
                                Column(name, _delta(name), keep=True)
                                for name in dict.fromkeys(name for change in known for name in change.deltas)
                            ),
                        ],
                    ),
                    "A fused kernel counts whole for one group; *elementwise* is what no other group claims.",
                ],
            ),
            _time_chart(results),
        ],
    )


def _tuning(results: Results) -> Section:
    """What raced for each operator where this run chose the lowerings."""
    return Section(
        "Which lowering each operator takes here",
        [
            "No row said which lowering is faster on this machine, so this run measured it: the whole step with each "
            "operator's kernel over the step with its formula. A kernel is taken if it gains 2 % beyond the control, "
            "the unchanged step in a second process. Kernels that gain less are tried once more, all together.",
            Table(
                results.select("tuning"),
                [
                    Column("operator", lambda record: Code(record.labels["operator"])),
                    Column("taken", lambda record: record.data["choice"], keep=True),
                    Column("together with", _tried_together, optional=True),
                    Column("why it was not timed", lambda record: record.data["why"] or None, optional=True),
                    Column("step with its kernel", "speedup", keep=True),
                    Column("control", "control", keep=True),
                ],
            ),
        ],
    )


def _tried_together(record: Record) -> str | None:
    others: list[str] = record.data.get("together", [])
    return ", ".join(f"`{name}`" for name in others) or None


def _delta(name: str) -> Callable[[Change], str]:
    def cell(change: Change) -> str:
        milliseconds = change.deltas.get(name, 0.0) * 1e3
        return f"{'−' if milliseconds < 0 else '+'}{abs(milliseconds):.2f}" if round(milliseconds, 2) else "0"

    return cell


def _batch_elsewhere(results: Results) -> Section:
    """That jax-baseline's table has the same step at another batch size."""
    bench: Any = configure_bench("cuda" if results.environment.gpu else "cpu", False)["bench"]
    here, elsewhere = results.configuration["batch_size"], int(bench["batch_size"])
    text = (
        f"[jax-baseline](../../jax-baseline/README.md) times the same step at batch {elsewhere}, this report at "
        f"{here}. Work that does not grow with the batch (the optimizer, launches, Python) weighs more here, so the "
        "ratios differ."
    )
    return Section("", [text if here != elsewhere else ""])


def _time_chart(results: Results) -> Chart:
    """The parts of each profiled step; a step that was timed alone is one part."""
    steps = parts_of_steps(results)
    timed = {str(record.labels["variant"]): record["step"].value for record in results.select("variant")}
    if steps:
        steps |= {name: [Part(_WHOLE, seconds)] for name, seconds in timed.items() if name not in steps}
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
            look=_LOOKS.get(name),
        )
        for name in names
    ]
    how = (
        "The GPU works, or it waits for the host."
        if results.environment.gpu
        else "The rest is the dispatcher, Python, autograd's engine, the optimizer's own code, and waiting."
    )
    undivided = f" A step of which only the whole is known is *{_WHOLE}*." if _WHOLE in names else ""
    return Chart(
        "time",
        "stacked",
        [Panel(series)],
        Axis("ms a step, lower is better", scale=1e3),
        caption=f"Where the time of a step goes. {how}{undivided}",
        alt="Parts of each step's time",
        order=[titles[name] for name in timed if name in titles],
    )


_WHOLE = "not divided"
# Colours of the parts; what is left over has a grey, and no two are alike.
_LOOKS = {
    "matmul": 0,
    "attention": 1,
    "norm": 2,
    "elementwise": 3,
    "loss": 5,
    "optimizer": 6,
    "compiled kernels": 8,
    "rest": 7,
    "GPU idle": 7,
    _WHOLE: 4,
}


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
                    Column("tokens/s", _rate, keep=True),
                    *(Column(f"against {title}", over(name), keep=True) for name, title in present.items()),
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
    least, taken = least_times(results), _compared_steps(results)

    def measured(times: dict[str, float]) -> Callable[[Floor], Cell]:
        def cell(floor: Floor) -> Cell:
            seconds = sum(times.get(group, 0.0) for group in floor.groups)
            return (
                f"{numbers.with_unit(seconds, 's')} ({numbers.percent(floor.seconds / seconds)})" if seconds else None
            )

        return cell

    beaten = [floor for floor in least if floor.measured]
    return Section(
        "What is left to the least time",
        [
            _least_time_in_words(results, least),
            Table(
                least,
                [
                    Column("group", lambda floor: " + ".join(floor.groups)),
                    Column("least work", "why", left=True),
                    Column("least time", lambda floor: numbers.with_unit(floor.seconds, "s")),
                    *(
                        Column(results.configuration["variants"][name]["title"], measured(times), keep=True)
                        for name, times in taken.items()
                    ),
                ],
            ),
            "In brackets, the least time as a share of the measured one. Norms and elementwise operators are one "
            "group, since kernels fuse them with one another."
            + (
                f" The least time of {' and of '.join(' + '.join(floor.groups) for floor in beaten)} is the fastest of "
                "these steps, which is below what the measured limit gives."
                if beaten
                else ""
            ),
        ],
    )


def _compared_steps(results: Results) -> dict[str, dict[str, float]]:
    """The times of the kernel groups in PyTorch's own steps and in the fastest with our kernels, by variant."""
    steps = parts_of_steps(results)
    own = [record for record in _of_full_residual(results) if _engine(results, record)["parts"]]
    best = max(own, key=lambda record: record["rate"].value, default=None)
    shown = (results.configuration["reference"], PEER, best.labels["variant"] if best else "")
    return {name: {part.name: part.seconds for part in steps[name]} for name in dict.fromkeys(shown) if name in steps}


def least_times(results: Results) -> list[Floor]:
    """The least time of each group; where a step of the table is below the measured limit, that of the step."""
    return floors(results, list(_compared_steps(results).values()))


def _least_time_in_words(results: Results, least: list[Floor]) -> str:
    records = _of_full_residual(results)
    if not least or not records:
        return ""
    seconds = sum(floor.seconds for floor in least)
    rate, best = _tokens(results) / seconds, max(records, key=lambda record: record["rate"].value)
    products = product_ceiling(results, results.configuration["dtype"])
    assert products is not None  # without it there is no least time
    memory = results.select("memory limit", traffic="1 read 1 write")[0]
    return (
        f"A step that moves and computes no more than it must takes {numbers.with_unit(seconds, 's')} here, "
        f"{numbers.count(rate)} tokens/s; {_full_title(results, best)} reaches "
        f"{numbers.percent(best['rate'].value / rate)} of that. The limits are measured in the same run: a copy at "
        f"{_without_interval(memory['bandwidth'])}, {products.labels['dtype']} products at "
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
                sorted(results.select("dissection"), key=lambda record: list(titles).index(record.labels["variant"])),
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
    first_step = (
        "The first step traces, compiles and runs; the compiled variants of torch share a cache folder that is empty "
        "at the start, so only the first of them includes Inductor's one-time check of the compiler. The first variant "
        "with rmsnorm-fused or custom-ops also builds its extension if it is missing."
        if asked["empty_caches"]
        else "The variants of torch compile at once in a quick run, so no first step is timed."
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
        f"Each variant has its own process. One runs at a time: {asked['steps']} steps a sample, {_rounds(results)}, "
        "in a new random order each round. A rate is the median with its 20th and 80th percentile; a ratio is "
        "the median of the rounds' ratios with a bootstrap interval (of fewer than six rounds, their range). "
        f"{first_step} Nothing is timed unless the first "
        f"losses agree. The last loss is read after {steps_before(results)} steps.{mfu}",
        f"Then each variant of torch is profiled for three steps, and dispatcher-trace traces one step. {profiled} A "
        "kernel belongs to a group by its own name, by the operators that launch it and, in the backward pass, by the "
        "forward operator of its autograd node; what runs between the last matmul of the forward pass and the first of "
        "the backward pass is the loss."
        if asked["dissect"]
        else "",
    ]
