"""What makes one variant of the step faster or slower than another: kernels by group, idle time, launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchkit import Quantity, Record, Results, numbers
from whole_step.dissection import dispatch_seconds

_SMALL = 0.01  # of the step: smaller changes are added up


class Part(NamedTuple):
    """One part of a step's time."""

    name: str
    seconds: float


class Change(NamedTuple):
    """One variant beside the variant that it is based on: the titles, what differs, and what changed in the step."""

    title: str
    over: str
    change: str
    lens: str
    speedup: Quantity
    verdict: str
    parts: str | None
    counts: str | None


def parts_of_steps(results: Results) -> dict[str, list[Part]]:
    """Return the parts of each profiled step, by variant.

    The parts add up to the step. Where the step was slower while it was profiled they add up to more, and the last
    part is 0.
    """
    costs = {str(record.labels["kind"]): record["cost"].value for record in results.select("hop")}
    timed = {record.labels["variant"]: record["step"].value for record in results.select("variant")}
    steps = {}
    for record in results.select("dissection"):
        name = str(record.labels["variant"])
        if name not in timed:
            continue
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
    return [*groups, Part("compiled kernels", compiled), Part("dispatcher", dispatch), Part("rest", rest)]


def _by_group(record: Record, seconds: float) -> list[Part]:
    """Divide the time of the kernels among their groups."""
    groups = record.data["groups"]
    total = sum(group["seconds"] for group in groups.values()) or 1.0
    return [Part(name, seconds * group["seconds"] / total) for name, group in groups.items()]


def changes(results: Results) -> list[Change]:
    """Return what each variant changes, how fast it is beside the variant that it is based on, and why."""
    steps, named = parts_of_steps(results), results.configuration["variants"]
    compared = []
    for record in results.select("variant"):
        if "change" not in record.values:
            continue
        name, speedup = str(record.labels["variant"]), record["change"]
        variant, over = named[name], str(named[name]["over"])
        both = name in steps and over in steps
        compared.append(
            Change(
                variant["title"],
                named[over]["title"],
                variant["change"],
                variant["lens"],
                speedup,
                verdict(speedup),
                _differences(steps[over], steps[name]) if both else None,
                _counts(results, over, name) if both else None,
            )
        )
    return compared


def verdict(change: Quantity) -> str:
    """Say what an interval of a speedup decides."""
    low, high = (change.value if end is None else end for end in (change.low, change.high))
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "no difference that this run can resolve"


def _differences(before: Sequence[Part], after: Sequence[Part]) -> str:
    """List the changes of a step's parts, the largest first."""
    old, new = (dict(parts) for parts in (before, after))
    step = sum(old.values())
    deltas = sorted(((new.get(name, 0.0) - old[name], name) for name in old), key=lambda delta: -abs(delta[0]))
    large = sum(abs(delta) >= _SMALL * step for delta, _ in deltas)
    if len(deltas) - large > 1:
        deltas[large:] = [(sum(delta for delta, _ in deltas[large:]), "all else")]
    return ", ".join(f"{name} {_signed(delta)}" for delta, name in deltas)


def _counts(results: Results, before: str, after: str) -> str:
    """Compare the numbers of launches, operator calls and hops of two variants, where both were counted."""
    old, new = (results.one("dissection", variant=name) for name in (before, after))
    counted = [
        (what, old[key].value, new[key].value)
        for key, what in (("kernels", "kernel launches"), ("operators", "operator calls"))
        if key in old.values and key in new.values
    ]
    hops = [sum(record.data["hops"].values()) for record in (old, new)]
    if all(hops):
        counted.append(("hops above the backend", *hops))
    return ", ".join(f"{what} {_counted(before, after)}" for what, before, after in counted)


def _counted(before: float, after: float) -> str:
    if before == after:
        return f"{numbers.count(before)} in both"
    return f"{numbers.count(before)} → {numbers.count(after)}"


def _signed(seconds: float) -> str:
    return f"{'−' if seconds < 0 else '+'}{numbers.with_unit(abs(seconds), 's')}"
