"""What a run found, in words: the paths of the expressions, and how often the prediction holds."""

from __future__ import annotations

from benchkit import numbers
from benchkit.results import Record, Results
from dispatcher_trace.measure.cases import EVERY_MODE, FOUR_MODES


def path(record: Record) -> str:
    """The main path as text, ``add.Tensor AutogradCPU → CPU``. An operator is named where it changes."""
    parts: list[str] = []
    before = ""
    for operator, key in record.data["main_path"]:
        parts.append(key if operator == before else f"`{operator.removeprefix('aten::')}` {key}")
        before = operator
    return " → ".join(parts)


def condition(record: Record) -> str:
    """The expression, dtype and mode of a trace."""
    return f"`{record.labels['expression']}` {record.labels['dtype']} {record.labels['mode']}"


def totals(results: Results) -> dict[str, int]:
    """Sums over all traces."""
    traces = [*results.select("trace"), *results.select("program")]
    sums = {
        name: sum(round(trace[name].value) for trace in traces) for name in ("positions", "agreed", "calls", "profiled")
    }
    return {
        **sums,
        "traces": len(traces),
        "bit_equal": sum(trace.data["bit_equal"] for trace in traces),
        "same_operators": sum(trace.data["same_operators"] for trace in traces),
    }


def autocast_order(results: Results) -> list[tuple[str, str, str]]:
    """The order of Autocast and Autograd in each trace that has both.

    Returns:
        For each such trace: its condition, then its first Autocast key and its first Autograd key in order of arrival.
    """
    found = []
    for trace in results.select("trace", mode="autocast"):
        groups = [key for key in trace.data["keys"] if key.startswith(("Autocast", "Autograd"))]
        autocast = next((key for key in groups if key.startswith("Autocast")), None)
        autograd = next((key for key in groups if key.startswith("Autograd")), None)
        if autocast and autograd:
            first, second = sorted((autocast, autograd), key=groups.index)
            found.append((condition(trace), first, second))
    return found


def finding(results: Results) -> str:
    """The finding of the run: the paths of the two expressions, and how often the prediction holds, at worst too."""
    counted = totals(results)
    if not counted["traces"]:
        return "The run ended before the first trace."
    plain = [
        f"{'plain f32 ' if expression == FOUR_MODES[0] else ''}`{expression}` goes {path(trace)}"
        for expression in FOUR_MODES
        for trace in results.select("trace", expression=expression, dtype="f32", mode="plain")
    ]
    paths = [", ".join(plain)] if plain else []
    order = autocast_order(results)
    if order and len({(first[:8], second[:8]) for _, first, second in order}) == 1:
        paths.append(f"under autocast {order[0][1]} comes before {order[0][2]}")
    sentences = ["; ".join(paths)] if paths else []
    equal = f"{counted['bit_equal']} of {counted['traces']} traced results are bit-equal"
    outside, inside = agreement_share(results, functorch=False), agreement_share(results, functorch=True)
    if outside is not None and inside is not None:
        worst = min(results.select("agreement"), key=agreed_share)
        sentences.append(
            f"The static prediction is right for {numbers.percent(outside, 2)} of the catalogue's calls outside "
            f"functorch, {numbers.percent(inside, 2)} inside and, at worst, {numbers.percent(agreed_share(worst), 2)} "
            f"under `{worst.labels['mode']}`; {equal}"
        )
    else:
        sentences.append(equal)
    return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)


def headline(results: Results) -> str:
    """The finding in one sentence, for the index of reports."""
    plain = results.select("trace", expression=EVERY_MODE, dtype="f32", mode="plain")
    outside, records = agreement_share(results, functorch=False), results.select("agreement")
    if not plain or outside is None:
        return finding(results)
    worst = min(records, key=agreed_share)
    return (
        f"`{EVERY_MODE}` goes {path(plain[0])}; the prediction is right for {numbers.percent(outside, 2)} of calls "
        f"outside functorch, at worst {numbers.percent(agreed_share(worst), 2)} (`{worst.labels['mode']}`)."
    )


def agreed_share(record: Record) -> float:
    """Share of a mode's calls whose keys were predicted."""
    return record["agreed"].value / record["calls"].value


def agreement_share(results: Results, *, functorch: bool) -> float | None:
    """Share of the catalogue's calls whose keys were predicted, in the modes inside or outside functorch."""
    records = results.select("agreement", functorch=functorch)
    calls = sum(record["calls"].value for record in records)
    return sum(record["agreed"].value for record in records) / calls if calls else None
