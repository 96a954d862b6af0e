"""What the operators must reach on a kind of machine, what they aim at, and what a run reached."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from benchkit import Quantity, Record, Results, numbers
from benchkit.report import Reached, Target
from benchkit.results import Label
from custom_ops.bench import avx2
from custom_ops.bench.attention import FLEX
from custom_ops.bench.cases import COMPILED, OURS
from custom_ops.bench.training import BASELINE
from custom_ops.report.attention import DIRECTIONS, Attended, attended, ceilings, range_of, without_interval

MISALIGNED = "from the second element on"
_ADD = "custom_ops.vector_add"
WORTH_IT = 1.05  # so many times the speed of torch's operators pays for a kernel of one's own

# Speed over PyTorch's fastest back end at every length, head size and mask of the run: dtype, direction, must, aim.
_ON_A_CPU = (
    ("float32", "forward", 1.0, 1.3),
    ("bfloat16", "forward", 1.0, 1.5),
    ("float32", "backward", 1.0, 1.3),
    ("bfloat16", "backward", 1.0, 1.3),
)
_BY_AVX2 = (0.8, 1.0)
# Speed of a linear layer in 16 bits over torch's in float32, where torch sums 16-bit products in plain loops.
_LINEAR = (0.8, 0.95)
# The same from 4,096 tokens on: dtype, direction, head size (None: every one), must.
_LONG, _SHORT = 4096, 1024
_ON_A_GPU = (
    ("float32", "forward", 64, 3.0),
    ("float32", "forward", 128, 2.5),
    ("float32", "backward", 64, 1.5),
    ("float32", "backward", 128, 1.5),
    ("bfloat16", "forward", 64, 0.95),
    ("bfloat16", "forward", 128, 0.7),
    ("bfloat16", "backward", None, 0.95),
)
# Share of the speed of a copy of the same bytes in the same rounds, beyond the last-level cache.
_BEYOND_CACHE = {"bias_gelu": (0.80, 0.95), "bias_gelu_backward": (0.75, 0.90)}
# The same where torch uses no more than AVX2.
_BEYOND_CACHE_BY_AVX2 = {
    ("bias_gelu", "float32"): (0.85, 0.95), ("bias_gelu", "bfloat16"): (0.60, 0.80),
    ("bias_gelu_backward", "float32"): (0.80, 0.90), ("bias_gelu_backward", "bfloat16"): (0.60, 0.80),
}  # fmt: skip
# Share of the memory limit at the largest size, on a GPU.
_OF_LIMIT = {
    "bias_gelu": 0.95, "bias_gelu_backward": 0.90, "swiglu": 0.95, "swiglu_backward": 0.90, "geglu": 0.95,
    "geglu_backward": 0.90,
}  # fmt: skip


def reached(results: Results) -> list[Reached]:
    """What this run reached of each target; the worst of a target's shapes counts.

    What a run on a CPU was to measure and did not, for want of time say, has a row without a value.
    """
    own = _on_a_gpu(results) if results.environment.gpu else _on_a_cpu(results)
    return [*own, *_on_every_machine(results)]


def _on_a_cpu(results: Results) -> Iterator[Reached]:
    for dtype, direction, must, aim in _ON_A_CPU:
        target = Target(f"attention, {direction}, {dtype}", must, aim, "times")
        if pairs := attended(results, direction=direction, dtype=dtype):
            yield _of_attention(results, target, pairs)
        elif dtype in results.configuration.get("dtypes", ()):
            yield Reached(target, None)
    for direction in DIRECTIONS:
        for dtype in ("float32", "bfloat16"):
            for onednn, limit in ((avx2.UNLIMITED, "AVX2 only"), (avx2.LIMITED, "AVX2 only, oneDNN too")):
                pairs = attended(results, name=avx2.RECORD, direction=direction, dtype=dtype, onednn=onednn)
                if pairs:
                    target = Target(f"attention, {direction}, {dtype}, {limit}", *_BY_AVX2, "times")
                    yield _of_attention(results, target, pairs)
    for name, limit in (("linear", ""), (avx2.LINEAR, ", AVX2 only, oneDNN too")):
        for record in results.select(name, form=OURS):
            what = f"linear, {record.labels['direction']}, {record.labels['dtype']}{limit}"
            same = {key: value for key, value in record.labels.items() if key != "form"}
            peers = results.select(name, **same)
            why = ", ".join(f"{peer.labels['form']} at {without_interval(peer['rate'])}" for peer in peers)
            yield Reached(Target(what, *_LINEAR, "times"), record["share"].value, "float32's speed", f"{why}.")
    yield from _beyond_cache(results)


def _beyond_cache(results: Results) -> Iterator[Reached]:
    """bias_gelu in every dtype of the run, whether measured or not."""
    by_avx2 = results.environment.instructions == "avx2"
    for op, dtype in itertools.product(_BEYOND_CACHE, results.configuration.get("dtypes", ())):
        bounds = _BEYOND_CACHE_BY_AVX2[op, dtype] if by_avx2 else _BEYOND_CACHE[op]
        target = Target(f"{op.replace('_backward', ' backward')}, {dtype}", *bounds)
        records = results.select("beyond the cache", form=OURS, op=op, dtype=dtype)
        if not records:
            yield Reached(target, None)
        for record in records:
            share, taken = record["share"].value, record["time"].value / int(record.labels["count"])
            element, copy = (numbers.with_unit(time, "s") for time in (taken, taken * share))
            yield Reached(target, share, why=f"an element takes {element}, a copy of its bytes {copy}.")


def _on_a_gpu(results: Results) -> Iterator[Reached]:
    for dtype, direction, head_size, must in _ON_A_GPU:
        pairs = [
            pair
            for pair in attended(results, dtype=dtype, direction=direction)
            if pair.tokens >= _LONG and head_size in (None, pair.own.labels["head_size"])
        ]
        if pairs:
            heads = "" if head_size is None else f", head size {head_size}"
            what = f"attention, {direction}, {dtype}{heads}, {numbers.count(_LONG)} tokens and more"
            yield _of_attention(results, Target(what, must, kind="times"), pairs)
    for direction in DIRECTIONS:
        if pairs := attended(results, dtype="bfloat16", direction=direction, length=_SHORT):
            what = f"attention, {direction}, bfloat16, {numbers.count(_SHORT)} tokens"
            yield _of_attention(results, Target(what, 0.95, kind="times"), pairs)
    for direction in DIRECTIONS:
        beside = results.select("attention feature", form=FLEX, direction=direction)
        if measured := [(record["speedup"].value, str(record.labels["feature"])) for record in beside]:
            what = f"attention, {direction}, windows and packed sequences, against FlexAttention"
            target = Target(what, 1.0, 1.5, "times")
            yield Reached(target, *min(measured))
    for op, must in _OF_LIMIT.items():
        measured = [(share, str(record.labels["dtype"])) for record, share in shares(results, op)]
        if measured:
            share, dtype = min(measured)
            yield Reached(Target(f"{op}, of the memory limit", must), share, dtype)


def _on_every_machine(results: Results) -> Iterator[Reached]:
    adds = [
        (record["speedup"].value, str(record.labels["dtype"]))
        for record in largest(results, op="vector_add")
        if "speedup" in record.values  # not where torch's form failed
    ]
    if adds:
        yield Reached(Target("vector_add, against torch.add", 0.98, kind="times"), *min(adds))
    for record in results.select("layout", form=_ADD):
        layout = str(record.labels["layout"])
        if layout != "contiguous":
            what = "misaligned operands" if layout == MISALIGNED else layout
            target = Target(f"vector_add, {what}, against torch.add", 0.95, kind="times")
            yield Reached(target, record["speedup"].value)
    for record in results.select("training"):
        if record.labels["part"] != BASELINE and "speedup" in record.values:
            what = f"the eager training step with {record.labels['part']}, against torch"
            yield Reached(Target(what, 1.0, kind="times"), record["speedup"].value)


def _of_attention(results: Results, target: Target, pairs: list[Attended]) -> Reached:
    inaccurate = [pair for pair in pairs if not pair.same_error]
    worst = min(inaccurate or pairs, key=lambda pair: pair.speedup)
    peer = str(worst.peer.labels["form"])
    if inaccurate:
        own, its = (numbers.error_size(record["error"].value) for record in (worst.own, worst.peer))
        why = f"its error is {own}, that of {peer} {its}."
    else:
        own, its = (without_interval(record["rate"]) for record in (worst.own, worst.peer))
        # Products are measured with all instructions.
        limits = {} if worst.own.name == avx2.RECORD else ceilings(results, worst.dtype)
        alone = "".join(f"; {limit} alone: {numbers.with_unit(rate, 'FLOP/s')}" for limit, rate in limits.items())
        why = f"it runs at {own}, {peer} at {its}{alone}."
    return Reached(target, worst.speedup, f"{peer}'s speed, {worst.shape}", why, accurate=not inaccurate)


@dataclass(frozen=True)
class Gain:
    """An operator at the largest size, or attention over all shapes: its speed over torch's own.

    Attributes:
        what: The operator.
        dtype: Dtype of the tensors.
        speed: Over torch's operators, or over PyTorch's fastest back end: for attention the range over all shapes.
        shown: The speed as text.
        compiled: Speed over torch.compile where that is faster than torch's operators.
        least: For attention the speed over the slowest shape.
        most: For attention that over the fastest.
    """

    what: str
    dtype: str
    speed: Quantity
    shown: str
    compiled: float | None = None
    least: float | None = None
    most: float | None = None

    @property
    def lowest(self) -> float:
        """The slowest of its speeds."""
        return self.least if self.least is not None else self.speed.value

    @property
    def highest(self) -> float:
        """The fastest of its speeds."""
        return self.most if self.most is not None else self.speed.value

    @property
    def worth_it(self) -> str:
        """Whether the interval lies above :data:`WORTH_IT`."""
        low, high = self.speed.low or self.speed.value, self.speed.high or self.speed.value
        return "yes" if low > WORTH_IT else "**no**" if high < WORTH_IT else "it depends"

    @property
    def compiled_alike(self) -> bool:
        """Whether it gains over torch's operators alone: torch.compile makes a kernel as good."""
        return self.worth_it == "yes" and self.compiled is not None and self.compiled < WORTH_IT


def gains(results: Results) -> list[Gain]:
    """The gain of each operator."""
    gained = []
    for record in largest(results):
        if "speedup" not in record.values:
            continue
        strongest = beside_the_strongest(results, record)
        compiled = strongest[0] if strongest is not None and strongest[1] == COMPILED else None
        op, dtype, speed = str(record.labels["op"]), str(record.labels["dtype"]), record["speedup"]
        gained.append(Gain(op, dtype, speed, numbers.quantity(speed), compiled))
    every = attended(results)
    for dtype, direction in dict.fromkeys((pair.dtype, str(pair.own.labels["direction"])) for pair in every):
        speeds = [
            pair.own["speedup"] for pair in every if (pair.dtype, pair.own.labels["direction"]) == (dtype, direction)
        ]
        low, high = min(speed.low or speed.value for speed in speeds), max(s.high or s.value for s in speeds)
        shown = range_of(speed.value for speed in speeds)
        ends = {"least": min(speed.value for speed in speeds), "most": max(speed.value for speed in speeds)}
        name = f"flash_attention {direction}"
        gained.append(Gain(name, dtype, Quantity(speeds[0].value, "×", low, high), shown, **ends))
    return gained


def largest(results: Results, **labels: Label) -> list[Record]:
    """This package's records at the largest size of the run; none of an operator whose sizes ended before it."""
    records = results.select("speed", form=OURS)
    most = max((int(record.labels["count"]) for record in records), default=0)
    return results.select("speed", form=OURS, count=most, **labels)


def shares(results: Results, op: str) -> Iterator[tuple[Record, float]]:
    """The share of the memory limit at the largest size."""
    for record in largest(results, op=op):
        if (share := share_of_limit(results, record)) is not None:
            yield record, share


def share_of_limit(results: Results, record: Record) -> float | None:
    """The rate of an operator over the memory limit of its traffic; None if that was not measured."""
    limits = results.select("memory limit", traffic=record.labels["limit"])
    return record["rate"].value / limits[0]["bandwidth"].value if limits else None


def beside_the_strongest(results: Results, record: Record) -> tuple[float, str] | None:
    """The speed of an operator relative to the faster of torch's operators and torch.compile, and which it is."""
    same = {key: record.labels[key] for key in ("op", "dtype", "count")}
    peers = [peer for form in ("torch", COMPILED) for peer in results.select("speed", form=form, **same)]
    if not peers:
        return None
    peer = min(peers, key=lambda peer: peer["time"].value)
    name = str(peer.labels["form"])
    return peer["time"].value / record["time"].value, "torch's operators" if name == "torch" else name
