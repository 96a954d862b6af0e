"""What a run found, in words: the paths of the expressions, and how often the prediction holds."""

from __future__ import annotations

from benchkit import numbers
from benchkit.results import Record, Results
from dispatcher_trace.measure.cases import EVERY_MODE


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
    orders = []
    for trace in results.select("trace", mode="autocast"):
        groups = [key for key in trace.data["keys"] if key.startswith(("Autocast", "Autograd"))]
        autocast = next((key for key in groups if key.startswith("Autocast")), None)
        autograd = next((key for key in groups if key.startswith("Autograd")), None)
        if autocast and autograd:
            first, second = sorted((autocast, autograd), key=groups.index)
            orders.append((condition(trace), first, second))
    return orders


def headline(results: Results) -> str:
    """The path of the shown expression, and how often the prediction holds, at worst too: the first sentence."""
    plain = results.select("trace", expression=EVERY_MODE, dtype="f32", mode="plain")
    goes = f"`{EVERY_MODE}` goes {path(plain[0])}" if plain else ""
    outside, worst = agreement_share(results, functorch=False), _worst_agreement(results)
    right = "" if outside is None else f"the prediction is right for {numbers.percent(outside, 2)} of calls"
    if right and worst is not None:
        right += f" outside functorch, at worst {numbers.percent(agreed_share(worst), 2)} (`{worst.labels['mode']}`)"
    said = "; ".join(filter(None, (goes, right)))
    return f"{said[0].upper()}{said[1:]}." if said else "The run ended before the first trace."


def use(results: Results) -> str:
    """What a trace is good for, and how far it can be trusted, as the end of a sentence."""
    counted = totals(results)
    if not counted["traces"]:
        return ""
    return (
        f"you want to know which kernels a call reaches, through which keys and why: {counted['bit_equal']} of "
        f"{counted['traces']} traced results are bit-equal to the untraced ones, and "
        f"{numbers.count(counted['agreed'])} of {numbers.count(counted['positions'])} hops were predicted."
    )


def avoid(results: Results) -> str:
    """What it is not for: times, since recording costs more than the call, as the end of a sentence."""
    cost = tracer_cost(results)
    slower = f": recording makes `torch.add` of four elements {numbers.with_unit(cost, '×')} as slow" if cost else ""
    return f"you want to know how long something takes{slower}. The profiler answers that."


def worst(results: Results) -> str:
    """The mode with the worst prediction, and the mode's share inside functorch, as a sentence."""
    mode, inside = _worst_agreement(results), agreement_share(results, functorch=True)
    if mode is None:
        return ""
    functorch = "" if inside is None else f" Of all calls inside functorch: {numbers.percent(inside, 2)}."
    share = numbers.percent(agreed_share(mode), 2)
    return f"under `{mode.labels['mode']}` the prediction is right for {share} of calls.{functorch}"


def tracer_cost(results: Results) -> float | None:
    """How many times as long a small addition takes while it is recorded."""
    for record in results.select("overhead"):
        return record["on"].value / record["untraced"].value
    return None


def _worst_agreement(results: Results) -> Record | None:
    return min(results.select("agreement"), key=agreed_share, default=None)


def agreed_share(record: Record) -> float:
    """Share of a mode's calls whose keys were predicted."""
    return record["agreed"].value / record["calls"].value


def agreement_share(results: Results, *, functorch: bool) -> float | None:
    """Share of the catalogue's calls whose keys were predicted, in the modes inside or outside functorch."""
    records = results.select("agreement", functorch=functorch)
    calls = sum(record["calls"].value for record in records)
    return sum(record["agreed"].value for record in records) / calls if calls else None
