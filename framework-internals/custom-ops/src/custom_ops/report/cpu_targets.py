"""The targets of the operators on a CPU, and what a run reached of them, computed from its records alone."""

from __future__ import annotations

from collections.abc import Iterator

from benchkit import Record, Results, numbers
from benchkit.report.must_and_aim import Reached, Target
from custom_ops.bench import avx2
from custom_ops.bench.cases import OURS
from custom_ops.report import attention

# Speed over PyTorch's fastest back end, at every length, head size and mask of the run.
ATTENTION = {
    ("forward", "float32"): Target("attention, forward, float32", 1.0, 1.3, "times"),
    ("forward", "bfloat16"): Target("attention, forward, bfloat16", 1.0, 1.5, "times"),
    ("backward", "float32"): Target("attention, backward, float32", 1.0, 1.3, "times"),
    ("backward", "bfloat16"): Target("attention, backward, bfloat16", 1.0, 1.3, "times"),
}
BY_AVX2 = {
    (direction, dtype, onednn): Target(f"attention, {direction}, {dtype}, {limit}", 0.8, 1.0, "times")
    for direction in ("forward", "backward")
    for dtype in ("float32", "bfloat16")
    for onednn, limit in ((avx2.UNLIMITED, "AVX2 only"), (avx2.LIMITED, "AVX2 only, oneDNN too"))
}
# Share of the speed of a copy of the same bytes in the same rounds, beyond the last-level cache.
BIAS_GELU = {
    ("bias_gelu", "float32"): Target("bias_gelu, float32", 0.80, 0.95, "share"),
    ("bias_gelu", "bfloat16"): Target("bias_gelu, bfloat16", 0.80, 0.95, "share"),
    ("bias_gelu_backward", "float32"): Target("bias_gelu backward, float32", 0.75, 0.90, "share"),
    ("bias_gelu_backward", "bfloat16"): Target("bias_gelu backward, bfloat16", 0.75, 0.90, "share"),
}


def reached(results: Results) -> Iterator[Reached]:
    """What this run reached, for each target that it measured; nothing on a GPU."""
    if results.environment.gpu:
        return
    for (direction, dtype), target in ATTENTION.items():
        if records := attention.own(results, direction=direction, dtype=dtype):
            yield _of_attention(results, target, records)
    for (direction, dtype, onednn), target in BY_AVX2.items():
        if records := attention.own(results, name=avx2.RECORD, direction=direction, dtype=dtype, onednn=onednn):
            yield _of_attention(results, target, records)
    for (op, dtype), target in BIAS_GELU.items():
        for record in results.select("beyond the cache", form=OURS, op=op, dtype=dtype):
            yield _of_bias_gelu(target, record)


def beyond_cache_rows(results: Results) -> list[tuple[str, ...]]:
    """bias_gelu beyond the last-level cache: one row per operator and dtype."""
    rows: list[tuple[str, ...]] = []
    for record in results.select("beyond the cache", form=OURS):
        labels = record.labels
        torchs = results.one("beyond the cache", form="torch", op=labels["op"], dtype=labels["dtype"])
        rows.append(
            (
                str(labels["op"]),
                str(labels["dtype"]),
                numbers.count(int(labels["count"])),
                numbers.quantity(record["time"]),
                numbers.quantity(record["rate"]),
                numbers.percent(record["share"].value, 0),
                numbers.quantity(torchs["time"]),
                numbers.quantity(record["speedup"]),
            )
        )
    return rows


def _of_attention(results: Results, target: Target, records: list[Record]) -> Reached:
    inaccurate = [record for record in records if not attention.same_error(results, record)]
    worst = min(inaccurate or records, key=lambda record: record["speedup"].value)
    peer, where = attention.best_of_torch(results, worst), attention.shape_of(worst)
    name = str(peer.labels["form"])
    if inaccurate:
        own, its = (numbers.error_size(record["error"].value) for record in (worst, peer))
        why = f"its error is {own}, that of {name} {its}."
    else:
        own, its = (numbers.with_unit(record["rate"].value, "FLOP/s") for record in (worst, peer))
        limits = attention.ceilings(results, str(worst.labels["dtype"]))
        if worst.name == avx2.RECORD:
            limits = {}  # products are measured with all instructions
        alone = "".join(f"; {limit} alone: {numbers.with_unit(rate, 'FLOP/s')}" for limit, rate in limits.items())
        why = f"it runs at {own}, {name} at {its}{alone}."
    return Reached(target, worst["speedup"].value, f"{name}'s speed, {where}", why, accurate=not inaccurate)


def _of_bias_gelu(target: Target, record: Record) -> Reached:
    share, taken = record["share"].value, record["time"].value / int(record.labels["count"])
    own, copys = (numbers.with_unit(time, "s") for time in (taken, taken * share))
    return Reached(target, share, "", f"an element takes {own}, a copy of its bytes {copys}.")
