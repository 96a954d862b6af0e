"""The targets of RMSNorm on a CPU, as shares of the copy limit, and what a run reached of them."""

from __future__ import annotations

from collections.abc import Iterator

from benchkit import Record, Results, numbers
from benchkit.report.must_and_aim import Reached, Target
from rmsnorm_fused.bench.candidates import COPY, OWN

TARGETS = {
    ("forward", "float32"): Target("rms_norm, forward, float32", 0.90, 0.97, "share"),
    ("backward", "float32"): Target("rms_norm, backward, float32", 0.85, 0.95, "share"),
    ("forward", "bfloat16"): Target("rms_norm, forward, bfloat16", 0.80, 0.95, "share"),
    ("backward", "bfloat16"): Target("rms_norm, backward, bfloat16", 0.75, 0.90, "share"),
}
_LIMITS = {"forward": "1 read 1 write", "backward": "2 reads 1 write"}


def reached(results: Results) -> Iterator[Reached]:
    """What this run reached at its main shape, for each target that it measured; nothing on a GPU."""
    if results.environment.gpu:
        return
    for (which, dtype), target in TARGETS.items():
        group = "headline" if dtype == results.configuration["dtype"] else "dtypes"
        records = results.select(which, group=group, dtype=dtype)
        if ours := [record for record in records if record.labels["implementation"] in OWN]:
            own = max(ours, key=lambda record: record["fraction"].value)
            copy = next(record for record in records if record.labels["implementation"] == COPY)
            name = str(own.labels["implementation"])
            yield Reached(target, own["fraction"].value, name, _why(results, which, own, copy))


def _why(results: Results, which: str, own: Record, copy: Record) -> str:
    """The rates of the kernel and of the copy, each beside the memory limit; a copy within the caches exceeds it."""

    def rate(record: Record) -> str:
        text = numbers.with_unit(record["bandwidth"].value, "B/s")
        limits = results.select("memory limit", traffic=_LIMITS[which])
        shares = [numbers.percent(record["bandwidth"].value / limit["bandwidth"].value, 0) for limit in limits]
        return text + "".join(f" ({share} of the memory limit)" for share in shares)

    return f"`{own.labels['implementation']}` moves {rate(own)}, the copy {rate(copy)}."
