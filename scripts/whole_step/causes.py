"""What makes one variant of the step faster or slower than another: kernels by group, idle time, launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchkit import Quantity, Record, Results, numbers
from whole_step.dissection import dispatch_seconds

_SMALL = 0.01  # of the step: smaller changes are added up


class Share(NamedTuple):
    """One part of a step's time."""

    name: str
    seconds: float


class Change(NamedTuple):
    """One variant beside the variant that it is based on, as text for the report."""

    title: str
    over: str
    change: str
    lens: str
    speedup: str
    verdict: str
    causes: str


def parts_of_steps(results: Results) -> dict[str, list[Share]]:
    """Return the parts of each profiled step, by variant.

    The parts add up to the step. Where the step was slower while it was profiled they add up to more, and the last
    part is 0. Kernels are split by group where the run recorded the groups.
    """
    costs = {str(record.labels["kind"]): record["cost"].value for record in results.select("hop")}
    groups = has_groups(results)
    found = {}
    for record in results.select("dissection"):
        step = results.one("variant", variant=record.labels["variant"])["step"].value
        if "kernel_seconds" in record.values:
            busy = min(record["kernel_seconds"].value, step)
            kernels = _by_group(record, busy) if groups else [Share("kernels", busy)]
            found[str(record.labels["variant"])] = [*kernels, Share("GPU idle", step - busy)]
        elif "operator_seconds" in record.values:
            dispatch = dispatch_seconds(record.data["hops"], costs)
            # On a CPU the profiler slows what it times, and the machine may be faster or slower than it was before.
            scale = step / record["profiled_seconds"].value
            operators = max(record["operator_seconds"].value * scale - dispatch, 0.0)
            compiled = record["compiled_seconds"].value * scale
            rest = max(step - operators - compiled - dispatch, 0.0)
            kernels = _by_group(record, operators) if groups else [Share("kernels of operators", operators)]
            found[str(record.labels["variant"])] = [
                *kernels,
                Share("compiled kernels", compiled),
                Share("dispatcher", dispatch),
                Share("rest", rest),
            ]
    return found


def has_groups(results: Results) -> bool:
    """Tell whether the run recorded the kernel time of every step by group."""
    records = results.select("dissection")
    return bool(records) and all(record.data.get("groups") for record in records)


def changes(results: Results) -> list[Change]:
    """Return what each variant changes, how fast it is beside the variant that it is based on, and why."""
    parts = parts_of_steps(results)
    found = []
    for record in results.select("variant"):
        name = str(record.labels["variant"])
        variant = results.configuration["variants"][name]
        if "change" not in record.values:
            continue
        over = str(variant["over"])
        causes = ""
        if name in parts and over in parts:
            causes = f"{_differences(parts[over], parts[name])}; {_counts(results, over, name)}"
        found.append(
            Change(
                variant["title"],
                results.configuration["variants"][over]["title"],
                variant["change"],
                variant["lens"],
                numbers.quantity(record["change"]),
                verdict(record["change"]),
                causes,
            )
        )
    return found


def verdict(change: Quantity) -> str:
    """Say what an interval of a speedup decides."""
    assert change.low is not None
    assert change.high is not None
    if change.low > 1:
        return "faster"
    return "slower" if change.high < 1 else "no difference that this run can resolve"


def _by_group(record: Record, seconds: float) -> list[Share]:
    """Divide the time of the kernels among their groups."""
    groups = record.data["groups"]
    total = sum(group["seconds"] for group in groups.values()) or 1.0
    return [Share(name, seconds * group["seconds"] / total) for name, group in groups.items()]


def _differences(before: Sequence[Share], after: Sequence[Share]) -> str:
    """List the changes of a step's parts, the largest first."""
    old, new = (dict(parts) for parts in (before, after))
    step = sum(old.values())
    deltas = sorted(((new[name] - old[name], name) for name in old), key=lambda item: -abs(item[0]))
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
