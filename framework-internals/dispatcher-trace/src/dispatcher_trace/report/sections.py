"""The sections of the report: tables and sentences, computed from the records alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from benchkit import numbers
from benchkit.environment import commit_label
from benchkit.report import ReportSpec, markdown_table
from benchkit.results import Record, Results
from dispatcher_trace.report.cases import EVERY_MODE, FOUR_MODES, MODES, PAGE, PERFETTO, SHOWN
from dispatcher_trace.report.figures import figures


def path(record: Record) -> str:
    """The main path as text, ``add.Tensor AutogradCPU → CPU``. An operator is named where it changes."""
    parts: list[str] = []
    before = ""
    for operator, key in record.data["main_path"]:
        parts.append(key if operator == before else f"`{operator.removeprefix('aten::')}` {key}")
        before = operator
    return " → ".join(parts)


def _condition(record: Record) -> str:
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
            found.append((_condition(trace), first, second))
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
        worst = min(results.select("agreement"), key=_agreed_share)
        sentences.append(
            f"The static prediction is right for {numbers.percent(outside, 2)} of the catalogue's calls outside "
            f"functorch, {numbers.percent(inside, 2)} inside and, at worst, {numbers.percent(_agreed_share(worst), 2)} "
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
    worst = min(records, key=_agreed_share)
    return (
        f"`{EVERY_MODE}` goes {path(plain[0])}; the prediction is right for {numbers.percent(outside, 2)} of calls "
        f"outside functorch, at worst {numbers.percent(_agreed_share(worst), 2)} (`{worst.labels['mode']}`)."
    )


def _agreed_share(record: Record) -> float:
    return record["agreed"].value / record["calls"].value


def agreement_share(results: Results, *, functorch: bool) -> float | None:
    """Share of the catalogue's calls whose keys were predicted, in the modes inside or outside functorch."""
    records = results.select("agreement", functorch=functorch)
    calls = sum(record["calls"].value for record in records)
    return sum(record["agreed"].value for record in records) / calls if calls else None


def context(results: Results) -> dict[str, Any]:
    """The template's variables."""
    return {
        "size": results.configuration["size"],
        "totals": totals(results),
        "paths": paths_table(results),
        "same_in_bf16": same_in_bf16(results),
        "others": others_table(results),
        "on_gpu": results.environment.gpu is not None,
        "order": autocast_order(results),
        "disagreements": disagreements(results),
        "operator_differences": operator_differences(results),
        "modes": modes_table(results),
        "agreement": agreement_table(results),
        "causes": causes(results),
        "cpu_in_causes": any("AutogradCPU" in line for line in causes(results)),
        "catalogue": catalogue(results),
        "refused": refused(results),
        "programs": programs_table(results),
        "step_findings": step_findings(results),
        "lines": line_table(results),
        "commit": commit_label(results.environment.commit, results.environment.dirty),
        "page": PAGE,
        "perfetto": PERFETTO,
        "operator_costs": operator_cost_table(results),
        "native": native_table(results),
        "restored": next(iter(results.select("restored")), None),
        "hop_costs": hop_cost_table(results),
        "shown": shown(results),
        "kernels": kernel_table(results),
        "overhead": overhead(results),
        "installation": next(iter(results.select("installation")), None),
        "claims": claims(results),
        "notes": sorted({note for trace in results.select("trace") for note in trace.data["notes"]}),
        "threads": threads(results),
    }


def operator_differences(results: Results) -> list[str]:
    """A line for each trace that has other operators than the profile of the untraced run."""
    found = ((_condition(trace), _operator_difference(trace)) for trace in results.select("trace"))
    return [f"{condition}: {difference}" for condition, difference in found if difference]


def paths_table(results: Results) -> str:
    """One row for each condition of the two expressions that are traced under all of them, in f32."""
    return _traces_table([trace for trace in _paths(results) if trace.labels["dtype"] == "f32"])


def others_table(results: Results) -> str:
    """One row for each other trace; empty if there is none."""
    shown = [trace for trace in _paths(results) if trace.labels["dtype"] == "f32"]
    return _traces_table([trace for trace in results.select("trace") if trace not in shown])


def same_in_bf16(results: Results) -> str:
    """Whether the two expressions take the same paths in bf16; empty if they were not traced in it."""
    found = {
        dtype: {
            (trace.labels["expression"], trace.labels["mode"]): path(trace)
            for trace in _paths(results)
            if trace.labels["dtype"] == dtype
        }
        for dtype in ("f32", "bf16")
    }
    if not found["bf16"]:
        return ""
    if other := [case for case, taken in found["bf16"].items() if found["f32"].get(case) != taken]:
        cases = (f"`{case[0]}` under {case[1]} it is {found['bf16'][case]}" for case in other)
        return f"In bf16 the path is another: for {'; for '.join(cases)}."
    return f"In bf16 the paths of the first {len(found['bf16'])} rows are the same."


def _paths(results: Results) -> list[Record]:
    return [trace for trace in results.select("trace") if trace.labels["expression"] in FOUR_MODES]


def _traces_table(traces: Sequence[Record]) -> str:
    rows = [
        [
            f"`{trace.labels['expression']}`",
            trace.labels["dtype"],
            trace.labels["mode"],
            path(trace),
            numbers.count(trace["hops"].value),
            numbers.count(trace["calls"].value),
            numbers.count(trace["profiled"].value),
            _predicted(trace),
            "yes" if trace.data["bit_equal"] else "no",
        ]
        for trace in traces
    ]
    header = ["expression", "dtype", "condition", "path to the kernel", "hops", "operator calls"]
    header += ["seen by the profiler", "predicted", "bit-equal"]
    return markdown_table(header, rows, left=4) if rows else ""


def _predicted(record: Record) -> str:
    """Number of hops that were predicted, of all that were seen or predicted, and of those that did not happen."""
    missed = round(record["positions"].value - record["hops"].value)
    hops = "1 predicted hop" if missed == 1 else f"{numbers.count(missed)} predicted hops"
    of_all = f"{numbers.count(record['agreed'].value)} of {numbers.count(record['positions'].value)}"
    return f"{of_all}: {hops} did not happen" if missed else of_all


def disagreements(results: Results) -> list[str]:
    """A line for each hop whose key was not predicted."""
    return [
        f"{_condition(trace)}: hop {row['number']}, `{row['operator']}` at {row['key']}; "
        f"predicted {row['predicted'] or 'no hop'}"
        for trace in results.select("trace")
        for row in trace.data["disagreements"]
    ]


def shown(results: Results) -> list[dict[str, str]]:
    """The traces that the report shows hop by hop: summary, title, tree, table of reasons, and name of the figure."""
    traces = [
        trace
        for expression, dtype, mode in SHOWN
        for trace in results.select("trace", expression=expression, dtype=dtype, mode=mode)
    ]
    header = ["hop", "operator", "key", "why", "key set, verdict, effects"]
    found = []
    for trace in traces:
        rows = sorted(trace.data["hops"], key=lambda row: row["number"])
        cells = [[row["number"], f"`{row['operator']}`", row["key"], row["why"], row["key_line"]] for row in rows]
        found.append(
            {
                "title": _condition(trace),
                "summary": f"{_condition(trace).replace('`', '')}, {numbers.count(trace['hops'].value)} hops",
                "tree": "\n".join(trace.data["lines"]),
                "table": markdown_table(header, cells, left=5),
                "figure": f"trace_{trace.labels['mode']}_{trace.labels['dtype']}",
            }
        )
    return found


def kernel_table(results: Results) -> str:
    """Device kernels by trace; empty if none ran."""
    rows = [
        [
            _condition(trace),
            f"`{kernel['operator']}`" + (f" in {kernel['node']}" if kernel["node"] else ""),
            f"`{_short(kernel['name'])}`" + (f" ({kernel['library']})" if kernel["library"] else ""),
            "×".join(map(str, kernel["grid"])) or "–",
            "×".join(map(str, kernel["block"])) or "–",
            "–" if kernel["registers"] is None else str(kernel["registers"]),
            "–" if kernel["shared_memory"] is None else numbers.with_unit(kernel["shared_memory"], "B"),
            numbers.with_unit(kernel["seconds"], "s"),
        ]
        for trace in results.select("trace")
        for kernel in trace.data["kernels"]
    ]
    header = ["trace", "operator", "kernel", "grid", "block", "registers", "shared memory", "time"]
    return markdown_table(header, rows, left=3) if rows else ""


def _short(name: str, limit: int = 110) -> str:
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def overhead(results: Results) -> dict[str, str] | None:
    """Time that the tracer adds to a hop, and memory that it keeps, from the addition of four elements."""
    labels = {
        "untraced": "no shims",
        "off": "shims, not recording",
        "on": "shims, recording",
        "counted": "shims, counting calls alike",  # documents before 2026-11-25 lack it, and the memory
    }
    for record in results.select("overhead"):
        hops = record["hops"].value
        per_hop = {
            name: numbers.with_unit((record[name].value - record["untraced"].value) / hops, "s")
            for name in labels
            if name in record.values and name != "untraced"
        }
        rows = [
            [label, numbers.quantity(record[name]), per_hop.get(name, "–")]
            for name, label in labels.items()
            if name in record.values
        ]
        if "kept" in record.values:
            rows.append(["memory kept", "–", numbers.with_unit(record["kept"].value, "B")])
        return {
            "hops": numbers.count(hops),
            "table": markdown_table(["", "`torch.add` of 4 elements", "added to each hop"], rows),
        }
    return None


def claims(results: Results) -> list[str]:
    """What published notes on the dispatcher say, and what this torch does."""
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
    if about_autocast := autocast_claim(results):
        said.append(about_autocast)
    return said


def autocast_claim(results: Results) -> str:
    """Whether autocast includes a key, as is often written; empty without traces that show it."""
    plain, cast = (
        results.select("trace", expression="a @ b", dtype="f32", mode=mode) for mode in ("plain", "autocast")
    )
    if not plain or not cast:
        return ""
    excluded, included = plain[0].data["autocast"]["removed"], cast[0].data["autocast"]["included"]
    if excluded and not included:
        return (
            "`torch.autocast` is said to include the Autocast key in the thread's state. Here every plain tensor "
            "carries the key, a thread outside autocast excludes it, and autocast stops that: no hop under autocast "
            "has it among the included keys."
        )
    return f"Under autocast the thread {'includes' if included else 'does not include'} the Autocast key."


def modes_table(results: Results) -> str:
    """All keys that the same call visits under every mode; empty if fewer than two modes were traced."""
    traces = [
        trace for mode in MODES for trace in results.select("trace", expression=EVERY_MODE, dtype="f32", mode=mode)
    ]
    rows = [[trace.labels["mode"], ", ".join(dict.fromkeys(trace.data["keys"]))] for trace in traces]
    return (
        markdown_table(["condition", "keys visited, in order of first arrival"], rows, left=2) if len(rows) > 1 else ""
    )


def agreement_table(results: Results) -> str:
    """How often the prediction holds under every mode; empty if it was not measured."""
    rows = [
        [
            record.labels["mode"],
            numbers.count(record["entries"].value),
            numbers.count(record["calls"].value),
            numbers.count(record["calls"].value - record["agreed"].value),
            numbers.percent(_agreed_share(record), 2),
            str(len(record.data["errors"])),
        ]
        for record in results.select("agreement")
    ]
    header = ["mode", "callables", "operator calls", "not as predicted", "as predicted", "errors"]
    return markdown_table(header, rows) if rows else ""


def causes(results: Results) -> list[str]:
    """A line for each kind of call that was not predicted, over all modes, with its cause."""
    counted: dict[tuple[str, ...], int] = {}
    for record in results.select("agreement"):
        for item in record.data["disagreements"]:
            visited, predicted = " → ".join(item["visited"]), " → ".join(item["predicted"])
            known = item["operator"], visited, predicted, item["cause"] or "no known cause"
            counted[known] = counted.get(known, 0) + item["calls"]
    return [
        f"`{operator}`, {numbers.count(calls)} calls: visited {visited}, predicted {predicted}; {cause}"
        for (operator, visited, predicted, cause), calls in sorted(counted.items(), key=lambda item: -item[1])
    ]


def refused(results: Results) -> list[str]:
    """A line for each mode with the callables that torch itself refuses."""
    return [
        f"{record.labels['mode']}: {', '.join(f'`{name}`' for name in record.data['refused'])}"
        for record in results.select("agreement")
        if record.data["refused"]
    ]


def catalogue(results: Results) -> dict[str, Any] | None:
    """Number of public callables, and their names by family; None if there is no catalogue."""
    for record in results.select("catalogue"):
        families: dict[str, list[str]] = {}
        for name, family in record.data:
            families.setdefault(family, []).append(f"`{name}`")
        listed = [f"{family}: {', '.join(names)}" for family, names in families.items()]
        return {"count": numbers.count(len(record.data)), "families": listed}
    return None


def programs_table(results: Results) -> str:
    """The training steps; empty if none was traced."""
    rows = [
        [
            record.labels["step"],
            *(numbers.count(record[name].value) for name in ("hops", "calls", "profiled")),
            _predicted(record),
            _operator_difference(record) or "none",
            "yes" if record.data["bit_equal"] else "no",
        ]
        for record in results.select("program")
    ]
    header = ["step", "hops", "operator calls", "seen by the profiler", "predicted", "only in one run", "bit-equal"]
    return markdown_table(header, rows) if rows else ""


def _operator_difference(record: Record) -> str:
    """Operators that only the trace has, or only the profile of the untraced run."""
    sides = ((record.data["only_untraced"], "untraced"), (record.data["only_traced"], "traced"))
    return ", ".join(
        f"{_times(operator, count)} ({side})" for operators, side in sides for operator, count in operators.items()
    )


def step_findings(results: Results) -> list[str]:
    """Copies and synchronisations of the GPT step, one line for each place."""
    counted: dict[tuple[str, ...], int] = {}
    for record in results.select("program", step="GPT step"):
        for found in record.data["findings"]:
            line = found["forward_source"] or found["source"]
            direction = "in the backward of " if found["forward_source"] else ""
            # Tensor labels differ from layer to layer.
            what = re.sub(r"\$\d+: ", "", found["detail"].partition("; ")[0])
            known = found["kind"], found["operator"], found["cause"], what, f"{direction}{line}"
            counted[known] = counted.get(known, 0) + 1
    return [
        f"{kind}, {calls} ×: `{operator}`{'' if cause == operator else f' under `{cause}`'}: {what}; {line}"
        for (kind, operator, cause, what, line), calls in sorted(counted.items(), key=lambda item: -item[1])
    ]


def line_table(results: Results) -> str:
    """The GPT step, one row for each line of code and direction; empty if it was not traced."""
    on_gpu = any(row["kernels"] for record in results.select("source_lines") for row in record.data)
    rows = [
        [
            row["direction"],
            row["source"] or "no Python on the stack",
            ", ".join(_times(operator, count) for operator, count in row["operators"]),
            ", ".join(row["keys"]),
            numbers.count(row["calls"]),
            numbers.count(row["hops"]),
            *([numbers.count(row["kernels"])] if on_gpu else []),  # a CPU has none to count
        ]
        for record in results.select("source_lines")
        for row in record.data
    ]
    header = ["direction", "line", "operators it calls", "keys visited", "operator calls", "hops"]
    header += ["device kernels"] if on_gpu else []
    return markdown_table(header, rows, left=4) if rows else ""


def _times(operator: str, count: int) -> str:
    name = f"`{operator.removeprefix('aten::')}`"
    return name if count == 1 else f"{name} × {count}"


def operator_cost_table(results: Results) -> str:
    """Operators over the threshold in the GPT step; empty if it was not traced."""
    rows = [
        [
            f"`{row['operator']}`",
            numbers.count(row["calls"]),
            numbers.with_unit(row["seconds"], "s"),
            numbers.percent(row["share"]),
            row["shapes"],
            " < ".join(row["stack"]) + (f" (in {row['node']})" if row["node"] else ""),
        ]
        for record in results.select("operator_cost")
        for row in record.data
    ]
    header = ["operator", "calls", "own time", "share", "most of it on", "called from"]
    return markdown_table(header, rows, left=1) if rows else ""


def native_table(results: Results) -> str:
    """The routines below CPU kernels; empty if no kernel was single-stepped."""
    rows = [
        [
            f"`{record.labels['expression']}` {record.labels['dtype']}",
            f"`{record.labels['operator']}`",
            "<br>".join(
                f"`{frame['function']}`" + (f" ({frame['file']})" if frame["file"] else "")
                for frame in record.data["frames"]
            )
            or "–",
            ("at least " if record.data["cut"] else "") + numbers.count(record["instructions"].value),
        ]
        for record in results.select("native_step")
    ]
    header = ["call", "kernel of", "routines, in order, with their source file", "instructions"]
    return markdown_table(header, rows, left=3) if rows else ""


def hop_cost_table(results: Results) -> str:
    """What a hop adds to a call without shims."""
    rows = [[record.labels["what"], numbers.quantity(record["seconds"])] for record in results.select("hop_cost")]
    return markdown_table(["hop", "adds to the call"], rows) if rows else ""


def threads(results: Results) -> dict[str, int]:
    """Number of hops by thread, over all traces."""
    counted: dict[str, int] = {}
    for trace in results.select("trace"):
        for thread, hops in trace.data["threads"].items():
            counted[thread] = counted.get(thread, 0) + hops
    return counted


SPEC = ReportSpec("dispatcher_trace", context, figures, finding, headline)
