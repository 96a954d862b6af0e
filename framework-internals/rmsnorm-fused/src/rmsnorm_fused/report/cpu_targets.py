"""The targets of RMSNorm on a CPU, as shares of the copy limit, and what a run reached of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchkit import Record, Results, numbers
from benchkit.report.must_and_aim import Reached, Target
from rmsnorm_fused.bench.candidates import COPY

TARGETS = {
    ("forward", "float32"): Target("rms_norm, forward, float32", 0.90, 0.97, "share"),
    ("backward", "float32"): Target("rms_norm, backward, float32", 0.85, 0.95, "share"),
    ("forward", "bfloat16"): Target("rms_norm, forward, bfloat16", 0.80, 0.95, "share"),
    ("backward", "bfloat16"): Target("rms_norm, backward, bfloat16", 0.75, 0.90, "share"),
}
_LIMITS = {"forward": "1 read 1 write", "backward": "2 reads 1 write"}


def reached(results: Results) -> Iterator[Reached]:
    """What the operators alone reached, for each target and shape of the run; nothing on a GPU."""
    for (which, dtype), target in TARGETS.items():
        for own in results.select("operator", **{"pass": which}, dtype=dtype, implementation="cpp"):
            labels = {**own.labels, "implementation": COPY}
            here = replace(target, what=f"{target.what}, {own.labels['rows']} × {own.labels['columns']}")
            yield Reached(here, own["fraction"].value, "", _why(results, which, own, results.one("operator", **labels)))


def _why(results: Results, which: str, own: Record, copy: Record) -> str:
    """The rates of the kernel and of the copy, each beside the memory limit; a copy within the caches exceeds it."""

    def rate(record: Record) -> str:
        text = numbers.with_unit(record["bandwidth"].value, "B/s")
        limits = results.select("memory limit", traffic=_LIMITS[which])
        shares = [numbers.percent(record["bandwidth"].value / limit["bandwidth"].value, 0) for limit in limits]
        return text + "".join(f" ({share} of the memory limit)" for share in shares)

    return f"the operator moves {rate(own)}, the copy {rate(copy)}."
