"""The report: its sections, declared from the records alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchkit import markdown, numbers
from benchkit.environment import commit_label
from benchkit.report import Block, Code, Column, Figure, Report, Section, Share, Table, bullets
from benchkit.results import Quantity, Record, Results
from dispatcher_trace.explain.operator_cost import first_shapes
from dispatcher_trace.measure.cases import EVERY_MODE, FOUR_MODES, MODES, PAGE, PERFETTO, SHOWN
from dispatcher_trace.report.figures import figures
from dispatcher_trace.report.finding import (
    agreed_share,
    autocast_order,
    avoid,
    condition,
    headline,
    path,
    totals,
    use,
    worst,
)


def report(results: Results) -> Report:
    """The report of a run."""
    drawn = {figure.name: figure for figure in figures(results)}
    on_gpu = results.environment.gpu is not None
    return Report(
        title="From an expression to its kernel, hop by hop",
        headline=headline(results),
        use=use(results),
        avoid=avoid(results),
        worst=worst(results),
        answer=_answer(results, drawn),
        findings=[
            _listed("Where the prediction did not hold:", disagreements(results)),
            _listed("The profiler saw other operators in the untraced run:", operator_differences(results)),
            Section(
                "",
                [traces_table(other_traces(results))],
                fold="The other traces: bf16, softmax, linear, attention, views, an in-place operator, a custom "
                "operator",
            ),
            Section(
                "",
                [modes_table(results)],
                fold="Every key that a @ b visits, casts, helpers and backward included",
            ),
            Section(
                "Autocast and Autograd: which comes first",
                [bullets(f"{what}: {first}, then {second}." for what, first, second in autocast_order(results))],
            ),
            _agreement_section(results, on_gpu=on_gpu),
            _programs_section(results),
            Section("What published notes on the dispatcher say", [bullets(claims(results))]),
            Section(
                "Traces, hop by hop",
                [_shown(trace, drawn) for trace in _shown_traces(results)],
            ),
            _below_the_backend(results),
            _restored(results),
            _hop_costs(results, on_gpu=on_gpu),
            _overhead(results),
        ],
        asked=[_asked(results)],
        method=_method(results),
        limits=[
            "The dispatcher does not report whether a hop is a redispatch or a new call of the same operator. The "
            "rules of the prediction decide that; the number of operator calls is compared with the profiler's above.",
            "Two backends in one key set show as the higher one, as the dispatcher itself resolves them.",
            "Most of the time inside a trace is the tracer's own. The times of operators come from an untraced run.",
            "Copies that a kernel makes internally, below the dispatcher, are not among the copies.",
            *sorted({note for trace in results.select("trace") for note in trace.data["notes"]}),
        ],
    )


def _listed(text: str, lines: Sequence[str]) -> Section:
    return Section("", [text, bullets(lines)]) if lines else Section("")


def _answer(results: Results, drawn: dict[str, Figure]) -> list[Block]:
    shown = _in_dtype(results, "f32")
    if not shown:
        return []
    compiled = "`compile` is only the call of the compiled function; code that Inductor generated calls no operator."
    modes = {trace.labels["mode"] for trace in results.select("trace", expression=EVERY_MODE, dtype="f32")}
    return [
        drawn["paths"],
        traces_table(shown),
        f"{same_in_bf16(results)} `requires_grad` includes the backward. {compiled if 'compile' in modes else ''} Hops "
        "and operator calls include the casts on the way, the helper operators that kernels call, and the backward. "
        '"Predicted" counts the hops that were both predicted and seen, of all hops that were predicted or seen.',
    ]


def _asked(results: Results) -> str:
    size = results.configuration["size"]
    return (
        "What does PyTorch do between `a + b` or `a @ b` and the kernel that computes it? Which dispatch keys does a "
        f"call visit, in which order, and why? The inputs are {size} × {size} tensors in f32 and bf16. The conditions "
        "are plain tensors, gradients (forward and backward), autocast to bf16, inference mode, `vmap` and "
        "`torch.compile`. The report also covers attention, views, in-place operators, a training step of the GPT and "
        "a custom operator."
    )


def _method(results: Results) -> list[Block]:
    counted = totals(results)
    installed = "".join(
        f"{numbers.count(record['shims'].value)} shims were installed in {numbers.quantity(record['seconds'])}; the "
        "tables are restored afterwards."
        for record in results.select("installation")
    )
    return [
        "A Python function (a hop shim) replaces every kernel at a watched key, for every operator. It records the "
        f"hop and calls the kernel. {installed} Each trace is compared with three things:",
        bullets(
            [
                "a **static prediction** of the keys of each call, from the keys of its arguments, the thread's "
                "include and exclude sets and the dispatch table alone;",
                "the **profiler**, which sees operator calls by another mechanism: it saw "
                f"{numbers.count(counted['profiled'])}, the traces have {numbers.count(counted['calls'])};",
                f"the **untraced run**: {counted['bit_equal']} of {counted['traces']} cases have bit-equal results, "
                f"{counted['same_operators']} of {counted['traces']} the same operators.",
            ]
        ),
        "Sources of the facts: keys, key sets, order, arguments and results come from the shim; kind and place of a "
        "kernel from the dispatch table (static); names of `at::native` functions from the wheel's "
        "`native_functions.yaml` (static); the lines of code from Python's stack; device kernels from the profiler; "
        "routines below a CPU kernel from single-stepping it.",
    ]


def operator_differences(results: Results) -> list[str]:
    """A line for each trace that has other operators than the profile of the untraced run."""
    different = ((condition(trace), _operator_difference(trace)) for trace in results.select("trace"))
    return [f"{where}: {difference}" for where, difference in different if difference]


def other_traces(results: Results) -> list[Record]:
    """The traces that do not stand in the table of the first screen."""
    shown = _in_dtype(results, "f32")
    return [trace for trace in results.select("trace") if trace not in shown]


def same_in_bf16(results: Results) -> str:
    """Whether the two expressions take the same paths in bf16; empty if they were not traced in it."""
    f32, bf16 = (
        {(trace.labels["expression"], trace.labels["mode"]): path(trace) for trace in _in_dtype(results, dtype)}
        for dtype in ("f32", "bf16")
    )
    if not bf16:
        return ""
    if other := [case for case, taken in bf16.items() if f32.get(case) != taken]:
        cases = (f"`{expression}` under {mode} it is {bf16[expression, mode]}" for expression, mode in other)
        return f"In bf16 the path is another: for {'; for '.join(cases)}."
    if set(bf16) == set(list(f32)[: len(bf16)]):
        return f"In bf16 the paths of the first {len(bf16)} rows are the same."
    return f"In bf16 these paths are the same: {'; '.join(f'`{expression}` {mode}' for expression, mode in bf16)}."


def _in_dtype(results: Results, dtype: str) -> list[Record]:
    """The traces of the two expressions that are traced under all conditions."""
    return [trace for trace in results.select("trace", dtype=dtype) if trace.labels["expression"] in FOUR_MODES]


def traces_table(traces: Sequence[Record]) -> Table[Record]:
    """One row for each trace."""
    return Table(
        traces,
        [
            Column("expression", lambda trace: Code(trace.labels["expression"])),
            Column("dtype", "dtype"),
            Column("condition", "mode"),
            Column("path to the kernel", path, left=True),
            Column("hops", "hops"),
            Column("operator calls", "calls"),
            Column("seen by the profiler", "profiled"),
            Column("predicted", _predicted),
            Column("bit-equal", "bit_equal"),
        ],
    )


def _predicted(record: Record) -> str:
    """Number of hops that were predicted, of all that were seen or predicted, and of those that did not happen."""
    missed = round(record["positions"].value - record["hops"].value)
    hops = "1 predicted hop" if missed == 1 else f"{numbers.count(missed)} predicted hops"
    of_all = f"{numbers.count(record['agreed'].value)} of {numbers.count(record['positions'].value)}"
    return f"{of_all}: {hops} did not happen" if missed else of_all


def disagreements(results: Results) -> list[str]:
    """A line for each hop whose key was not predicted."""
    return [
        f"{condition(trace)}: hop {row['number']}, `{row['operator']}` at {row['key']}; predicted "
        f"{row['predicted'] or 'no hop'}"
        for trace in results.select("trace")
        for row in trace.data["disagreements"]
    ]


def modes_table(results: Results) -> Table[Record]:
    """All keys that the same call visits under every mode; empty if fewer than two modes were traced."""
    traces = [
        trace for mode in MODES for trace in results.select("trace", expression=EVERY_MODE, dtype="f32", mode=mode)
    ]
    keys = Column[Record](
        "keys visited, in order of first arrival", lambda trace: ", ".join(dict.fromkeys(trace.data["keys"])), left=True
    )
    return Table(traces if len(traces) > 1 else [], [Column("condition", "mode"), keys])


def _agreement_section(results: Results, *, on_gpu: bool) -> Section:
    callables = [entry for record in results.select("catalogue") for entry in record.data]
    families: dict[str, list[str]] = {}
    for name, family in callables:
        families.setdefault(family, []).append(f"`{name}`")
    wrong = causes(results)
    own_tensors = (
        "AutogradCPU appears although the inputs are on the GPU: some callables make tensors of their own on the CPU, "
        "such as a list of indices or an optimizer's count of steps (inferred; the records hold the keys and not the "
        "tensors)."
    )
    refused = bullets(
        f"{record.labels['mode']}: {', '.join(f'`{name}`' for name in record.data['refused'])}"
        for record in results.select("agreement")
        if record.data.get("refused")
    )
    return Section(
        "Prediction against observation",
        [
            f"{numbers.count(len(callables))} public callables of torch, each under every mode in which torch itself "
            "can run it. A call counts as predicted if the prediction names exactly the keys that the call visited.",
            agreement_table(results),
            _listed("Where the prediction did not hold:", wrong),
            own_tensors if on_gpu and any("AutogradCPU" in line for line in wrong) else "",
            Section(
                "",
                [
                    bullets(f"{family}: {', '.join(names)}" for family, names in families.items()),
                    "These callables are left out, because they also raise without the tracer (no gradient, no "
                    "batching rule, no forward-mode derivative):"
                    if refused
                    else "",
                    refused,
                ],
                fold="The callables",
            ),
        ],
    )


def agreement_table(results: Results) -> Table[Record]:
    """How often the prediction holds under every mode; empty if it was not measured."""
    return Table(
        results.select("agreement"),
        [
            Column("mode", "mode"),
            Column("callables", "entries"),
            Column("operator calls", "calls"),
            Column("not as predicted", lambda record: round(record["calls"].value - record["agreed"].value)),
            Column("as predicted", lambda record: Share(agreed_share(record), 2)),
            Column("errors", lambda record: len(record.data["errors"])),
        ],
    )


def causes(results: Results) -> list[str]:
    """A line for each kind of call that was not predicted, over all modes, with its cause."""
    counted: Counter[tuple[str, ...]] = Counter()
    for record in results.select("agreement"):
        for item in record.data["disagreements"]:
            visited, predicted = " → ".join(item["visited"]), " → ".join(item["predicted"])
            counted[item["operator"], visited, predicted, item["cause"] or "no known cause"] += item["calls"]
    return [
        f"`{operator}`, {numbers.count(calls)} calls: visited {visited}, predicted {predicted}; {cause}"
        for (operator, visited, predicted, cause), calls in counted.most_common()
    ]


def _programs_section(results: Results) -> Section:
    commit = commit_label(results.environment.commit, results.environment.dirty)
    lines = line_table(results)
    page = (
        f"**[The GPT's step as a page]({PAGE})** (two layers, forward, backward, clipping, AdamW) has every call, hop, "
        "key set and reason; open it in a browser, fold, search, point at a hop. On a time axis: "
        f"[{PERFETTO}]({PERFETTO}), for ui.perfetto.dev; its times are of the traced run, and most of them are the "
        "tracer's own."
    )
    return Section(
        "Whole training steps",
        [
            programs_table(results),
            page if lines else "",
            Section(
                "",
                [
                    "Operators with more than 5 % of the operators' own time, without the tracer:",
                    operator_costs(results),
                ],
            ),
            Section(
                "",
                [
                    "One row for the line that made the calls, or in a backward the line whose forward made the node. "
                    f"The line numbers are those of commit {commit}.",
                    lines,
                ],
                fold="The step, line by line",
            ),
            Section(
                "",
                [bullets(step_findings(results))],
                fold="Copies that no line of the step asks for, and values that are read on the host",
            ),
        ],
    )


def programs_table(results: Results) -> Table[Record]:
    """The training steps; empty if none was traced."""
    return Table(
        results.select("program"),
        [
            Column("step", "step"),
            Column("hops", "hops"),
            Column("operator calls", "calls"),
            Column("seen by the profiler", "profiled"),
            Column("predicted", _predicted),
            Column("only in one run", lambda record: _operator_difference(record) or "none"),
            Column("bit-equal", "bit_equal"),
        ],
    )


def _operator_difference(record: Record) -> str:
    """Operators that only the trace has, or only the profile of the untraced run."""
    sides = ((record.data["only_untraced"], "untraced"), (record.data["only_traced"], "traced"))
    return ", ".join(
        f"{_times(operator, count)} ({side})" for operators, side in sides for operator, count in operators.items()
    )


def step_findings(results: Results) -> list[str]:
    """Copies and synchronisations of the GPT step, one line for each place."""
    counted: Counter[tuple[str, ...]] = Counter()
    for record in results.select("program", step="GPT step"):
        for entry in record.data["findings"]:
            line = entry["forward_source"] or entry["source"]
            direction = "in the backward of " if entry["forward_source"] else ""
            # Tensor labels differ from layer to layer.
            what = re.sub(r"\$\d+: ", "", entry["detail"].partition("; ")[0])
            under = "" if entry["cause"] == entry["operator"] else f" under `{entry['cause']}`"
            counted[entry["kind"], f"`{entry['operator']}`{under}: {what}; {direction}{line}"] += 1
    return [f"{kind}, {calls} ×: {text}" for (kind, text), calls in counted.most_common()]


def line_table(results: Results) -> Table[dict[str, Any]]:
    """The GPT step, one row for each line of code and direction; empty if it was not traced."""
    rows = [row for record in results.select("source_lines") for row in record.data]
    on_gpu = any(row["kernels"] for row in rows)  # a CPU has none to count
    return Table(
        rows,
        [
            Column("direction", lambda row: row["direction"]),
            Column("line", lambda row: row["source"] or "no Python on the stack"),
            Column("operators it calls", lambda row: ", ".join(_times(*operator) for operator in row["operators"])),
            Column("keys visited", lambda row: ", ".join(row["keys"]), left=True),
            Column("operator calls", lambda row: row["calls"]),
            Column("hops", lambda row: row["hops"]),
            Column("device kernels", lambda row: row["kernels"] if on_gpu else None, optional=True),
        ],
    )


def _times(operator: str, count: int) -> str:
    name = f"`{operator.removeprefix('aten::')}`"
    return name if count == 1 else f"{name} × {count}"


def operator_costs(results: Results) -> Table[dict[str, Any]]:
    """Operators over the threshold in the GPT step; empty if it was not traced."""
    return Table(
        [row for record in results.select("operator_cost") for row in record.data],
        [
            Column("operator", lambda row: Code(row["operator"])),
            Column("calls", lambda row: row["calls"]),
            Column("own time", lambda row: Quantity(row["seconds"], "s")),
            Column("share", lambda row: Share(row["share"])),
            Column("most of it on", lambda row: first_shapes(row["shapes"])),
            Column(
                "called from", lambda row: " < ".join(row["stack"]) + (f" (in {row['node']})" if row["node"] else "")
            ),
        ],
    )


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
    return [*said, autocast_claim(results)]


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


def _shown_traces(results: Results) -> Iterable[Record]:
    for expression, dtype, mode in SHOWN:
        yield from results.select("trace", expression=expression, dtype=dtype, mode=mode)


def _shown(trace: Record, drawn: dict[str, Figure]) -> Section:
    """A trace hop by hop: its tree, its figure if it has one, and the reason of each hop."""
    figure = drawn.get(f"trace_{trace.labels['mode']}_{trace.labels['dtype']}")
    hops = Table(
        sorted(trace.data["hops"], key=lambda row: row["number"]),
        [
            Column("hop", lambda row: str(row["number"])),
            Column("operator", lambda row: Code(row["operator"])),
            Column("key", lambda row: row["key"]),
            Column("why", lambda row: row["why"]),
            Column("key set, effects", lambda row: _key_set(row["key_line"]), left=True),
        ],
    )
    return Section(
        condition(trace),
        [
            markdown.block("\n".join(trace.data["lines"])),
            *([figure] if figure else []),
            hops,
            "A key set is what the dispatcher computed for the call, or what a redispatch left. Where nothing else is "
            "said, the prediction was the same key. `dispatcher-trace expr … --full` says where each key comes from.",
        ],
        fold=f"{condition(trace)}, {numbers.count(trace['hops'].value)} hops",
    )


def _key_set(line: str) -> str:
    """The key set and the effects of a hop, without where each key comes from and without a prediction that held."""
    return re.sub(r"^keys | = [^;]*|; as predicted", "", line)


def _below_the_backend(results: Results) -> Section:
    threads: Counter[str] = Counter()
    for trace in results.select("trace"):
        threads.update(trace.data["threads"])
    by_thread = ", ".join(f"{name} has {numbers.count(count)}" for name, count in threads.items())
    return Section(
        "Below the backend key",
        [
            Section("", [kernel_table(results)], fold="The device's kernels, by trace and operator"),
            Section(
                "",
                [
                    "From stepping through the kernels instruction by instruction, on 32 × 32 tensors: the functions "
                    "of `at::native`, the functions that are compiled for an instruction set (the suffix of their "
                    "source file), and the routines of the libraries below.",
                    Section("", [native_table(results)], fold="The routines, kernel by kernel"),
                ],
            ),
            f"Hops by thread: {by_thread}." if len(threads) > 1 else "",
        ],
    )


def kernel_table(results: Results) -> Table[tuple[Record, dict[str, Any]]]:
    """Device kernels by trace; empty if none ran."""
    return Table(
        [(trace, kernel) for trace in results.select("trace") for kernel in trace.data["kernels"]],
        [
            Column("trace", lambda row: condition(row[0])),
            Column("operator", lambda row: _with(row[1]["operator"], " in {}", row[1]["node"])),
            Column("kernel", lambda row: _with(_short(row[1]["name"]), " ({})", row[1]["library"]), left=True),
            Column("grid", lambda row: "×".join(map(str, row[1]["grid"])) or None),
            Column("block", lambda row: "×".join(map(str, row[1]["block"])) or None),
            Column("registers", lambda row: row[1]["registers"]),
            Column("shared memory", lambda row: _optional(row[1]["shared_memory"], "B")),
            Column("time", lambda row: Quantity(row[1]["seconds"], "s")),
        ],
    )


def _with(name: str, form: str, addition: str) -> str:
    """A name as code, with an addition if there is one."""
    return f"`{name}`" + (form.format(addition) if addition else "")


def _optional(value: float | None, unit: str) -> Quantity | None:
    return None if value is None else Quantity(value, unit)


def _short(name: str, limit: int = 110) -> str:
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def native_table(results: Results) -> Table[Record]:
    """The routines below CPU kernels; empty if no kernel was single-stepped."""

    def routines(record: Record) -> str | None:
        frames = record.data["frames"]
        return "<br>".join(_with(frame["function"], " ({})", frame["file"]) for frame in frames) or None

    def instructions(record: Record) -> str:
        return ("at least " if record.data["cut"] else "") + numbers.count(record["instructions"].value)

    return Table(
        results.select("native_step"),
        [
            Column("call", lambda record: f"`{record.labels['expression']}` {record.labels['dtype']}"),
            Column("kernel of", lambda record: Code(record.labels["operator"])),
            Column("routines, in order, with their source file", routines, left=True),
            Column("instructions", instructions),
        ],
    )


def _restored(results: Results) -> Section:
    def equal(yes: bool) -> str:
        return "equal" if yes else "NOT equal"

    lines = [
        f"After the removal of the shims, the dispatcher's dumps of {numbers.count(record['operators'].value)} "
        f"operators are {equal(record.data['equal'])} to those before. After traced code that raised, they are "
        f"{equal(record.data['equal_after_exception'])} too."
        for record in results.select("restored")
    ]
    return Section("Restored tables", lines)


def _hop_costs(results: Results, *, on_gpu: bool) -> Section:
    gpu = (
        " The operands are CPU tensors here too, hence AutogradCPU: the dispatcher runs on the host, and the launch of "
        "a GPU's kernel would hide its time."
    )
    return Section(
        "What a hop costs",
        [
            "Without the tracer, on four elements: the slope of the time over the number of calls (Theil and Sen), "
            f"once with the key on top of the set and once without it, paired round by round.{gpu if on_gpu else ''}",
            Table(results.select("hop_cost"), [Column("hop", "what"), Column("adds to the call", "seconds")]),
        ],
    )


_RUNS = {
    "untraced": "no shims",
    "off": "shims, not recording",
    "on": "shims, recording",
    "counted": "shims, counting calls alike",  # documents before 2026-11-25 lack it, and the memory
}


def _overhead(results: Results) -> Section:
    """Time that the tracer adds to a hop, and memory that it keeps, from the addition of four elements."""
    rows: list[tuple[str, Quantity | None, Quantity | None]] = []
    hops = ""
    for record in results.select("overhead"):
        hops = numbers.count(record["hops"].value)
        for name in filter(record.values.__contains__, _RUNS):
            more = (record[name].value - record["untraced"].value) / record["hops"].value
            rows.append((_RUNS[name], record[name], None if name == "untraced" else Quantity(more, "s")))
        if "kept" in record.values:
            rows.append(("memory kept", None, record["kept"]))
    return Section(
        "What the tracer costs",
        [
            Table(
                rows,
                [
                    Column("", lambda row: row[0]),
                    Column("`torch.add` of 4 elements", lambda row: row[1]),
                    Column("added to each hop", lambda row: row[2]),
                ],
            ),
            f"The addition makes {hops} hops. The last column is the difference from the first row, divided by the "
            "number of hops.",
        ],
    )
