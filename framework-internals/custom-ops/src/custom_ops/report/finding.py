"""What a run found in a sentence or two: the best and the worst beside the strongest other implementation."""

from __future__ import annotations

from benchkit import Results, numbers
from custom_ops.bench.training import BASELINE
from custom_ops.report.attention import Attended, attended, dtypes_of, range_of
from custom_ops.report.targets import MISALIGNED, beside_the_strongest, largest, share_of_limit, shares


def finding(results: Results) -> str:
    """The best and the worst of the run; at most two sentences."""
    best = [text for text in (_operators(results), _attention(results)) if text]
    worst = [text for text in (_worst_attention(results), _worst_other(results)) if text]
    if not best:
        return "This run's measurements failed."
    return f"{'; '.join(best)}." + (f" Its worst: {' and '.join(worst)}." if worst else "")


def headline(results: Results) -> str:
    """Both directions of attention over every shape, and the share of the memory limit: the line of the index."""
    gelu = [numbers.percent(share, 0) for _, share in shares(results, "bias_gelu")][:1]
    parts = [f"bias_gelu reaches {share} of the memory limit" for share in gelu]
    if speeds := _by_dtype(attended(results)):
        parts.append(f"attention, forward and backward, runs at {speeds} the speed of PyTorch's fastest")
    return f"{'; '.join(parts)}." if parts else finding(results)


def _by_dtype(pairs: list[Attended]) -> str:
    ranges = {dtype: range_of(pair.speedup for pair in pairs if pair.dtype == dtype) for dtype in dtypes_of(pairs)}
    return " and ".join(f"{speeds} ({dtype})" for dtype, speeds in ranges.items())


def _operators(results: Results) -> str | None:
    for record in largest(results, "bias_gelu"):
        strongest = beside_the_strongest(results, record)
        if record.labels["dtype"] == "float32" and strongest is not None:
            share = share_of_limit(results, record)
            of_limit = "" if share is None else f" and {numbers.percent(share, 0)} of the memory limit"
            return (
                f"bias_gelu on {numbers.count(int(record.labels['count']))} float32 elements reaches "
                f"{numbers.with_unit(strongest[0], '×')} the speed of {strongest[1]}{of_limit}"
            )
    return None


def _attention(results: Results) -> str | None:
    pairs = attended(results, direction="forward")
    longest = max((pair.tokens for pair in pairs), default=0)
    speeds = _by_dtype([pair for pair in pairs if pair.tokens == longest])
    if not speeds:
        return None
    return f"attention forward on {numbers.count(longest)} tokens {speeds} that of PyTorch's fastest back end"


def _worst_attention(results: Results) -> str | None:
    pair = min(attended(results), key=lambda pair: pair.speedup, default=None)
    if pair is None:
        return None
    labels = pair.own.labels
    return (
        f"attention {labels['direction']} at {numbers.with_unit(pair.speedup, '×')} ({pair.dtype}, head size "
        f"{labels['head_size']}, {numbers.count(pair.tokens)} tokens)"
    )


def _worst_other(results: Results) -> str | None:
    """Misaligned operands, or the training step with one of the operators or all."""
    candidates = [
        (record["speedup"].value, "misaligned operands at {} of torch.add")
        for record in results.select("layout", form="custom_ops.vector_add", layout=MISALIGNED)
    ]
    for record in results.select("training"):
        part, preset = record.labels["part"], record.labels["preset"]
        if part != BASELINE and "speedup" in record.values:
            candidates.append((record["speedup"].value, f"the `{preset}` training step with {part} at {{}} of torch's"))
    if not candidates:
        return None
    speed, what = min(candidates)
    return what.format(numbers.with_unit(speed, "×"))
