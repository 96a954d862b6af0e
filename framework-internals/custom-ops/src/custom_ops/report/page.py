"""The report: its sections in order, computed from the results alone. Without records a section is absent."""

from __future__ import annotations

from benchkit import Record, Results, numbers
from benchkit.report import Cell, Column, Report, Section, Table, Targets, bullets
from custom_ops.bench import avx2, build_costs
from custom_ops.bench.cases import OURS
from custom_ops.bench.loss import PARTS_RECORD
from custom_ops.report import attention, operators, targets
from custom_ops.report.finding import avoid, headline, use, worst

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
_SOURCES = {
    "named library": "a library that `CUSTOM_OPS_LIBRARY` names",
    "wheel": "the installed wheel",
    "compiled here": "a library compiled here",
}
_CUDA = {"library": "with its CUDA kernels", "run-time compilation": "with CUDA kernels compiled at run time"}


def report(results: Results) -> Report:
    """The report of one run."""
    return Report(
        title="custom-ops: the roads from a kernel to torch.ops",
        headline=headline(results),
        use=use(results),
        avoid=avoid(results),
        worst=worst(results),
        answer=[
            attention.chart(results),
            Section(
                "",
                [
                    "Attention beside the fastest of PyTorch's fused back ends, over all shapes of the run:",
                    attention.summary(results),
                ],
            ),
            *operators.answer(results),
        ],
        findings=[
            _when(results),
            _targets(results),
            _loss(results, "loss", "The loss of a language model"),
            _loss(results, "large_loss", "The loss of a large vocabulary"),
            _loss_parts(results),
            _training(results),
            _roads(results),
        ],
        details=[
            *operators.calls_and_sizes(results),
            *attention.sections(results),
            *operators.details(results),
        ],
        asked=[
            "What does each road from C++ and CUDA sources to a PyTorch operator cost, at build time and at every "
            "call? What does a fused kernel gain over torch's operators? How fast and how accurate is attention, "
            "compared with `scaled_dot_product_attention`? When is an operator worth writing?",
            *_serving(results),
        ],
        method=_method(results),
        limits=[
            "Calls were timed in a tight loop, with code and data in the caches. In a program they take longer.",
            "Bytes are counted, not read from hardware counters. They ignore traffic that a cache saves or a write "
            "adds.",
            "Each build ran once, so its time has no interval. The library was built for this machine's kernels only."
            if results.select("build")
            else "",
        ],
    )


def _when(results: Results) -> Section:
    count = max((int(record.labels["count"]) for record in targets.largest(results)), default=0)
    return Section(
        "When to write one, and when not to",
        [
            f"The memory-bound operators on {numbers.count(count)} elements, beside torch's operators, and attention "
            "beside PyTorch's fastest back end. It is worth it where the interval, for attention the range over all "
            "shapes, lies above 1.05×; *eager alone* where torch.compile makes a kernel that is as good.",
            Table(
                targets.gains(results),
                [
                    Column("operator", "what"),
                    Column("dtype", "dtype", left=True),
                    Column("speed over torch", "shown"),
                    Column("over torch.compile, where that beats torch", "compiled", optional=True),
                    Column("worth it", lambda gain: "eager alone" if gain.compiled_alike else gain.worth_it, keep=True),
                ],
            ),
            "The bytes decide: an operator gains from the memory traffic that its fusion avoids. An operator that "
            "avoids none can at best be as fast as torch's.",
        ],
    )


def _targets(results: Results) -> Section:
    linears = results.select("linear") or results.select(avx2.LINEAR)
    of_linears = "for linear layers in 16 bits the speed of torch's in float32; " if linears else ""
    return Section(
        "Must, aim and reached",
        [
            "Each row has the worst of its shapes: for attention the speed of PyTorch's fastest back end, at an error "
            f"of at most {attention.SAME_ERROR} times its own; {of_linears}for bias_gelu the share of the memory "
            "limit, on a CPU that of a copy on tensors beyond the last-level cache. "
            '"AVX2 only" is a process with `ATEN_CPU_CAPABILITY=avx2`, which limits both, but not oneDNN, whose '
            'products PyTorch takes in bfloat16; "oneDNN too" has `ONEDNN_MAX_CPU_ISA=AVX2` as well.',
            Targets(targets.reached(results), beyond=operators.BEYOND_LIMIT),
        ],
    )


def _loss(results: Results, name: str, title: str) -> Section:
    """The loss at one size: records ``loss``, or ``large_loss`` for a vocabulary of today."""
    records = results.select(name)
    rows, width, classes = (
        numbers.count(max((int(record.labels[size]) for record in records), default=0))
        for size in ("rows", "width", "classes")
    )
    return Section(
        title,
        [
            f"Loss and both gradients of {rows} rows of {width} columns and {classes} classes. The three matrix "
            "products are the same in every form; the least memory takes a fourth.",
            Table(
                records,
                [
                    Column("form", "form"),
                    Column("dtype", "dtype", left=True),
                    Column("time", "time"),
                    Column("speed over torch", "speedup"),
                    Column("peak memory", "peak", optional=True),
                    Column("loss", lambda record: f"{record['loss'].value:.6f}"),
                ],
            ),
        ],
    )


def _loss_parts(results: Results) -> Section:
    records = results.select(PARTS_RECORD, form=OURS)
    rows, width, classes = (
        numbers.count(max((int(record.labels[size]) for record in records), default=0))
        for size in ("rows", "width", "classes")
    )

    def other(record: Record) -> Cell:
        peers = [r for r in results.select(PARTS_RECORD, part=record.labels["part"]) if r.labels["form"] != OURS]
        return peers[0]["time"] if peers else None

    peers = dict.fromkeys(str(record.labels["form"]) for record in results.select(PARTS_RECORD))
    return Section(
        "What else a loss may have",
        [
            f"Loss and both gradients of {rows} rows of {width} columns and {classes} classes, with parts that one "
            "kernel computes in the same pass over the logits.",
            Table(
                records,
                [
                    Column("with", "part"),
                    Column("dtype", "dtype", left=True),
                    Column("time", "time"),
                    Column("of the cross-entropy's speed", "of_alone"),
                    Column(next((form for form in peers if form != OURS), "torch"), other),
                    Column("speed over it", "speedup"),
                ],
            ),
        ],
    )


def _training(results: Results) -> Section:
    records = results.select("training")
    preset = records[0].labels["preset"] if records else ""
    return Section(
        "Inside a training step",
        [
            f"The repository's GPT, preset {preset}, eager. The loss of the first step shows that all variants compute "
            "the same.",
            Table(
                records,
                [
                    Column("replaced", "part"),
                    Column("time a step", "time"),
                    Column("speed over torch", "speedup"),
                    Column("first loss", lambda record: f"{record['loss'].value:.6f}"),
                ],
            ),
        ],
    )


def _roads(results: Results) -> Section:
    return Section(
        "What the roads cost",
        [
            Table(
                results.select("build"),
                [
                    Column("road", "road"),
                    Column("build from scratch, processor time", "build"),
                    Column("load when built", "load"),
                    Column("file", "library"),
                    Column("works with", lambda record: _ROADS[str(record.labels["road"])][0]),
                    Column("lacks", lambda record: _ROADS[str(record.labels["road"])][1]),
                ],
            )
        ],
    )


def _serving(results: Results) -> list[str]:
    """Which build the operators came from, and what it lacks."""
    texts = []
    for record in results.select("serving"):
        road, cuda = str(record.labels["road"]), str(record.labels["cuda"])
        texts += [
            f"In this run, the operators came from {_SOURCES.get(road, road)} (sha256 "
            f"`{str(record.labels['sha256'])[:16]}…`), {_CUDA.get(cuda, 'without CUDA kernels')}.",
            bullets(f"Not in use: {what}, because {why}." for what, why in (record.data or {}).items()),
        ]
    return texts


def _method(results: Results) -> list[str]:
    replayed = any(record.labels["clock"] == "cuda-graph" for record in results.select("speed"))
    placements = results.configuration.get("placements", 1)
    limits = ", ".join(
        f"{numbers.quantity(record['bandwidth'])} for {record.labels['traffic']}"
        + (f" ({numbers.quantity(record['ordinary'])} with ordinary stores, which first read each line that they write)"
           if "ordinary" in record.values else "")
        for record in results.select("memory limit")
    )  # fmt: skip
    tensor = "".join(
        f", with {numbers.quantity(record['tensor'])} per tensor" for record in results.select("memory limit")[:1]
    )
    products = ", ".join(
        f"{numbers.quantity(record['rate'])} in {record.labels['dtype']}" for record in results.select("product limit")
    )
    return [
        bullets(
            [
                "Variants are timed in rounds, in random order. A time is a median with its 20th and 80th percentile. "
                "A ratio is computed within each round; its interval is a 95 % bootstrap interval of the median.",
                "Bandwidth is the bytes that a fused kernel must move, each operand counted once, divided by the time. "
                "All forms of an operator use the same bytes.",
                "Calls are timed with the host's clock, without waiting for the kernel. Operators over sizes are timed "
                + (
                    "as kernels replayed from a CUDA graph, with operands that rotate through more than the L2 cache."
                    if replayed
                    else "as whole calls with the wall clock, with operands that rotate through more than the "
                    "last-level cache."
                ),
                "A kernel's speed depends on where its operands lie within pages of 4 KiB: a load waits for an earlier "
                f"store at an equal address. Operands rotate through {placements} drawn placements or more, so a time "
                "is of their mix, and its interval shows their differences."
                if placements > 1
                else "",
                f"Memory limits measured in this run{tensor}: {limits}." if limits else "",
                f"Rates of square matrix products alone, measured in this run: {products}." if products else "",
                "Builds start from an empty folder and run once each, in parallel. The time given is the processor "
                'time of all processes that take part, without the import of torch. "Load" is wall time, one build '
                "after another."
                if results.select("build")
                else "",
            ]
        )
    ]
