"""What a run found in a few sentences: the best, when it pays and when not, and the worst of all its ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchkit import Record, Results, numbers
from custom_ops.bench import avx2
from custom_ops.bench.cases import OURS
from custom_ops.bench.loss import PARTS_RECORD
from custom_ops.bench.training import BASELINE
from custom_ops.report.attention import attended, range_of
from custom_ops.report.targets import Gain, gains, shares

# Records with a speed over torch's own, and those with the memory of several forms.
_ONE_ELEMENT = "one element"
_SPEEDS = ("speed", _ONE_ELEMENT, "beyond the cache", "attention", avx2.RECORD, "loss", "large_loss", PARTS_RECORD)
_MEMORIES = ("peak memory", "attention memory", "attention resident memory", "loss", "large_loss")
# How the labels that say on what are written.
_SHAPE_LABELS: dict[str, Callable[[Any], str]] = {
    "direction": str,
    "dtype": str,
    "head_size": "head size {}".format,
    "length": "{:,} tokens".format,
    "count": "{:,} elements".format,
    "rows": "{:,} rows".format,
    "classes": "{:,} classes".format,
    "causal": lambda _: "causal",
}


class Ratio(NamedTuple):
    """A speed of this package over torch's, and what it is the speed of."""

    speed: float
    what: str


def headline(results: Results) -> str:
    """The share of the memory limit, and the speed of attention over every shape: the first sentence."""
    parts = []
    for _, share in list(shares(results, "bias_gelu"))[:1]:
        full = round(share, 2) >= 1
        parts.append(f"bias_gelu reaches {'' if full else numbers.percent(share, 0) + ' of '}the memory limit")
    if pairs := attended(results):
        speeds = range_of(pair.speedup for pair in pairs)
        parts.append(f"attention, forward and backward, runs at {speeds} the speed of PyTorch's fastest")
    return f"{', and '.join(parts)}." if parts else "Neither bias_gelu nor attention was measured."


def use(results: Results) -> str:
    """The operators that gain, as the end of a sentence."""
    won = _named([gain for gain in gains(results) if gain.worth_it == "yes"])
    return f"an operator avoids passes over memory that torch's make, which gains here: {won}." if won else ""


def avoid(results: Results) -> str:
    """The operators that gain nothing, as the end of a sentence."""
    every = gains(results)
    lost = _named([gain for gain in every if gain.worth_it != "yes"])
    fused = [gain for gain in every if gain.compiled_alike]
    reasons = [f"it has nothing to avoid, or torch's own is as good: {lost}"] if lost else []
    if fused:
        alike = ", ".join(f"{gain.what} {gain.dtype} ({numbers.significant(gain.compiled or 0)}×)" for gain in fused)
        reasons.append(f"torch.compile makes the same kernel: {alike}")
    return f"{'; or '.join(reasons)}." if reasons else "nothing of it is on the path that takes the time."


def _named(chosen: list[Gain]) -> str:
    speeds: dict[str, list[float]] = {}
    dtypes: dict[str, list[str]] = {}
    for gain in chosen:
        speeds.setdefault(gain.what, []).extend((gain.lowest, gain.highest))
        dtypes.setdefault(gain.what, []).append(gain.dtype)
    return ", ".join(
        f"{what}{f' {dtypes[what][0]}' if len(dtypes[what]) == 1 else ''} ({range_of(values)})"
        for what, values in speeds.items()
    )


def ratios(results: Results) -> list[Ratio]:
    """Every speed of this package over torch's operators or PyTorch's back ends that the report has."""
    return [*_speeds(results), *_in_layouts(results), *_in_training(results)]


def _speeds(results: Results) -> Iterator[Ratio]:
    for name in _SPEEDS:
        for record in results.select(name):
            if "speedup" in record.values and str(record.labels["form"]).startswith(OURS):
                limited = ", limited to AVX2" if name == avx2.RECORD else ""
                yield Ratio(record["speedup"].value, f"{_described(record)}{limited}")


def _in_layouts(results: Results) -> Iterator[Ratio]:
    for record in results.select("layout", form="custom_ops.vector_add"):
        yield Ratio(record["speedup"].value, f"vector_add, {record.labels['layout']}")


def _in_training(results: Results) -> Iterator[Ratio]:
    for record in results.select("training"):
        part = record.labels["part"]
        if part != BASELINE and "speedup" in record.values:
            yield Ratio(record["speedup"].value, f"the `{record.labels['preset']}` training step with {part}")


def _described(record: Record) -> str:
    """An operator or its form, and the labels that say on what."""
    labels = record.labels
    subject = labels.get("op") or (
        "attention" if record.name.startswith("attention") else f"the loss ({labels.get('part', labels['form'])})"
    )
    shown = [record.name] if record.name == _ONE_ELEMENT else []
    shown += [show(labels[name]) for name, show in _SHAPE_LABELS.items() if labels.get(name)]
    return f"{subject} ({', '.join(shown)})" if shown else str(subject)


def worst(results: Results) -> str:
    """The slowest of all ratios, and the largest memory beside torch's, as sentences."""
    sentences = []
    if every := ratios(results):
        slowest = min(every)
        sentences.append(f"{numbers.with_unit(slowest.speed, '×')} of torch's speed, for {slowest.what}.")
    memory = max(_memories(results), default=None)
    if memory is not None and memory[0] > 1:
        sentences.append(memory[1])
    return " ".join(sentences)


def _memories(results: Results) -> Iterator[tuple[float, str]]:
    """The peak of this package over that of the leanest other form, and both as a sentence."""
    for name in _MEMORIES:
        for own in results.select(name):
            if "peak" not in own.values or own.labels["form"] != OURS:
                continue
            same = {key: value for key, value in own.labels.items() if key != "form"}
            forms = [r for r in results.select(name, **same) if not str(r.labels["form"]).startswith(OURS)]
            others = [record for record in forms if record["peak"].value > 0]  # a form of small tensors may take none
            if others:
                peer = min(others, key=lambda record: record["peak"].value)
                ours, its = (numbers.with_unit(record["peak"].value, "B") for record in (own, peer))
                name_of_peer = str(peer.labels["form"])
                whose = name_of_peer if "torch" in name_of_peer.lower() else f"PyTorch's {name_of_peer}"
                text = f"Memory at its peak: {_described(own)} takes {ours}, {whose} {its}."
                yield own["peak"].value / peer["peak"].value, text
