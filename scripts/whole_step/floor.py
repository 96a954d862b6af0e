"""The least time that a training step can take: what each kernel group must compute and move, over measured limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchkit import Results, numbers
from benchkit.timing.limits import product_ceiling
from torch_baseline.config import GPTConfig
from torch_baseline.model import parameter_shapes


class Work(NamedTuple):
    """What a group of kernels must do in a step.

    Attributes:
        group: One of :data:`whole_step.kernel_groups.GROUPS`.
        flops: Operations of matrix products.
        moved: Bytes that are read and written at least once.
        why: What is counted.
    """

    group: str
    flops: float
    moved: float
    why: str


class Floor(NamedTuple):
    """The least time of kernel groups that are fused with one another, and what it follows from."""

    groups: tuple[str, ...]
    why: str
    seconds: float
    measured: bool


# What one kernel may do together. On a CPU a compiled kernel has no group of its own.
_FUSED = {
    "norm": ("norm", "elementwise", "compiled kernels"),
    "elementwise": ("norm", "elementwise", "compiled kernels"),
}


def work_of_step(model: GPTConfig, tokens: int, dtype: str) -> list[Work]:
    """Return the least work of each kernel group.

    Each operand of a group is read once and each result is written once. The residual stream, its gradient and the
    weights are float32; operands of matrix products and of attention have the compute dtype.
    """
    low = 2 if dtype in ("bfloat16", "float16") else 8 if dtype == "float64" else 4
    full = 8 if dtype == "float64" else 4
    width, inner, layers = model.n_embd, model.mlp_size, model.n_layer
    shapes = parameter_shapes(model)
    matrices = sum(shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2)
    if not model.tie_embeddings:
        matrices -= model.vocab_size * width  # the embedding is looked up, not multiplied
    scalars = sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes.values())
    norms = 2 * layers + 1
    return [
        Work("matmul", 6.0 * matrices * tokens, 0, "6 operations per weight and token"),
        Work(
            "attention", 6.0 * layers * model.block_size * width * tokens, 0,
            "two products forward, four backward, half of each under the causal mask",
        ),
        Work(
            "norm", 0, norms * tokens * width * (5 * full + 4 * low),
            "the residual sum with the norm, forward: 2 reads, 2 writes; backward: 3 reads, 2 writes",
        ),
        Work(
            "elementwise", 0, tokens * (layers * low * (5 * inner + 8 * width) + 4 * full * width),
            "bias and GELU: 3 reads, 2 writes; rotation of queries and keys; the embedding",
        ),
        Work("loss", 0, 2 * tokens * model.vocab_size * low, "one pass that replaces the logits by their gradient"),
        Work("optimizer", 0, 8 * full * scalars, "gradient twice, weight and both moments read and written"),
    ]  # fmt: skip


def floors(results: Results, steps: Sequence[Mapping[str, float]]) -> list[Floor]:
    """Return the least time of each group on the machine of the run; empty where the limits were not measured.

    A limit that one of the measured steps beats is none: the least time of the group is then what that step takes.
    """
    asked = results.configuration
    bandwidth = [r for r in results.select("memory limit") if r.labels["traffic"] == "1 read 1 write"]
    product = product_ceiling(results, asked["dtype"])
    if not bandwidth or product is None or "model" not in asked:
        return []
    rate, moving = product["rate"].value, bandwidth[0]["bandwidth"].value
    model = GPTConfig(**asked["model"])
    together: dict[tuple[str, ...], list[Work]] = {}
    for part in work_of_step(model, asked["batch_size"] * model.block_size, asked["dtype"]):
        together.setdefault(_FUSED.get(part.group, (part.group,)), []).append(part)
    present = {group for step in steps for group, seconds in step.items() if seconds}
    return [
        _floor(tuple(g for g in groups if g in present or g == groups[0]), work, rate, moving, steps)
        for groups, work in together.items()
    ]


def _floor(
    groups: tuple[str, ...], work: Sequence[Work], rate: float, moving: float, steps: Sequence[Mapping[str, float]]
) -> Floor:
    limit = sum(part.flops / rate + part.moved / moving for part in work)
    taken = [seconds for step in steps if (seconds := sum(step.get(group, 0.0) for group in groups))]
    seconds = min([limit, *taken])
    return Floor(groups, "; ".join(map(_in_words, work)), seconds, seconds < limit)


def _in_words(work: Work) -> str:
    amount = (work.flops, "FLOP") if work.flops else (work.moved, "B")
    return f"{numbers.with_unit(*amount)}: {work.why}"
