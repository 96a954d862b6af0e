"""The report's tables, sentences and finding, computed from the results alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchkit import Record, Results, numbers
from benchkit.report import ReportSpec, markdown_table, must_and_aim
from rmsnorm_fused.bench.accuracy import ARITHMETIC_FACTOR
from rmsnorm_fused.bench.candidates import ABOUT, COPY, EAGER, LIGER, OWN, QUACK, SEPARATE
from rmsnorm_fused.bench.training import BASELINE
from rmsnorm_fused.report import cpu_targets
from rmsnorm_fused.report.answer import (
    above_the_limit,
    determinism_notes,
    eager_speedups,
    finding,
    headline,
    headline_rows,
)
from rmsnorm_fused.report.figures import (
    ITEM_BYTES,
    OPERATIONS,
    PASSES,
    figures,
    implementations,
    shape,
    shown,
    width_records,
)
from rmsnorm_fused.report.targets import GPU, TARGETS, Measured, Target, applies, fastest, others

_NONE = "–"


def _target_rows(results: Results) -> list[tuple[str, ...]]:
    show: dict[str, Callable[[float], str]] = {
        "share": numbers.percent,
        "times": lambda value: numbers.with_unit(value, "×"),
        "seconds": lambda value: numbers.with_unit(value, "s"),
    }
    elsewhere = others((*results.select("forward"), *results.select("call")))

    def row(target: Target) -> tuple[str, ...]:
        def cell(measured: Measured | None) -> str:
            return _NONE if measured is None else f"{show[target.kind](measured.value)} ({measured.where})"

        own = target.measure(results, target.own)
        bound = f"{'≤' if target.kind == 'seconds' else '≥'} {show[target.kind](target.bound)}"
        met = "not measured" if own is None else "yes" if target.met(own) else "**no**"
        return target.what, bound, cell(own), met, cell(target.measure(results, elsewhere))

    return [row(target) for target in TARGETS]


def _pass_table(records: Sequence[Record]) -> str:
    """One row per implementation: time, rate, share of the limit, speed-up over eager, errors."""
    errors = list(dict.fromkeys(key for record in records for key in record.values if key.startswith("error_")))
    limited = any("fraction" in record.values for record in records)

    def row(record: Record) -> tuple[str, ...]:
        name, values = record.labels["implementation"], record.values
        limit_share = "100 %" if name == COPY else numbers.percent(record["fraction"].value) if limited else ""
        return (
            shown(name),
            numbers.quantity(record["time"]),
            numbers.with_unit(record["bandwidth"].value, "B/s"),
            *((limit_share,) if limited else ()),
            numbers.quantity(record["speedup"]) if "speedup" in values else "1" if name == EAGER else "",
            *(numbers.error_size(values[key].value) if key in values else "" for key in errors),
            numbers.significant(record["share_of_bound"].value, 2) if "share_of_bound" in values else "",
        )

    header = (
        *("implementation", "time", "moved"),
        *(("of the limit",) if limited else ()),
        "against eager",
        *(f"error of {key.removeprefix('error_')}" for key in errors),
        "of the bound",
    )
    by_name = {str(record.labels["implementation"]): record for record in records}
    return markdown_table(header, [row(by_name[name]) for name in implementations(records, copy=True)])


def _pass_tables(results: Results, group: str) -> dict[str, str]:
    return {
        which: _pass_table(results.select(which, group=group)) for which in PASSES if results.select(which, group=group)
    }


def _width_table(results: Results, which: str) -> str:
    records = width_records(results, which)
    names = implementations(records, copy=True)
    by_place = {(r.labels["implementation"], int(r.labels["columns"])): r for r in records}
    shapes = sorted({(int(r.labels["columns"]), int(r.labels["rows"])) for r in records})

    def cell(name: str, width: int) -> str:
        if (name, width) not in by_place:
            return _NONE
        record = by_place[name, width]
        time = numbers.with_unit(record["time"].value, "s")
        return time if name == COPY else f"{time} ({numbers.percent(record['fraction'].value, 0)})"

    rows = [(f"{rows} × {width}", *(cell(name, width) for name in names)) for width, rows in shapes]
    return markdown_table(("rows × columns", *map(shown, names)), rows)


def _width_sentence(results: Results, which: str) -> str:
    """The worst width of this package's fastest implementation, and of the fastest other one."""
    records = [record for record in width_records(results, which) if "fraction" in record.values]

    def worst(names: Sequence[str]) -> tuple[float, int]:
        best: dict[int, float] = {}
        for record in records:
            if record.labels["implementation"] in names:
                width = int(record.labels["columns"])
                best[width] = max(best.get(width, 0.0), record["fraction"].value)
        return min((share, width) for width, share in best.items())

    if not {record.labels["implementation"] for record in records} & set(OWN):
        return ""
    (own, own_at), (peers, peers_at) = worst(OWN), worst(others(records))
    return (
        f"At its worst width, the fastest of this package's implementations reaches {numbers.percent(own, 0)} of the "
        f"limit ({own_at} columns); the fastest other implementation reaches {numbers.percent(peers, 0)} ({peers_at})."
    )


def _batch_table(results: Results, records: Sequence[Record]) -> str:
    names = implementations(records, copy=True)
    by_place = {(r.labels["implementation"], r.labels["rows"], r.labels["columns"]): r for r in records}
    rows = [
        (
            f"{rows} × {columns}",
            *(
                numbers.with_unit(by_place[name, rows, columns]["time"].value, "s")
                if (name, rows, columns) in by_place
                else _NONE
                for name in names
            ),
        )
        for columns in results.configuration["batch_columns"]
        for rows in results.configuration["batches"]
        if any(place[1:] == (rows, columns) for place in by_place)
    ]
    return markdown_table(("rows × columns", *map(shown, names)), rows)


def _batch_tables(results: Results) -> dict[str, str]:
    sources = {
        "The kernel alone": results.select("forward", group="batches"),
        "The call from Python": results.select("call", gradient=False),
        "The call from Python, with a weight that requires a gradient": results.select("call", gradient=True),
    }
    return {
        what: f"{_batch_table(results, records)}\n\n{_batch_sentence(records)}"
        for what, records in sources.items()
        if records
    }


def _batch_sentence(records: Sequence[Record]) -> str:
    """At how many shapes this package is the fastest, and where it is worst."""
    ahead, shapes, best = 0, 0, []
    for place in dict.fromkeys((r.labels["rows"], r.labels["columns"]) for r in records):
        here = [r for r in records if (r.labels["rows"], r.labels["columns"]) == place]
        own, other = fastest(here, OWN), fastest(here, others(here))
        if own is None or other is None:
            continue
        shapes += 1
        ahead += own["time"].value <= other["time"].value
        best.append((own["time"].value / other["time"].value, place, own, other))
    if not best:
        return ""
    _, (rows, columns), own, other = max(best, key=lambda entry: entry[0])
    return (
        f"The fastest of this package's implementations is the fastest of all at {ahead} of {shapes} "
        f"shape{'s' if shapes > 1 else ''}. Its worst shape is {rows} × {columns}: "
        f"{numbers.with_unit(own['time'].value, 's')} ({shown(own.labels['implementation'])}) against "
        f"{numbers.with_unit(other['time'].value, 's')} ({other.labels['implementation']})."
    )


def _determinism_rows(results: Results) -> list[tuple[str, ...]]:
    def repeat(record: Record, key: str) -> str:
        return "yes" if record.data[key] else "no"

    return [
        (
            f"{record.labels['rows']} × {record.labels['columns']}",
            shown(record.labels["implementation"]),
            numbers.quantity(record["default"]),
            repeat(record, "default repeats"),
            numbers.quantity(record["deterministic"]),
            repeat(record, "deterministic repeats"),
            numbers.quantity(record["speedup"]),
        )
        for record in results.select("determinism")
    ]


def _determinism_sentence(results: Results) -> str:
    records = results.select("determinism")
    if not records:
        return ""
    worst = max(records, key=lambda record: record["speedup"].value)
    return (
        f"A deterministic pass takes at most {numbers.quantity(worst['speedup'])} the time of the default "
        f"({shown(worst.labels['implementation'])} at {worst.labels['rows']} × {worst.labels['columns']})."
    )


def _memory_rows(results: Results) -> list[tuple[str, ...]]:
    rows, columns = results.configuration["headline"]
    tensor = rows * columns * ITEM_BYTES[results.configuration["dtype"]]
    return [
        (
            shown(record.labels["implementation"]),
            numbers.with_unit(record["peak"].value, "B"),
            numbers.significant(record["peak"].value / tensor, 3),
        )
        for record in results.select("memory")
    ]


def _quantised_sentence(results: Results) -> str:
    records = results.select("quantised")
    own, separate, peer = fastest(records, OWN), fastest(records, (SEPARATE,)), fastest(records, others(records))
    if own is None or separate is None or peer is None:
        return ""
    one, two, other = (numbers.with_unit(record["time"].value, "s") for record in (own, separate, peer))
    return (
        f"One kernel ({shown(own.labels['implementation'])}) takes {one}. The fastest other implementation "
        f"({peer.labels['implementation']}) takes {other}, and a norm followed by a kernel that scales and "
        f"rounds {two}: {numbers.with_unit(peer['time'].value / own['time'].value, '×')} and "
        f"{numbers.with_unit(separate['time'].value / own['time'].value, '×')} as long."
    )


def _training_rows(results: Results) -> list[tuple[str, ...]]:
    return [
        (
            str(record.labels["mode"]),
            shown(record.labels["norm"]),
            numbers.quantity(record["time"]),
            numbers.with_unit(record["rate"].value, "tokens/s"),
            numbers.quantity(record["speedup"]) if "speedup" in record.values else "1",
            numbers.significant(record["loss"].value, 5),
        )
        for record in results.select("training")
    ]


def _training_sentence(results: Results) -> str:
    parts = []
    for mode in dict.fromkeys(str(record.labels["mode"]) for record in results.select("training")):
        own = [r for r in results.select("training", mode=mode) if r.labels["norm"] in OWN]
        if own:
            best = max(own, key=lambda record: record["speedup"].value)
            speed = best["speedup"]
            verdict = "no measurable difference" if _covers_one(best) else f"{numbers.quantity(speed)} the speed"
            parts.append(f"{mode}, {verdict} with {shown(best.labels['norm'])}")
    if not parts:
        return ""
    return f"Compared with the model's {BASELINE}: {'; '.join(parts)}.{_fusion_sentence(results)}"


def _fusion_sentence(results: Results) -> str:
    """Why the compiled step is slower with this package's kernels, if the formula is clearly faster there."""
    steps = results.select("training", mode="compiled")
    own = max((r["speedup"].high or r["speedup"].value for r in steps if r.labels["norm"] in OWN), default=None)
    formula = next((r["speedup"].low or r["speedup"].value for r in steps if r.labels["norm"] == EAGER), None)
    if own is None or formula is None or own >= formula:
        return ""
    return (
        " The compiler fuses the formula with the operators around it; a kernel of this package it calls as it is, "
        "which costs a pass over memory."
    )


def _covers_one(record: Record) -> bool:
    speed = record["speedup"]
    return speed.low is not None and speed.high is not None and speed.low <= 1 <= speed.high


def _clock_notes(results: Results) -> list[str]:
    """The implementations that could not be replayed from a CUDA graph, with the reason."""
    notes: dict[tuple[str, str], None] = {}
    for name in (*PASSES, "determinism", "quantised"):
        for record in results.select(name):
            if record.data["note"]:
                notes[f"{shown(record.labels['implementation'])}, {name}", str(record.data["note"])] = None
    return [f"{what}: {note}" for what, note in notes]


def _limit_rows(results: Results) -> list[tuple[str, str, str]]:
    memory = [
        (
            str(record.labels["traffic"]),
            numbers.quantity(record["bandwidth"]),
            f"{numbers.with_unit(record['tensor'].value, 'B')} per tensor{_ordinary(record)}",
        )
        for record in results.select("memory limit")
    ]
    products = [
        (
            f"{record.labels['dtype']} products",
            numbers.quantity(record["rate"]),
            f"{record.labels['size']} × {record.labels['size']} matrices",
        )
        for record in results.select("product limit")
    ]
    return memory + products


def _ordinary(record: Record) -> str:
    """The bandwidth without streaming stores, where the record has both."""
    if "ordinary" not in record.values:
        return ""
    return f"; with ordinary stores, which first read each line that they write, {numbers.quantity(record['ordinary'])}"


def _context(results: Results) -> dict[str, Any]:
    """The variables of the template."""
    timed = [record for name in (*PASSES, "call", "quantised") for record in results.select(name)]
    target_rows = _target_rows(results) if applies(results) else []
    reached = list(cpu_targets.reached(results))
    return {
        "shape": shape(results),
        "about": [(shown(name), ABOUT[name]) for name in implementations(timed, copy=True)],
        "names": implementations(timed),
        "quack": QUACK,
        "liger": LIGER,
        "baseline": BASELINE,
        "gpu": GPU,
        "limit_rows": _limit_rows(results),
        "must_header": must_and_aim.HEADER,
        "must_rows": must_and_aim.rows(reached),
        "operator_rows": results.configuration.get("operator_rows", []),
        "must_reasons": must_and_aim.reasons(reached),
        "target_rows": target_rows,
        "targets_met": sum(row[3] == "yes" for row in target_rows),
        "headline_rows": headline_rows(results),
        "eager_speedups": eager_speedups(results),
        "above_the_limit": above_the_limit(results),
        "headline": _pass_tables(results, "headline"),
        "add": _pass_tables(results, "add"),
        "widths": {which: _width_table(results, which) for which in PASSES if results.select(which, group="widths")},
        "width_sentences": {which: _width_sentence(results, which) for which in PASSES},
        "batches": _batch_tables(results),
        # Runs without this setting timed the calls of each shape separately.
        "calls_together": "call_seconds" in results.configuration and bool(results.select("call")),
        "determinism_rows": _determinism_rows(results),
        "determinism_sentence": _determinism_sentence(results),
        "determinism_notes": determinism_notes(results),
        "memory_rows": _memory_rows(results),
        "quantised": _pass_table(results.select("quantised")) if results.select("quantised") else "",
        "quantised_sentence": _quantised_sentence(results),
        "training_rows": _training_rows(results),
        "training_sentence": _training_sentence(results),
        "dtypes": {
            dtype: {which: _pass_table(results.select(which, group="dtypes", dtype=dtype)) for which in PASSES}
            for dtype in dict.fromkeys(str(r.labels["dtype"]) for r in results.select("backward", group="dtypes"))
        },
        "operations": {which: OPERATIONS[which, "headline"] for which in PASSES},
        "clock_notes": _clock_notes(results),
        "factor": f"{ARITHMETIC_FACTOR:g}",
        "item_bytes": ITEM_BYTES[results.configuration["dtype"]],
        "memory_kept": any(record.data["kept"] for record in results.select("freed memory")),
        "on_gpu": results.environment.gpu is not None,
    }


REPORT = ReportSpec("rmsnorm_fused", _context, figures, finding, headline=headline)
