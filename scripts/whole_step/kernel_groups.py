"""Which part of the model a kernel computes: matmul, attention, norm, loss, optimizer, or anything elementwise.

A kernel is named by itself, by the operators that launch it, and in the backward pass also by the forward operator that
autograd's node belongs to; a kernel of XLA by the ``jax.named_scope`` of its instruction. A fused kernel counts as the
first group in the order of :data:`_NAMES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

GROUPS = ("matmul", "attention", "norm", "elementwise", "loss", "optimizer")

_NAMES = {
    "optimizer": r"multi_tensor|foreach|adam|vector_norm|gradient_norm|sums_of_squares|norm_of_sums|Optimizer\.|"
    r"\boptimizer\b",
    "attention": r"scaled_?dot_?product|flash|fmha|sdpa|efficient_attention|\bcore\b",
    "matmul": r"triton_tem|gemm|nvjet|xmma|::(?:add|b|badd)?mm\b|aten::linear\b|[Mm]mBackward|LinearBackward|"
    r"mkldnn|dot_general|\bdot\.",
    "loss": r"softmax|nll_loss|cross_entropy|logsumexp|_amax_|\bloss\b",
    "norm": r"rms_?norm|layer_norm|rsqrt|\bnorm\b",
}
_PATTERNS = {group: re.compile(pattern, re.IGNORECASE) for group, pattern in _NAMES.items()}
_OPERATOR = re.compile(r"\w+::\w+")
_BACKWARD = "autograd::engine::evaluate_function"
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCH = frozenset({"cuda_runtime", "cuda_driver"})


@dataclass(frozen=True)
class Work:
    """An operator call or a device kernel of a profile.

    Attributes:
        names: Its name after the names of the spans around it, outermost first.
        start: When it starts, or its launch, in microseconds of the profiler's clock.
        seconds: Its own time, without what it calls and without what another kernel overlaps.
        calls: How often it ran.
    """

    names: str
    start: float
    seconds: float
    calls: float = 1.0


def group_of(names: str) -> str:
    """Return the group of a kernel or an operator by its names; ``elementwise`` is what no other group claims."""
    return next((group for group, pattern in _PATTERNS.items() if pattern.search(names)), "elementwise")


def by_group(work: Sequence[Work], steps: int) -> dict[str, dict[str, float]]:
    """Add up seconds and calls of a step by group, in the order of :data:`GROUPS`."""
    totals = {group: {"seconds": 0.0, "calls": 0.0} for group in GROUPS}
    ordered = sorted(work, key=lambda part: part.start)
    for part, group in zip(ordered, _with_the_loss(ordered), strict=True):
        totals[group]["seconds"] += part.seconds / steps
        totals[group]["calls"] += part.calls / steps
    return totals


def operator_calls(events: Sequence[Mapping[str, Any]]) -> list[Work]:
    """The calls of torch's operators in a profile, with their own time on the CPU."""
    return [work for event, work in _spans(events) if _OPERATOR.fullmatch(event["name"])]


def device_kernels(events: Sequence[Mapping[str, Any]]) -> list[Work]:
    """The kernels, copies and fills on a GPU in a profile; empty without a GPU. Overlapping time counts once."""
    kernels = sorted((event for event in events if event.get("cat") in _ON_DEVICE), key=lambda event: event["ts"])
    if not kernels:
        return []
    launchers = {e["args"]["External id"]: work.names for e, work in _spans(events) if "External id" in e["args"]}
    launches = {e["args"]["correlation"]: e for e in events if e.get("cat") in _LAUNCH and "correlation" in e["args"]}
    timed, end = [], 0.0
    for kernel in kernels:
        launch = launches.get(kernel["args"].get("correlation"), kernel)
        operator = kernel["args"].get("External id") or launch["args"].get("External id")
        stop = kernel["ts"] + kernel["dur"]
        seconds = max(stop - max(kernel["ts"], end), 0.0) * 1e-6
        timed.append(Work(f"{launchers.get(operator, '')} {kernel['name']}", launch["ts"], seconds))
        end = max(end, stop)
    return timed


def _spans(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Work]]:
    """Yield each span on the CPU with its names and its own time."""
    spans = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    spans.sort(key=lambda event: (event["tid"], event["ts"], -event["dur"]))
    names: list[str] = []
    own = [event["dur"] for event in spans]
    nodes: list[int | None] = []  # for each span, the autograd node that runs it
    around: list[int] = []
    for index, event in enumerate(spans):
        while around and not _encloses(spans[around[-1]], event):
            around.pop()
        names.append(" ".join([*([names[around[-1]]] if around else []), event["name"]]))
        nodes.append(index if event["name"].startswith(_BACKWARD) else nodes[around[-1]] if around else None)
        if around:
            own[around[-1]] -= event["dur"]
        around.append(index)
    # An operator reads the number of the next node: the last one that read it made the node.
    forward = {
        event["args"]["Sequence number"]: name
        for event, name, node in zip(spans, names, nodes, strict=True)
        if node is None and "Sequence number" in event["args"]
    }
    for event, name, node, microseconds in zip(spans, names, nodes, own, strict=True):
        made_by = "" if node is None else forward.get(spans[node]["args"].get("Sequence number"), "")
        yield event, Work(f"{made_by} {name}".lstrip(), event["ts"], max(microseconds, 0.0) * 1e-6)


def _encloses(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> bool:
    return bool(outer["tid"] == inner["tid"] and inner["ts"] < outer["ts"] + outer["dur"])


def _with_the_loss(work: Sequence[Work]) -> list[str]:
    """Return the group of each; what lies between the last matmul of a forward pass and the first of the backward pass
    is the loss, whatever its kernels are called.
    """
    groups = [group_of(part.names) for part in work]
    backward = [_BACKWARD in part.names for part in work]
    for turn, (before, after) in enumerate(pairwise(backward), start=1):
        if before or not after:
            continue
        head = next((at for at in range(turn - 1, -1, -1) if groups[at] == "matmul" or backward[at]), turn)
        gradient = next((at for at in range(turn, len(work)) if groups[at] == "matmul" or not backward[at]), turn)
        if head < turn and groups[head] == groups[gradient] == "matmul":
            groups[head + 1 : gradient] = ["loss"] * (gradient - head - 1)
    return groups
