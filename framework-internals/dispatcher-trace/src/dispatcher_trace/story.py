"""What the report says, computed from the records alone."""

from __future__ import annotations

from typing import Any

from benchkit import numbers
from benchkit.report import markdown_table
from benchkit.results import Record, Results


def path(record: Record) -> str:
    """``add.Tensor``: AutogradCPU → CPU; the operator is named where it changes."""
    parts: list[str] = []
    before = ""
    for operator, key in record.data["spine"]:
        parts.append(key if operator == before else f"`{operator.removeprefix('aten::')}` {key}")
        before = operator
    return " → ".join(parts)


def _condition(record: Record) -> str:
    return f"`{record.labels['expression']}` {record.labels['dtype']} {record.labels['mode']}"


def totals(results: Results) -> dict[str, int]:
    """Sums over all walks."""
    walks = results.select("walk")
    sums = {
        name: sum(round(walk[name].value) for walk in walks) for name in ("positions", "agreed", "calls", "profiled")
    }
    return {
        **sums,
        "walks": len(walks),
        "bit_equal": sum(walk.data["bit_equal"] for walk in walks),
        "same_operators": sum(walk.data["same_operators"] for walk in walks),
    }


def autocast_order(results: Results) -> list[tuple[str, str, str]]:
    """For each walk with an Autocast hop: its condition, the first Autocast key and the first Autograd key after or
    before it, in order of arrival.
    """
    found = []
    for walk in results.select("walk", mode="autocast"):
        keys = [row["key"] for row in sorted(walk.data["hops"], key=lambda row: row["number"])]
        groups = [key for key in keys if key.startswith(("Autocast", "Autograd"))]
        autocast = next((key for key in groups if key.startswith("Autocast")), None)
        autograd = next((key for key in groups if key.startswith("Autograd")), None)
        if autocast and autograd:
            first, second = sorted((autocast, autograd), key=groups.index)
            found.append((_condition(walk), first, second))
    return found


def finding(results: Results) -> str:
    """One sentence on the run."""
    counted = totals(results)
    if not counted["walks"]:
        return "The run ended before the first walk."
    parts = []
    plain = results.select("walk", expression="a + b", dtype="f32", mode="plain")
    if plain:
        parts.append(f"`a + b` on plain f32 tensors goes {path(plain[0])}")
    order = autocast_order(results)
    if order and len({(first[:8], second[:8]) for _, first, second in order}) == 1:
        parts.append(f"under autocast {order[0][1]} comes before {order[0][2]} in every walk that has both")
    agreement = f"{counted['agreed']} of {counted['positions']}"
    parts.append(f"the static prediction names the key of {agreement} hops")
    parts.append(f"{counted['bit_equal']} of {counted['walks']} traced results are bit-equal to the untraced ones")
    return f"{'; '.join(parts)}."


def context(results: Results) -> dict[str, Any]:
    """The template's variables."""
    return {
        "size": results.configuration["size"],
        "totals": totals(results),
        "conditions": conditions_table(results),
        "order": autocast_order(results),
        "disagreements": disagreements(results),
        "unlike": [_condition(walk) for walk in results.select("walk") if not walk.data["same_operators"]],
        "shown": [_shown(walk) for walk in _chosen(results)],
        "kernels": kernel_table(results),
        "overhead": overhead(results),
        "installation": next(iter(results.select("installation")), None),
        "claims": claims(results),
        "notes": sorted({note for walk in results.select("walk") for note in walk.data["notes"]}),
        "threads": threads(results),
    }


def conditions_table(results: Results) -> str:
    """Every walk in a row."""
    rows = [
        [
            f"`{walk.labels['expression']}`",
            walk.labels["dtype"],
            walk.labels["mode"],
            path(walk),
            numbers.count(walk["hops"].value),
            numbers.count(walk["calls"].value),
            numbers.count(walk["profiled"].value),
            f"{numbers.count(walk['agreed'].value)} of {numbers.count(walk['positions'].value)}",
            "yes" if walk.data["bit_equal"] else "no",
        ]
        for walk in results.select("walk")
    ]
    header = ["expression", "dtype", "condition", "path to the kernel", "hops", "operator calls"]
    return markdown_table([*header, "seen by the profiler", "predicted", "bit-equal"], rows, left=4)


def disagreements(results: Results) -> list[str]:
    """Each hop whose key was not predicted, in words."""
    return [
        f"{_condition(walk)}: hop {row['number']}, `{row['operator']}` at {row['key']}; "
        f"predicted {row['predicted'] or 'no hop'}"
        for walk in results.select("walk")
        for row in walk.data["hops"]
        if row["predicted"] != row["key"]
    ]


def _chosen(results: Results) -> list[Record]:
    """The walks shown hop by hop: the shortest, one with Autocast and Autograd, one with a backward."""
    wanted = (("a + b", "f32", "plain"), ("a @ b", "f32", "autocast"), ("a @ b", "bf16", "requires_grad"))
    return [
        walk
        for expression, dtype, mode in wanted
        for walk in results.select("walk", expression=expression, dtype=dtype, mode=mode)
    ]


def _shown(walk: Record) -> dict[str, Any]:
    rows = sorted(walk.data["hops"], key=lambda row: row["number"])
    table = markdown_table(
        ["hop", "operator", "key", "why"],
        [[row["number"], f"`{row['operator']}`", row["key"], row["why"]] for row in rows],
        left=4,
    )
    return {"title": _condition(walk), "tree": "\n".join(walk.data["lines"]), "table": table}


def kernel_table(results: Results) -> str:
    """Device kernels by walk, or an empty text where none ran."""
    rows = [
        [
            _condition(walk),
            f"`{kernel['operator']}`" + (f" in {kernel['node']}" if kernel["node"] else ""),
            f"`{_short(kernel['name'])}`",
            "×".join(map(str, kernel["grid"])) or "–",
            "×".join(map(str, kernel["block"])) or "–",
            numbers.with_unit(kernel["seconds"], "s"),
        ]
        for walk in results.select("walk")
        for kernel in walk.data["kernels"]
    ]
    return markdown_table(["walk", "operator", "kernel", "grid", "block", "time"], rows, left=3) if rows else ""


def _short(name: str, limit: int = 110) -> str:
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def overhead(results: Results) -> dict[str, str] | None:
    """Cost of a hop, from the small add."""
    for record in results.select("overhead"):
        hops = record["hops"].value
        per_hop = {
            name: numbers.with_unit((record[name].value - record["untraced"].value) / hops, "s")
            for name in ("off", "on")
        }
        rows = [
            [label, numbers.quantity(record[name]), per_hop.get(name, "–")]
            for name, label in (("untraced", "no shims"), ("off", "shims, not recording"), ("on", "shims, recording"))
        ]
        return {
            "hops": numbers.count(hops),
            "table": markdown_table(["", "`torch.add` of 4 elements", "added to each hop"], rows),
        }
    return None


def claims(results: Results) -> list[str]:
    """What notes on the dispatcher say, and what was seen."""
    said = []
    for record in results.select("claim"):
        name = record.labels["claim"]
        if "exists" in record.data:
            seen = "exists" if record.data["exists"] else "does not exist"
            said.append(f"`{name}`, which notes recommend for printing a table, {seen} in this torch.")
        else:
            lines = record.data["lines"]
            seen = f"printed {numbers.count(lines)} lines" if lines else "printed nothing"
            said.append(f"`{name}=1`, set before `import torch`, {seen} for an addition in this build.")
    return said


def threads(results: Results) -> dict[str, int]:
    """Hops by thread, over all walks."""
    counted: dict[str, int] = {}
    for walk in results.select("walk"):
        for row in walk.data["hops"]:
            counted[row["thread"]] = counted.get(row["thread"], 0) + 1
    return counted
