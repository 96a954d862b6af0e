"""What the report says about the question and the method, apart from what was measured."""

from __future__ import annotations

from collections.abc import Iterator

from benchkit import Record, Results, numbers
from benchkit.report import Block, Column, Table, bullets
from rmsnorm_fused.bench.accuracy import ARITHMETIC_FACTOR
from rmsnorm_fused.bench.candidates import ABOUT
from rmsnorm_fused.report.queries import ITEM_BYTES, PASSES, as_text, implementations, shown

_ASKED = """\
RMSNorm does very little arithmetic, so a fast implementation moves every byte only once. How close does each
implementation come to a plain copy of the same bytes, forward and backward, and how much faster is it than the
formula in eager PyTorch?

    y       = s · rstd · weight,            rstd = 1 / sqrt(mean(s²) + 1e-6), over a row of N columns
    dx      = rstd · g - s · rstd³ · mean(g · s),            g = dy · weight
    dweight = sum over the rows of dy · s · rstd

with s = x, or s = x + residual, in which case s is also returned."""

_METHOD = """\
Each implementation was first checked against float64. Then all were timed in one process, in interleaved rounds and
random order. Figures are medians with the 20th and 80th percentile; ratios are paired within the rounds (95 %
bootstrap interval). The bytes of a pass are the least that it must move, for M rows of N columns of {bytes} bytes:

| | forward | backward |
|---|---|---|
| plain | reads x, writes y: 2 · M · N · {bytes} | reads x and dy, writes dx: 3 · M · N · {bytes} |
| with a residual | reads x and the residual, writes s and y: 4 · M · N · {bytes} | reads s, dy and ds, writes dx: 4 · M · N · {bytes} |

The limit is a copy of the same number of bytes. It is timed in the same rounds, so "of the limit" is a paired ratio
too: PyTorch's copy of x for the plain forward pass, `x + dy` for the plain backward pass"""  # noqa: E501

_METHOD_ON_A_GPU = """\
, and x + dy and x - dy in one kernel, with two reads and two writes, for both passes with a residual.

The forward pass, and the backward pass through autograd, are replayed from CUDA graphs, so that the kernels are timed
without their launches. The inputs rotate through more memory than the L2 cache holds, except for small batches."""

_METHOD_ON_A_CPU = """\
, or the same reads and writes by vectors where that is faster. Results of at least half of the last-level cache are
written past it, by the kernels and the copy; smaller ones stay in it for their reader, in both. PyTorch has no
operator with two reads and two writes, so there is no such limit here with a residual.

Forward and backward are whole calls from Python, timed with the wall clock; backward runs through autograd. The
inputs rotate through more memory than the last-level cache holds, except for small batches."""

_ERRORS = f"""\
"Error" is the largest error divided by the largest value of the result. "Of the bound" is the largest error divided
by the bound for an implementation that computes in float32 and rounds once: half the distance between neighbouring
numbers of the result's dtype, plus {ARITHMETIC_FACTOR:g} unit roundoffs of float32 times the magnitude of the terms.
For this package's kernels it is at most 1; otherwise the run stops. An implementation above 1 rounds more often, or
at other places: Liger also rounds x · rstd, like Llama's module, and quack, with a residual, continues with the sum
before rounding."""

_KEPT = {
    True: "Freed memory is kept for the next result (`mallopt`), as PyTorch's allocator keeps it on a GPU.",
    False: "Every call, including the copy, allocates memory for its result; large results cause page faults.",
}


def asked(results: Results) -> list[Block]:
    """The question, and who takes part."""
    timed = [record for name in (*PASSES, "call", "quantised") for record in results.select(name)]
    about = [Column("implementation", as_text), Column("what it is", lambda name: ABOUT[name], left=True)]
    return [_ASKED, Table(implementations(timed, copy=True), about)]


def method(results: Results) -> list[Block]:
    """How it was measured, and the limits of the machine."""
    on_gpu = results.environment.gpu is not None
    kept = any(record.data["kept"] for record in results.select("freed memory"))
    text = _METHOD.format(bytes=ITEM_BYTES[results.configuration["dtype"]])
    return [
        text + (_METHOD_ON_A_GPU if on_gpu else _METHOD_ON_A_CPU),
        "" if on_gpu else _KEPT[kept],
        "The machine's limits, into memory that is already allocated, and for matrix products:",
        Table(
            [*results.select("memory limit"), *results.select("product limit")],
            [
                Column("limit", lambda r: r.labels.get("traffic") or f"{r.labels['dtype']} products"),
                Column("rate", lambda r: r.values.get("bandwidth") or r["rate"]),
                Column("with", _conditions),
            ],
        ),
        bullets(f"Timed as plain calls between CUDA events instead: {note}." for note in _clock_notes(results)),
        _ERRORS,
        "Gradients are checked by the tests too: once and twice by `torch.autograd.gradcheck` and `gradgradcheck` in "
        "float64, and against float64 within this bound in the other dtypes.",
    ]


def _conditions(record: Record) -> str:
    if record.name == "product limit":
        return f"{record.labels['size']} × {record.labels['size']} matrices"
    text = f"{numbers.with_unit(record['tensor'].value, 'B')} per tensor"
    if "ordinary" in record.values:
        rate = numbers.quantity(record["ordinary"])
        text += f"; with ordinary stores, which first read each line that they write, {rate}"
    return text


def _clock_notes(results: Results) -> Iterator[str]:
    """The implementations that could not be replayed from a CUDA graph, with the reason."""
    records = [record for name in (*PASSES, "determinism", "quantised") for record in results.select(name)]
    yield from dict.fromkeys(f"{shown(r)}, {r.name}: {r.data['note']}" for r in records if r.data["note"])
