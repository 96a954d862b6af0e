"""Results into a report: its text, from the records alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchkit import numbers
from benchkit.report import ReportSpec, markdown_table
from benchkit.results import Record, Results
from compile_bench.capture.reasons import cause_of
from compile_bench.measure.serialize import case_title, plural, shape_passes
from compile_bench.measure.shapes import STRATEGIES
from compile_bench.measure.verdict import BUSY, CACHE_STATES
from compile_bench.report.figures import figures
from compile_bench.report.queries import (
    PARTS,
    alone,
    cache_name,
    compiled_first,
    eager_first,
    same_case,
    unswept,
    value_of,
    verdict_of,
)
from compile_bench.report.regressions import attention_table, slower_table
from compile_bench.report.sweep import autotuning_context, sweep_context
from compile_bench.report.triage import triage_context
from compile_bench.targets.case import FIRST_STEPS


def finding(results: Results) -> str:
    """What the run found, in one sentence."""
    verdicts = results.select("verdict")
    if not verdicts:
        return "No case could be measured to the end."
    verdict = _headline(verdicts)
    steady = same_case(results, "steady", verdict)
    return (
        f"{case_title(verdict)}: torch.compile costs {numbers.with_unit(verdict['price'].value, 's')} up front with "
        f"empty caches and makes a step {numbers.quantity(steady['speedup'])} as fast; {_advice(verdict)}."
    )


def _headline(verdicts: Sequence[Record]) -> Record:
    """The case that a report opens with: the first in mode default, the honest loop where the main job has run."""
    return next((verdict for verdict in verdicts if verdict.labels["mode"] == "default"), verdicts[0])


def context(results: Results) -> dict[str, Any]:
    """The template's variables."""
    verdicts = results.select("verdict")
    main = alone(results, verdicts)
    return {
        "answers": _answers(results, verdicts),
        "case_names": list(dict.fromkeys(case_title(each, mode=False) for each in unswept(results, verdicts))),
        "verdict_table": _verdict_table(results, main),
        "plan": _plan(main),
        "sweep": sweep_context(results, verdicts),
        "slower_table": slower_table(results),
        "attention_table": attention_table(results),
        "autotuning": autotuning_context(results),
        "scopes": _scopes(results, verdicts),
        "first_table": _first_table(alone(results, results.select("first steps"))),
        "steady_table": _steady_table(results, main),
        "step_table": _step_table(results, unswept(results, verdicts)),
        "cudagraphs": _cudagraphs(results),
        "compilation_table": _compilation_table(results, unswept(results, verdicts)),
        "accuracy_table": _accuracy_table(results),
        "shapes": [_shapes(record) for record in results.select("shapes")],
        "agreement": _agreement(results),
        "toolchain": _toolchain(results),
        "forked": any(record.data.get("forked") for record in results.select("toolchain")),
        "pressures": _pressures(results),
        "controls": _controls(results),
        "clocks": sorted({record.data["method"] for record in results.select("steady")}),
        "on_gpu": results.environment.gpu is not None,
        "recorder_share": _recorder_share(results, verdicts),
        "first_steps": FIRST_STEPS,
        "busy": BUSY,
        **triage_context(results),
    }


REPORT = ReportSpec("compile_bench", context, figures, finding)


def _answers(results: Results, verdicts: Sequence[Record]) -> list[tuple[str, str]]:
    """The four lines on the first case, the honest loop: costs, gives, breaks, when."""
    if not verdicts:
        return []
    first = _headline(verdicts)
    costs = []
    for record in compiled_first(results, first):
        extra = record["total"].value - eager_first(results, first)["total"].value
        amount = f"{numbers.with_unit(extra, 's')} more" if extra > 0 else "no more"
        costs.append(f"{amount} with {cache_name(record)}")
    steady = same_case(results, "steady", first)
    compilation = same_case(results, "compilation", first)
    memory = results.select("memory", **{key: first.labels[key] for key in ("target", "kind", "mode")})
    less = _memory_clause(memory[0]) if memory else ""
    broken = f"{plural(int(compilation['breaks'].value), 'graph break')} and " + plural(
        int(compilation["recompiles"].value), "recompilation"
    )
    accuracy = same_case(results, "accuracy", first)
    compared = "outputs and gradients" if accuracy.data["gradient"] else "outputs"
    right = (
        accuracy.data["skipped"]
        or accuracy.data.get("wrong")
        or (f"{compared} {'within' if accuracy.data['holds'] else 'outside'} their bound against float64")
    )
    return [
        ("It costs", f"{_listed(costs)} than eager for the first {FIRST_STEPS} steps ({case_title(first)})."),
        ("It gives", f"a step {numbers.quantity(steady['speedup'])} as fast{less}."),
        ("It breaks", f"{broken} in {plural(int(compilation['graphs'].value), 'graph')}; {right}."),
        ("Use it when", f"{_advice(first)}."),
    ]


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _memory_clause(record: Record) -> str:
    share = record["compiled"].value / record["eager"].value - 1
    return f", with {numbers.percent(abs(share), 0)} {'less' if share < 0 else 'more'} memory at the peak of a step"


def _advice(verdict: Record) -> str:
    advice = verdict.data["advice"]
    if advice != "compile":
        return f"{advice}, since {verdict.data['why']}"
    text = f"compile from {_range(verdict.data['cold'])} steps on"
    for key, name in (("warm", "warm caches"), ("artifact", "cache artifacts")):
        if even := verdict.data.get(key):
            text += f", {_range(even)} with {name}"
    return text


def _range(even: dict[str, Any]) -> str:
    if even["steps"] is None:
        return "∞"
    if even["high"] is None or even["low"] is None:
        return numbers.count(even["steps"])
    return f"{numbers.count(even['steps'])} ({numbers.count(even['low'])}–{numbers.count(even['high'])})"


def _verdict_table(results: Results, verdicts: Sequence[Record]) -> str:
    rows = []
    for verdict in verdicts:
        speedup = same_case(results, "steady", verdict)["speedup"]
        evens = [_break_even(verdict.data[key]) if verdict.data.get(key) else "–" for key in ("warm", "artifact")]
        rows.append(
            (
                case_title(verdict),
                verdict.data["advice"],
                numbers.quantity(speedup),
                numbers.with_unit(verdict["price"].value, "s"),
                _break_even(verdict.data["cold"]),
                *evens,
            )
        )
    header = ["case", "verdict", "speed-up (95 %)", "price, empty caches"]
    header += ["break-even, empty caches", "warm caches", "cache artifacts"]
    return markdown_table(header, rows, left=2) if rows else ""


def _break_even(even: dict[str, Any]) -> str:
    return "never" if even["steps"] is None else f"{_range(even)} steps"


def _plan(verdicts: Sequence[Record]) -> dict[str, str]:
    """Compile or not, by length of the run, restarts and caches, for the first case that has it."""
    found = [verdict for verdict in verdicts if verdict.data.get("plans")]
    if not found:
        return {}
    plans = found[0].data["plans"]
    steps = sorted({plan["steps"] for plan in plans})
    cells = {(plan["restarts"], plan["cache"], plan["steps"]): plan for plan in plans}
    rows = []
    for restarts, cache in dict.fromkeys((plan["restarts"], plan["cache"]) for plan in plans):
        row = [cells[restarts, cache, count] for count in steps]
        texts = [f"{cell['advice']}, {numbers.significant(cell['ratio'])}×" for cell in row]
        rows.append((numbers.count(restarts), CACHE_STATES[cache], *texts))
    header = ["restarts", "each process finds", *(f"{numbers.count(count)} steps" for count in steps)]
    return {"case": case_title(found[0]), "table": markdown_table(header, rows, left=2)}


def _scopes(results: Results, verdicts: Sequence[Record]) -> str:
    """Regional compilation against the whole model, as a table."""
    rows = []
    for verdict in verdicts:
        base, separator, scope = str(verdict.labels["mode"]).partition(", ")
        whole = verdict_of(results, verdict, base)
        if not separator or whole is None:
            continue
        for record, name in ((whole, "whole"), (verdict, scope)):
            cold = next(each for each in compiled_first(results, record) if each.labels["cache"] == "cold")
            compilation = same_case(results, "compilation", record)
            rows.append(
                (
                    case_title(record, mode=False),
                    name,
                    numbers.with_unit(cold["total"].value, "s"),
                    numbers.quantity(same_case(results, "steady", record)["speedup"]),
                    numbers.count(compilation["graphs"].value),
                    numbers.count(compilation["kernels"].value),
                    _break_even(record.data["cold"]),
                )
            )
    unique = list(dict.fromkeys(rows))
    header = ["case", "compiled", "first steps", "speed-up (95 %)", "graphs", "kernels", "break-even"]
    return markdown_table(header, unique, left=2) if unique else ""


def _first_table(records: Sequence[Record]) -> str:
    parts = [(key, name) for key, name in PARTS if any(value_of(record, key) for record in records)]
    rows = [
        (
            f"{case_title(record, mode=record.labels['cache'] != 'none')}, {cache_name(record)}",
            numbers.with_unit(record["total"].value, "s"),
            *(numbers.significant(value_of(record, key)) if value_of(record, key) else "–" for key, _ in parts),
        )
        for record in records
    ]
    return markdown_table(["process", "total", *(f"{name}, s" for _, name in parts)], rows) if rows else ""


def _steady_table(results: Results, verdicts: Sequence[Record]) -> str:
    rows = []
    for verdict in verdicts:
        steady = same_case(results, "steady", verdict)
        control = steady.values.get("control")
        rows.append(
            (
                case_title(verdict),
                numbers.quantity(steady["eager"]),
                numbers.quantity(steady["compiled"]),
                numbers.quantity(steady["speedup"]),
                numbers.quantity(control) if control else "–",
                steady["speedup"].samples,
            )
        )
    header = ["case", "eager (p20–p80)", "compiled (p20–p80)", "speed-up (95 %)", "eager against itself", "rounds"]
    return markdown_table(header, rows) if rows else ""


def _step_table(results: Results, verdicts: Sequence[Record]) -> str:
    """What a step does, eager → compiled: operators, kernels, launches, memory, and how much of it is compiled."""
    on_gpu = results.environment.gpu is not None
    rows = []
    for verdict in verdicts:
        labels = {key: verdict.labels[key] for key in ("target", "kind", "mode")}
        profiles, memories = results.select("profile", **labels), results.select("memory", **labels)
        if not profiles:
            continue
        covered = profiles[0].values.get("covered")
        cells = [numbers.percent(covered.value) if covered else "–", _pair(profiles[0], "operators")]
        if on_gpu:
            cells += [_pair(profiles[0], "kernels"), _pair(profiles[0], "launches")]
        peaks = [numbers.with_unit(memories[0][key].value, "B") for key in ("eager", "compiled")] if memories else []
        rows.append(
            (
                case_title(verdict),
                *cells,
                numbers.with_unit(profiles[0]["guards"].value, "s"),
                " → ".join(peaks) or "–",
            )
        )
    gpu_columns = ["GPU kernels", "launches"] if on_gpu else []
    header = [
        "case",
        "inside compiled regions",
        "operators called",
        *gpu_columns,
        "looking up compiled code",
        "peak memory",
    ]
    return markdown_table(header, rows) if rows else ""


def _pair(record: Record, what: str) -> str:
    if f"eager {what}" not in record.values:
        return "–"
    return " → ".join(numbers.count(record[f"{name} {what}"].value) for name in ("eager", "compiled"))


def _cudagraphs(results: Results) -> list[tuple[str, str]]:
    """Where a mode asked for CUDA graphs and did not get them, and why; the cases of one reason together."""
    cases: dict[str, list[str]] = {}
    for record in results.select("profile"):
        if record.data["no cudagraphs"]:
            cases.setdefault("; ".join(record.data["no cudagraphs"]), []).append(case_title(record))
    return [("; ".join(titles), reasons) for reasons, titles in cases.items()]


def _compilation_table(results: Results, verdicts: Sequence[Record]) -> str:
    keys = ("graphs", "operations", "breaks", "recompiles", "guards", "kernels")
    rows = []
    for verdict in verdicts:
        record = same_case(results, "compilation", verdict)
        check = record.values.get("guard check")
        rows.append(
            (
                case_title(verdict),
                *(numbers.count(record[key].value) for key in keys),
                numbers.with_unit(check.value, "s") if check else "–",
            )
        )
    header = [
        "case",
        "graphs",
        "operations",
        "breaks",
        "recompiles",
        "guards",
        "generated kernels",
        "one guard check",
    ]
    return markdown_table(header, rows) if rows else ""


def _accuracy_table(results: Results) -> str:
    size = numbers.error_size
    rows: list[tuple[str, ...]] = []
    for record in unswept(results, results.select("accuracy")):
        if record.data["skipped"] or record.data.get("wrong"):
            within = "" if record.data["skipped"] else "**no**"
            rows.append((case_title(record), record.data["skipped"] or record.data["wrong"], "", "", "", within))
            continue
        for kind in ("output", "gradient"):
            if f"{kind} eager" in record.values:
                name = kind if kind == "output" else f"gradient of `{record.data['gradient']}`"
                values = [size(record[f"{kind} {part}"].value) for part in ("eager", "compiled", "bound")]
                holds = record[f"{kind} compiled"].value <= record[f"{kind} bound"].value
                tries = record.data.get("attempts", 1)
                again = "" if tries == 1 else f", with the weights moved {plural(tries - 1, 'time')}"
                rows.append((case_title(record), name, *values, f"{'yes' if holds else '**no**'}{again}"))
    header = ["case", "tensor", "eager error", "compiled error", "bound", "within"]
    return markdown_table(header, rows, left=2) if rows else ""


def _shapes(record: Record) -> dict[str, Any]:
    """One shape study: what changes, the table, and what is cheapest for how many passes."""
    counts = [int(count) for count in record.data["rankings"]]
    rows = []
    for entry in record.data["strategies"]:
        strategy = entry["strategy"]
        if entry["failed"]:
            rows.append((strategy, f"fails: {entry['failed']}", "", "", *[""] * len(counts)))
            continue
        rows.append(
            (
                strategy,
                numbers.with_unit(record[f"{strategy} first"].value, "s"),
                numbers.quantity(record[f"{strategy} later"]),
                f"{entry['graphs']}",
                *(numbers.with_unit(shape_passes(record, strategy, count), "s") for count in counts),
            )
        )
    header = ["strategy", "first pass", "later pass (p20–p80)", "graphs", *(_passes(count) for count in counts)]
    again = [
        (entry["strategy"], f"`{_tidy(item['file'])}:{item['line']}`", cause_of(item["guard"]), f"`{item['guard']}`")
        for entry in record.data["strategies"]
        for item in entry["recompiles"]
    ]
    best = {count: ranking[0] for count, ranking in record.data["rankings"].items() if ranking}
    return {
        "title": case_title(record, mode=False),
        "calls": " → ".join(f"`{call}`" for call in record.data["schedule"]),
        "varying": ", ".join(f"`{name}`" for name in record.data["varying"]),
        "table": markdown_table(header, rows),
        "recompile_table": (
            markdown_table(["strategy", "place", "cause", "guard that failed"], again, left=4) if again else ""
        ),
        "best": [(_passes(int(count)), strategy, STRATEGIES[strategy]) for count, strategy in best.items()],
    }


def _tidy(file: str) -> str:
    """Without the folders of an installation, which are this machine's."""
    return file.rpartition("site-packages/")[2]


def _passes(count: int) -> str:
    return f"{numbers.count(count)} pass{'' if count == 1 else 'es'}"


def _agreement(results: Results) -> dict[str, Any]:
    """The counts held against PyTorch's own; empty where none were."""
    records = results.select("agreement")
    if not records:
        return {}
    keys = ("graphs", "explain graphs", "breaks", "log breaks", "explain breaks")
    rows = []
    for record in records:
        explained = record.data["differences"]
        rows.append(
            (
                case_title(record),
                *(numbers.count(record[key].value) for key in keys),
                "all agree" if not explained else "explained" if record.data["explained"] else "**not explained**",
            )
        )
    differences = [(case_title(record), line) for record in records for line in record.data["differences"]]
    header = ["case", "graphs", "explain's", "places of breaks", "the log's", "explain's breaks", ""]
    return {
        "table": markdown_table(header, rows),
        "differences": differences,
        "same": sum(not record.data["differences"] for record in records),
        "explained": sum(bool(record.data["differences"]) and record.data["explained"] for record in records),
        "all": len(records),
    }


def _toolchain(results: Results) -> str:
    records = results.select("toolchain")
    return numbers.with_unit(records[0].data["seconds"], "s") if records else ""


def _pressures(results: Results) -> list[float]:
    known = (record.data["pressure"] for record in results.select("steady"))
    return [pressure for pressure in known if pressure is not None]


def _controls(results: Results) -> dict[str, int]:
    """How often eager against itself came out as no difference."""
    controls = [record.values["control"] for record in results.select("steady") if "control" in record.values]
    within = sum(bool(control.low is not None and control.low <= 1 <= (control.high or 0)) for control in controls)
    return {"within": within, "all": len(controls)}


def _recorder_share(results: Results, verdicts: Sequence[Record]) -> str:
    if not verdicts:
        return ""
    first = _headline(verdicts)
    handler = same_case(results, "compilation", first)["handler"].value
    cold = compiled_first(results, first)[0]["total"].value
    return f"{numbers.with_unit(handler, 's')} of {numbers.with_unit(cold, 's')} ({numbers.percent(handler / cold, 2)})"
