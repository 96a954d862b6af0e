"""The report sections on throughput: what each engine is, how fast it is, and what slows the slow ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from benchkit import Quantity, Results, numbers
from benchkit.report import (
    WHOSE,
    Axis,
    Block,
    Chart,
    Column,
    Panel,
    Point,
    Section,
    Share,
    Table,
    bullets,
    paired_ratio_note,
    series_by,
)
from benchkit.report.tables import cell_text
from engines.spec import EngineSpec
from jax_baseline.diff.records import DiffRecord
from jax_baseline.report.hlo_sections import scope, slowest_part
from jax_baseline.timing.records import EngineRecord

_STAGES = ("trace", "lower", "compile")
_ATTENTIONS = {"xla": "XLA's", "cudnn": "cuDNN's"}

# By a setting and its slower value: why it is slower, inferred from how the two work, and what to do.
_ADVICE: Mapping[tuple[str, Any], str] = {
    ("attention", "xla"): "XLA writes the scores of all pairs of positions to memory and reads them again (its part is "
    "`block*/attention` beside Inductor); train with `--attention cudnn`",
    ("compiled", False): "Eager mode writes each operator's result to memory and reads it again; compile the model",
    ("scan", True): "The loop stacks what each block keeps for the backward pass and copies slices of the stacks in "
    "every iteration; leave `--scan` off, unless the first step matters more",
    ("donate", False): "Each step writes a second copy of weights and moments; donate the state",
    ("remat", True): "The backward pass computes each block a second time; leave `--remat` off, unless memory is short",
}


def answer(results: Results) -> list[Block]:
    """The throughput of every engine, why the slow ones are slow, and what to do."""
    engines = by_ratio(results)
    reference = results.configuration["bench"]["reference"]
    notes = bullets([*_behind(results), _ratio_note(engines, reference)])
    bench = results.configuration["bench"]
    return [_throughput(engines, bench), _engine_table(engines, reference), _slower_table(engines), notes]


def first_step(results: Results) -> Section:
    """The time of each engine's first step by stage."""
    stages = [Column[EngineRecord](stage, partial(_stage, stage)) for stage in _STAGES]
    return Section(
        "The first step",
        [
            "The time from an initialised model to its first result. JAX has three stages: Python to jaxpr, jaxpr to "
            "StableHLO, and StableHLO to machine code. torch.compile interleaves its stages, so it has one figure.",
            Table(
                by_ratio(results),
                [
                    Column("engine", "engine"),
                    Column("first step", lambda record: record.figures.first_step),
                    *stages,
                    Column("first loss", lambda record: f"{record.figures.loss.value:.6f}"),
                ],
            ),
        ],
    )


def _stage(stage: str, record: EngineRecord) -> Quantity | None:
    return record.figures.compile_stages.get(stage)


def by_ratio(results: Results) -> list[EngineRecord]:
    """Return the engines, the fastest by the paired ratio first."""
    # Without the reference nothing is paired, and the absences say why.
    paired = [record for record in EngineRecord.select(results) if record.figures.speedup]
    return sorted(paired, key=lambda record: -_speedup(record).value)


def fastest(results: Results, framework: str) -> EngineRecord | None:
    """Return the engine of a framework with the highest paired ratio; None if none was timed."""
    return next((record for record in by_ratio(results) if record.framework == framework), None)


def _speedup(record: EngineRecord) -> Quantity:
    speedup = record.figures.speedup
    assert speedup is not None  # by_ratio() leaves such records out
    return speedup


def _times(record: EngineRecord) -> str:
    return f"{numbers.significant(_speedup(record).value)}×"


def _ends(figure: Quantity) -> tuple[float, float]:
    return (figure.value if figure.low is None else figure.low, figure.value if figure.high is None else figure.high)


def _compared(jax: EngineRecord, torch: EngineRecord) -> str:
    """Compare two ratios over the same reference by their intervals."""
    (low, high), (rival_low, rival_high) = _ends(_speedup(jax)), _ends(_speedup(torch))
    if not (_speedup(jax).decides and _speedup(torch).decides) or (low <= rival_high and rival_low <= high):
        return "not distinguishable from torch's"
    return "slower than torch's" if high < rival_low else "faster than torch's"


def headline(results: Results) -> str:
    """How fast JAX's best step is beside torch's best; empty if one of them is missing."""
    jax, torch = fastest(results, "jax"), fastest(results, "torch")
    if jax is None or torch is None:
        return ""
    bench = results.configuration["bench"]
    times = f"JAX {_times(jax)}, torch {_times(torch)} of `{bench['reference']}`"
    return f"its best `{bench['preset']}` step is {_compared(jax, torch)} best ({times})"


def use(results: Results) -> str:
    """Which engine to train with, and how fast it is; empty without engines of both frameworks."""
    jax, torch = fastest(results, "jax"), fastest(results, "torch")
    if jax is None or torch is None:
        return ""
    bench = results.configuration["bench"]
    sequences = f"{bench['batch_size']} sequence{'' if bench['batch_size'] == 1 else 's'}"
    what = f"{sequences}, {bench['dtype']}{', one block' if bench.get('layers') == 1 else ''}"
    ways = " and ".join(
        f"`{record.engine}` ({', '.join(_traits(record.spec).values())}) {interval(record.figures.rate)} tokens/s"
        for record in (jax, torch)
    )
    return f"To train ({what}), the fastest are {ways}."


def avoid(results: Results) -> str:
    """The engines that are slower than the reference, or what XLA is slower at."""
    reference = results.configuration["bench"]["reference"]
    slow = [record for record in by_ratio(results) if _ends(_speedup(record))[1] < 1]
    if slow:
        named = ", ".join(f"`{record.engine}` ({_times(record)})" for record in reversed(slow))
        return f"the engine is one that loses to `{reference}`: {named}."
    return next(
        (f"you compute loss and gradients alone: {text}." for ratio, text in _beside_inductor(results) if ratio < 1),
        "torch already computes it: no engine here is slower, and a port is work.",
    )


def worst(results: Results) -> str:
    """The slowest engine of JAX, or its loss and gradients beside Inductor's where those are slower, as a sentence."""
    reference = results.configuration["bench"]["reference"]
    engines = [
        (_speedup(record).value, f"{numbers.quantity(_speedup(record))} `{reference}`, for `{record.engine}`")
        for record in by_ratio(results)
        if record.framework == "jax"
    ]
    ratios = [*engines, *_beside_inductor(results)]
    return f"{min(ratios)[1]}." if ratios else ""


def _beside_inductor(results: Results) -> list[tuple[float, str]]:
    """Inductor's time of the loss and gradients over XLA's, with both times as text."""
    compared = []
    for record in DiffRecord.select(results):
        xla, inductor = (record.compilers[name].time for name in ("XLA", "Inductor"))
        if xla and inductor:
            sequences = f"{record.batch_size} sequence{'' if record.batch_size == 1 else 's'}"
            ratio = inductor.value / xla.value
            times = f"XLA {numbers.quantity(xla)}, Inductor {numbers.quantity(inductor)}"
            speed = numbers.with_unit(ratio, "×")
            compared.append((ratio, f"{speed} Inductor's speed, for loss and gradients of {sequences} ({times})"))
    return compared


def _traits(spec: EngineSpec) -> dict[str, str]:
    """Describe a variant, by the field that makes it so."""
    if spec.framework == "torch":
        traits = {"compiled": "torch.compile" if spec.compiled else "PyTorch, eager"}
    else:
        traits = {"attention": f"JAX, {_ATTENTIONS.get(spec.attention, spec.attention)} attention"}
    optional = {
        "donate": (not spec.donate, "state copied and not donated"),
        "scan": (spec.scan, "blocks in one loop (`scan`)"),
        "remat": (spec.remat, "blocks recomputed in the backward pass"),
        "steps_per_dispatch": (spec.steps_per_dispatch > 1, f"{spec.steps_per_dispatch} steps per dispatch"),
        "low_precision_residual": (spec.low_precision_residual, "residual stream in the compute dtype"),
        "options": (bool(spec.options), f"`{spec.options}`"),
    }
    return traits | {name: words for name, (given, words) in optional.items() if given}


class _Slower(NamedTuple):
    """An engine slower than the reference, the fastest one that differs in a single setting, and the setting."""

    slow: EngineRecord
    fast: EngineRecord
    setting: str


def _slower(engines: Sequence[EngineRecord]) -> dict[str, _Slower]:
    """By name, the engines that are slower for one setting; ``engines`` has the fastest first."""
    slower: dict[str, _Slower] = {}
    for slow, fast in product(engines, engines):
        settings = [
            option.name
            for option in fields(EngineSpec)
            if getattr(slow.spec, option.name) != getattr(fast.spec, option.name)
        ]
        behind = _ends(_speedup(slow))[1] < min(1, _ends(_speedup(fast))[0])
        if behind and len(settings) == 1:
            slower.setdefault(slow.engine, _Slower(slow, fast, settings[0]))
    return slower


def _slower_table(engines: Sequence[EngineRecord]) -> Table[_Slower]:
    """What slows the slow engines, the slowest first."""

    def both(figure: Callable[[EngineRecord], str | Quantity | None]) -> Callable[[_Slower], str | None]:
        def cell(row: _Slower) -> str | None:
            pair = [figure(record) for record in (row.slow, row.fast)]
            return None if None in pair else " → ".join(map(cell_text, pair))

        return cell

    def advice(row: _Slower) -> str:
        return _ADVICE.get((row.setting, getattr(row.slow.spec, row.setting)), "not known; use the faster one")

    return Table(
        list(_slower(engines).values())[::-1],
        [
            Column("slower engine", lambda row: f"`{row.slow.engine}`"),
            Column("faster", lambda row: f"`{row.fast.engine}`"),
            Column("by the setting", lambda row: f"`{row.setting}`"),
            Column("why (inferred), and what to do", advice, left=True, keep=True),
            Column("speed", both(_times)),
            Column("first step", both(lambda record: record.figures.first_step)),
            Column("peak memory", both(lambda record: record.figures.peak_memory), optional=True),
        ],
    )


def _engine_table(engines: Sequence[EngineRecord], reference: str) -> Table[EngineRecord]:
    slower = _slower(engines)

    def what(record: EngineRecord) -> str:
        traits = _traits(record.spec)
        if record.engine in slower and (setting := slower[record.engine].setting) in traits:
            traits[setting] = f"**{traits[setting]}**"
        return ", ".join(traits.values())

    def ratio(record: EngineRecord) -> str:
        text = "1" if record.engine == reference else numbers.quantity(_speedup(record))
        return f"**{text}**" if _ends(_speedup(record))[1] < 1 else text

    return Table(
        engines,
        [
            Column("engine", lambda record: f"`{record.engine}`"),
            Column(f"what it is{' (bold: what slows it)' if slower else ''}", what, left=True),
            Column(f"speed over {reference}", ratio),
            Column("tokens/s", lambda record: interval(record.figures.rate)),
            Column("step", lambda record: record.figures.step),
            Column("MFU", _mfu, optional=True),
            Column("peak memory", lambda record: record.figures.peak_memory, optional=True),
        ],
    )


def _mfu(record: EngineRecord) -> Share | None:
    return Share(record.figures.mfu.value) if record.figures.mfu else None


def mfu_formula(results: Results) -> str:
    """Say what MFU is; empty if it was not measured."""
    if not any(map(_mfu, by_ratio(results))):
        return ""
    return (
        " MFU is the model FLOPs utilisation: the floating-point operations per second that the tokens need (6·N + "
        "12·L·H·Q·T for each token, Chowdhery et al. 2022), over the dense peak of the datasheet for "
        f"{results.configuration['bench']['dtype']}."
    )


def _ratio_note(engines: Sequence[EngineRecord], reference: str) -> str:
    if not any(record.engine == reference for record in engines):
        return ""
    return paired_ratio_note(
        {f"`{record.engine}`": record.figures.rate.value for record in engines},
        {f"`{record.engine}`": _speedup(record).value for record in engines},
        f"`{reference}`",
    )


def _behind(results: Results) -> list[str]:
    """Return why JAX's best step is slower than torch's best, where it is: the part that differs most."""
    jax, torch = fastest(results, "jax"), fastest(results, "torch")
    record = next(iter(DiffRecord.select(results)), None)
    if not (jax and torch and record) or not _compared(jax, torch).startswith("slower"):
        return []
    part = slowest_part(record)
    if not part:
        return []
    advice = "use `torch-compile` for speed"
    if results.environment.gpu is None:
        advice += "; JAX's other attention, cuDNN's, needs a CUDA GPU"
    return [
        f"**JAX's best, `{jax.engine}`, is slower than torch's, `{torch.engine}`.** Measured in the loss and gradients "
        f"({scope(record)}): {part} What to do: {advice}."
    ]


def interval(rate: Quantity) -> str:
    """Format a rate with its interval, both as counts."""
    ends = "" if rate.low is None or rate.high is None else f" ({numbers.count(rate.low)}–{numbers.count(rate.high)})"
    return f"{numbers.count(rate.value)}{ends}"


def _throughput(records: Sequence[EngineRecord], bench: Mapping[str, Any]) -> Chart:
    def bar(record: EngineRecord) -> Point:
        rate = record.figures.rate
        ratio = "reference" if record.engine == bench["reference"] else _times(record)
        hover = f"{record.engine}: {interval(rate)} tokens/s, {ratio}"
        text = f"{numbers.count(rate.value)} ({ratio})"
        return Point(record.engine, rate, text, hover)

    def whose(record: EngineRecord) -> str:
        eager, compiled, _, jax = WHOSE
        return jax if record.framework == "jax" else compiled if record.spec.compiled else eager

    bars = {series.name: series for series in series_by(records, whose, bar)}
    return Chart(
        "throughput",
        "bars",
        [Panel([replace(bars[name], look=look) for name, look in WHOSE.items() if name in bars])],
        Axis(
            "tokens per second (higher is better)",
            high=1.4 * max((_ends(record.figures.rate)[1] for record in records), default=1.0),
        ),
        f"Tokens per second of one whole training step of `{bench['preset']}`; in parentheses the paired "
        f"ratio over `{bench['reference']}`. Whiskers show the 20th to the 80th percentile of the rounds.",
        "Tokens per second of each engine",
        order=[record.engine for record in sorted(records, key=lambda record: -record.figures.rate.value)],
    )
