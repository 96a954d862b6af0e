"""What makes one variant of the step faster or slower than another: kernels by group, idle time, launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchkit import Quantity, Record, Results
from whole_step.dissection import dispatch_seconds


class Part(NamedTuple):
    """One part of a step's time."""

    name: str
    seconds: float


class Change(NamedTuple):
    """One variant beside the variant that it is based on.

    Attributes:
        title: Its title.
        over: Title of the other.
        change: What differs.
        lens: The lens that explains it.
        speedup: Its speed over the other; None if they ran in different rounds, whose times have no ratio.
        verdict: What the interval of the speed decides.
        own: Whether it has kernels of this repository.
        kernels: The operators of this repository whose kernels ran; None if the run did not record them.
        deltas: Seconds that each part of a step takes more, where both steps were profiled.
    """

    title: str
    over: str
    change: str
    lens: str
    speedup: Quantity | None
    verdict: str
    own: bool
    kernels: tuple[str, ...] | None
    deltas: dict[str, float]


def parts_of_steps(results: Results) -> dict[str, list[Part]]:
    """Return the parts of each profiled step, by variant, in the order of the variants.

    The parts add up to the step. Where the step was slower while it was profiled they add up to more, and the last
    part is 0.
    """
    costs = {str(record.labels["kind"]): record["cost"].value for record in results.select("hop")}
    timed = {record.labels["variant"]: record["step"].value for record in results.select("variant")}
    dissected = {record.labels["variant"]: record for record in results.select("dissection")}
    steps = {}
    for name, record in ((str(name), dissected[name]) for name in timed if name in dissected):
        if "kernel_seconds" in record.values:
            steps[name] = _on_a_gpu(record, timed[name])
        elif "operator_seconds" in record.values and record.data["hops"].keys() <= costs.keys():
            steps[name] = _on_a_cpu(record, timed[name], dispatch_seconds(record.data["hops"], costs))
    return steps


def _on_a_gpu(record: Record, step: float) -> list[Part]:
    busy = min(record["kernel_seconds"].value, step)
    return [*_by_group(record, busy), Part("GPU idle", step - busy)]


def _on_a_cpu(record: Record, step: float, dispatch: float) -> list[Part]:
    # The profiler slows what it times, and the machine may be faster or slower than it was before.
    scale = step / record["profiled_seconds"].value
    operators = max(record["operator_seconds"].value * scale - dispatch, 0.0)
    compiled = record["compiled_seconds"].value * scale
    rest = max(step - operators - compiled - dispatch, 0.0)
    groups = _by_group(record, operators)
    return [*groups, Part("compiled kernels", compiled), Part("rest", dispatch + rest)]


def _by_group(record: Record, seconds: float) -> list[Part]:
    """Divide the time of the kernels among their groups."""
    groups = record.data["groups"]
    total = sum(group["seconds"] for group in groups.values()) or 1.0
    return [Part(name, seconds * group["seconds"] / total) for name, group in groups.items()]


def changes(results: Results) -> list[Change]:
    """Return what each variant changes, how fast it is beside the variant that it is based on, and why."""
    steps, named = parts_of_steps(results), results.configuration["variants"]
    timed = {str(record.labels["variant"]): record for record in results.select("variant")}
    compared = []
    for name, record in timed.items():
        variant, over = named[name], str(named[name]["over"])
        if over not in timed:
            continue
        speedup = record.values.get("change")
        both = name in steps and over in steps
        kernels = _own_kernels(results, name)
        compared.append(
            Change(
                variant["title"],
                named[over]["title"],
                variant["change"] + (_taken(kernels) if "formula or kernel" in variant["change"] else ""),
                variant["lens"],
                speedup,
                verdict(speedup) if speedup else "not compared: timed in other rounds",
                bool(variant["engine"]["parts"]),
                kernels,
                _differences(steps[over], steps[name]) if both else {},
            )
        )
    return compared


def verdict(change: Quantity) -> str:
    """Say what an interval of a speedup decides."""
    low, high = (change.value if end is None else end for end in (change.low, change.high))
    if not change.decides:
        return f"not known: {change.samples} rounds are too few"
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "no difference that this run can resolve"


def _own_kernels(results: Results, variant: str) -> tuple[str, ...] | None:
    recorded = [record.data["own"] for record in results.select("dissection", variant=variant) if "own" in record.data]
    return tuple(recorded[0]) if recorded else None


def _taken(kernels: tuple[str, ...] | None) -> str:
    """Which of the operators took their kernel, as the end of a sentence; empty if it is not known."""
    if kernels is None:
        return ""
    return f": the kernels of {', '.join(f'`{name}`' for name in kernels)}" if kernels else ": each its formula"


def _differences(before: Sequence[Part], after: Sequence[Part]) -> dict[str, float]:
    """The seconds by which each part of a step grows."""
    old, new = (dict(parts) for parts in (before, after))
    return {name: new.get(name, 0.0) - old[name] for name in old}
