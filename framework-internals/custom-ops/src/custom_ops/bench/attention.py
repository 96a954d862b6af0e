"""Attention compared with ``scaled_dot_product_attention``: speed, error against float64, memory, each kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import custom_ops
from benchkit import Comparison, Quantity, Record, compare
from benchkit.device import Device
from benchkit.errors import lacks_memory, why_missing, without_frames
from benchkit.results import Absence, Label
from benchkit.timing import capturable_stream
from benchkit.timing.statistics import worst
from custom_ops.bench.cases import OURS
from custom_ops.bench.speed import name_of, peaks

MATH = "math"
FUSED = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FUSED_TORCH = "PyTorch's fused"
FLEX, MASKED = "FlexAttention", "a mask in memory"
MEMORY_FORMS = (OURS, FUSED_TORCH, MATH)  # the last one needs the most
# Arguments of the operator's overload ``algorithm``; csrc/flash_attention/flash_attention.h says what each supports.
ALGORITHMS = {"naive": 1, "mma.sync": 2, "wgmma": 3}

# By definition the backward pass needs five matrix products and the forward pass two. Kernels that recompute scores do
# more, which is not counted.
_BACKWARD_OVER_FORWARD = 2.5

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

Mask = Callable[[Tensor, Tensor], Tensor]  # of numbers of queries and of keys: whether the query sees the key


@dataclass(frozen=True)
class Shape:
    """The shape of a self-attention problem.

    Attributes:
        batch: Number of sequences.
        heads: Number of heads, the same for queries and keys.
        length: Number of tokens per sequence.
        head_size: Elements of a head.
        causal: Whether query i attends only to keys j ≤ i.
    """

    batch: int
    heads: int
    length: int
    head_size: int
    causal: bool

    @property
    def flops(self) -> float:
        """Operations of the forward pass: two products of 2·S²·D per head, half of that with a causal mask."""
        every = 4.0 * self.batch * self.heads * self.length**2 * self.head_size
        return every / 2 if self.causal else every

    def operands(self, dtype: torch.dtype, device: Device, *, number: int = 3) -> list[Tensor]:
        """Make seeded normal tensors of shape (batch, heads, length, head size)."""
        generator = torch.Generator(device).manual_seed(self.length + self.head_size)
        size = (self.batch, self.heads, self.length, self.head_size)
        return [torch.randn(size, device=device, generator=generator).to(dtype) for _ in range(number)]


def speeds(
    device: Device,
    lengths: Sequence[int],
    head_sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    *,
    tokens: int,
    width: int,
    seconds: float,
    masks: Sequence[bool] = (False, True),
) -> Iterator[Record | Absence]:
    """Time attention and each fused back end of torch: records ``attention``. A form that fails is an absence.

    All calls use the same operands. At the sizes of a report these are far larger than a GPU's L2 cache. ``tokens`` are
    those of a batch, where a longer sequence is a batch of one; ``width`` is heads × head size.

    Yields:
        Labels ``dtype``, ``head_size``, ``length``, ``causal``, ``direction`` (``forward`` or ``backward``), ``form``
        (:data:`custom_ops.bench.cases.OURS` or a key of :data:`FUSED`), ``best`` (of torch's, the fastest) and
        ``clock``; values ``time``, ``rate`` in operations that the definition asks for, ``error`` (‖x − exact‖ /
        ‖exact‖ of the first head; backward the largest of dq, dk and dv), and for ours ``speedup`` over the best.
    """
    for dtype in dtypes:
        for head_size in head_sizes:
            for length in lengths:
                for causal in masks:
                    shape = Shape(max(tokens // length, 1), max(width // head_size, 1), length, head_size, causal)
                    yield from _both_directions(shape, dtype, device, seconds=seconds)


def _both_directions(shape: Shape, dtype: torch.dtype, device: Device, *, seconds: float) -> Iterator[Record | Absence]:
    *operands, grad = shape.operands(dtype, device, number=4)
    forms: dict[str, Attend] = {OURS: partial(ours, causal=shape.causal), **fused(operands, shape.causal)}
    exact = exact_head(*(x[0, 0] for x in (*operands, grad)), causal=shape.causal)
    failed: dict[str, Exception] = {}
    errors = _each(forms, lambda attend: relative_error(attend(*operands)[0, 0], exact[0]), failed)
    working = {form: forms[form] for form in errors}
    comparison = compare(working, device=device, inputs=[tuple(operands)], seconds=seconds, failed=failed)
    yield from _records(comparison, errors, shape, dtype, "forward")

    leaves = [x.requires_grad_() for x in operands]
    with capturable_stream(device):
        backward = _each(working, lambda attend: _backward(attend(*leaves), leaves, grad), failed)
        errors = _each(backward, lambda call: largest_error([x[0, 0] for x in call()], exact[1:]), failed)
        backward = {form: backward[form] for form in errors}
        comparison = compare(backward, device=device, seconds=seconds, failed=failed)
    yield from _records(comparison, errors, shape, dtype, "backward")
    for form, error in failed.items():
        what = f"attention by {form} in {name_of(dtype)}, head size {shape.head_size}, {shape.length} tokens"
        yield Absence(what, why_missing(error))


def _each(
    functions: Mapping[str, Function], call: Callable[[Function], Result], failed: dict[str, Exception]
) -> dict[str, Result]:
    """Call something with each function; those for which it fails are entered in ``failed``."""
    results: dict[str, Result] = {}
    for name, function in functions.items():
        try:
            results[name] = call(function)
        except Exception as error:
            failed[name] = without_frames(error)
    return results


def _backward(out: Tensor, leaves: Sequence[Tensor], grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _records(
    comparison: Comparison, errors: Mapping[str, float], shape: Shape, dtype: torch.dtype, direction: str
) -> Iterator[Record]:
    rivals = [form for form in comparison.timings if form != OURS]
    best = min(rivals, key=lambda form: comparison[form].median, default=None)
    flops = shape.flops * (_BACKWARD_OVER_FORWARD if direction == "backward" else 1)
    for form in comparison.timings:
        time = comparison[form].quantity()
        values = {"time": time, "rate": time.per(flops, "FLOP/s"), "error": Quantity(errors[form], "")}
        if form == OURS and best is not None:
            values["speedup"] = comparison.speedup(OURS, over=best)
        labels: dict[str, Label] = {
            **_labels(shape, dtype), "direction": direction, "form": form, "best": form == best,
            "clock": comparison[form].method,
        }  # fmt: skip
        yield Record("attention", labels, values)


def _labels(shape: Shape, dtype: torch.dtype) -> dict[str, Label]:
    return {
        "dtype": name_of(dtype),
        "head_size": shape.head_size,
        "length": shape.length,
        "causal": shape.causal,
        "batch": shape.batch,
        "heads": shape.heads,
    }


def features(
    device: Device, length: int, head_size: int, dtype: torch.dtype, *, width: int, seconds: float
) -> Iterator[Record]:
    """Time a causal window, packed sequences and a bias beside torch's forms of them: records ``attention feature``.

    Yields:
        Labels of the shape, ``feature``, ``direction`` and ``form`` (:data:`~.cases.OURS`, :data:`MASKED`; on a GPU,
        but not for the bias, :data:`FLEX`, which is compiled); values ``time`` and ``rate``, in operations on the
        scores that are seen, and for torch's forms ``speedup`` of ours over them.
    """
    shape = Shape(1, max(width // head_size, 1), length, head_size, causal=True)
    rows = torch.arange(length, device=device)
    window, starts = length // 8, _ragged(length, device)
    sequence = torch.searchsorted(starts[1:], rows, right=True)
    kinds: list[tuple[str, Mask, dict[str, Any]]] = [
        (f"window of {window} keys", lambda i, j: (j <= i) & (i - j <= window), {"window_size": (window, -1)}),
        (
            f"{len(starts) - 1} packed sequences",
            lambda i, j: (j <= i) & (sequence[i] == sequence[j]),
            {"cu_seqlens_q": starts, "cu_seqlens_k": starts},
        ),
    ]
    for feature, mask, arguments in kinds:
        forms = _featured(mask, arguments, length, device)
        seen = float(mask(rows[:, None], rows).sum()) * shape.heads
        yield from _feature(shape, dtype, device, feature, forms, seen, seconds)
    short = replace(shape, length=min(length, 2048), causal=False)  # a bias of each head takes heads·S² elements
    bias = torch.randn(1, shape.heads, short.length, short.length, device=device).to(dtype)
    forms = {
        OURS: lambda q, k, v: custom_ops.flash_attention(q, k, v, attn_mask=bias)[0],
        MASKED: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, bias),
    }
    yield from _feature(short, dtype, device, "a bias of each head", forms, bias.numel(), seconds)


def _feature(
    shape: Shape, dtype: torch.dtype, device: Device, feature: str, forms: Mapping[str, Attend], seen: float,
    seconds: float,
) -> Iterator[Record]:  # fmt: skip
    """The records of one feature, with which ``seen`` scores count."""
    *operands, grad = shape.operands(dtype, device, number=4)
    labels, flops = {**_labels(shape, dtype), "feature": feature}, 4 * seen * shape.head_size
    comparison = compare(forms, device=device, inputs=[tuple(operands)], seconds=seconds)
    yield from _feature_records(comparison, forms, {**labels, "direction": "forward"}, flops)
    if device == "cpu":  # FlexAttention has no backward pass there, and the mask's is that of the dense matrix
        return
    leaves = [x.requires_grad_() for x in operands]
    with capturable_stream(device):
        backward = {form: _backward(attend(*leaves), leaves, grad) for form, attend in forms.items()}
        comparison = compare(backward, device=device, seconds=seconds)
    yield from _feature_records(
        comparison, backward, {**labels, "direction": "backward"}, flops * _BACKWARD_OVER_FORWARD
    )


def _ragged(length: int, device: Device) -> Tensor:
    """The starts of sequences of seeded lengths around an eighth of all rows, and the end of the last."""
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0))[:7] + 1
    return torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([length])]).to(device, torch.int32)


def _featured(mask: Mask, arguments: Mapping[str, Any], length: int, device: Device) -> dict[str, Attend]:
    """Ours with these arguments, and torch's forms of the same mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if "cu_seqlens_q" not in arguments:
            return custom_ops.flash_attention(q, k, v, True, **arguments)[0]
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return custom_ops.flash_attention(q, k, v, True, **arguments)[0].transpose(0, 1).unsqueeze(0)

    places = torch.arange(length, device=device)
    in_memory = mask(places[:, None], places)
    forms: dict[str, Attend] = {
        OURS: attend,
        MASKED: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, in_memory),
    }
    if device == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # a second to import

        blocks = create_block_mask(lambda b, h, i, j: mask(i, j), None, None, length, length, device=device)
        torch.compiler.reset()  # each mask is compiled anew, and their number is limited
        compiled = torch.compile(flex_attention, dynamic=False)
        forms[FLEX] = lambda q, k, v: compiled(q, k, v, block_mask=blocks)
    return forms


def _feature_records(
    comparison: Comparison, forms: Iterable[str], labels: Mapping[str, Label], flops: float
) -> Iterator[Record]:
    for form in forms:
        time = comparison[form].quantity()
        values = {"time": time, "rate": time.per(flops, "FLOP/s")}
        if form != OURS:
            values["speedup"] = comparison.speedup(OURS, over=form)
        yield Record("attention feature", {**labels, "form": form}, values)


def ours(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """This package's attention without the log-sum-exp."""
    return custom_ops.flash_attention(q, k, v, causal)[0]


def with_back_end(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, back_end: SDPBackend | list[SDPBackend]) -> Tensor:
    """``scaled_dot_product_attention`` on one of its back ends, or on the first of several that supports the inputs."""
    with sdpa_kernel(back_end):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def fused(operands: Sequence[Tensor], causal: bool) -> Mapping[str, Attend]:
    """Torch's fused back ends that support these operands, forward and backward, by name; math if none does."""
    named = {form: partial(with_back_end, causal=causal, back_end=back_end) for form, back_end in FUSED.items()}
    supported = {form: attend for form, attend in named.items() if _supports(attend, operands)}
    return supported or {MATH: partial(with_back_end, causal=causal, back_end=SDPBackend.MATH)}


def _supports(attend: Attend, operands: Sequence[Tensor]) -> bool:
    leaves = [x.detach().requires_grad_() for x in operands]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns why a back end is not usable, and then raises
        try:
            out = attend(*leaves)
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        except RuntimeError as error:
            if lacks_memory(error):
                raise
            return False
    return True


def exact_head(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, causal: bool, rows: int = 1024) -> list[Tensor]:
    """Compute one head's attention of (S, D) operands and its gradients in float64, in blocks of ``rows`` queries.

    Returns:
        out, dq, dk and dv.
    """
    keys, values = (x.detach().double().requires_grad_() for x in (k, v))
    columns = torch.arange(len(k), device=k.device)
    outs, query_gradients = [], []
    key_gradients = [torch.zeros_like(keys), torch.zeros_like(values)]
    for start in range(0, len(q), rows):
        queries = q[start : start + rows].detach().double().requires_grad_()
        scores = q.shape[-1] ** -0.5 * (queries @ keys.mT)
        if causal:
            scores = scores.masked_fill(columns > start + columns[: len(queries), None], float("-inf"))
        out = scores.softmax(-1) @ values
        dq, *others = torch.autograd.grad(out, (queries, keys, values), grad[start : start + rows].double())
        outs.append(out.detach())
        query_gradients.append(dq)
        for total, part in zip(key_gradients, others, strict=True):
            total += part
    return [torch.cat(outs), torch.cat(query_gradients), *key_gradients]


def relative_error(result: Tensor, exact: Tensor) -> float:
    """‖result − exact‖ / ‖exact‖, in float64."""
    return float((result.double() - exact).norm() / exact.norm())


def largest_error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest of the relative errors; NaN if one of them is NaN."""
    return worst(map(relative_error, results, exact))


def accuracy(
    device: Device, lengths: Sequence[int], dtypes: Sequence[torch.dtype], *, head_size: int
) -> Iterator[Record]:
    """Compare attention and its gradients with float64 over the length: records ``attention accuracy``.

    The problem is one sequence with two heads, of which the first is compared. Torch's result comes from its flash
    back end, or from the next one that supports the dtype.

    Yields:
        Labels ``dtype``, ``head_size``, ``length``, ``causal`` and ``form`` (:data:`~.cases.OURS` or ``torch``);
        values ``out``, ``dq``, ``dk`` and ``dv``, each ‖x − exact‖ / ‖exact‖.
    """
    peers = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    for dtype in dtypes:
        for length in lengths:
            for causal in (False, True):
                shape = Shape(1, 2, length, head_size, causal)
                *operands, grad = shape.operands(dtype, device, number=4)
                exact = exact_head(*(x[0, 0] for x in (*operands, grad)), causal=causal)
                leaves = [x.requires_grad_() for x in operands]
                torchs = partial(with_back_end, causal=causal, back_end=peers)
                for form, attend in ((OURS, partial(ours, causal=causal)), ("torch", torchs)):
                    out = attend(*leaves)
                    results = (out.detach(), *torch.autograd.grad(out, leaves, grad))
                    errors = (relative_error(x[0, 0], right) for x, right in zip(results, exact, strict=True))
                    values = {name: Quantity(e, "") for name, e in zip(("out", "dq", "dk", "dv"), errors, strict=True)}
                    yield Record("attention accuracy", {**_labels(shape, dtype), "form": form}, values)


def kernels(
    device: Device, length: int, head_sizes: Sequence[int], dtypes: Sequence[torch.dtype], *, width: int, seconds: float
) -> Iterator[Record | Absence]:
    """Time the forward kernels, and torch's attention with the scores in memory: records ``attention kernel``.

    Yields:
        Labels ``dtype``, ``head_size``, ``length`` and ``kernel``: ``chosen``, :data:`MATH`, and on a GPU those of
        :data:`ALGORITHMS` that it supports; values ``time``, ``rate``, and ``speedup`` over :data:`MATH`.
    """
    for dtype in dtypes:
        for head_size in head_sizes:
            shape = Shape(2, max(width // head_size, 1), length, head_size, causal=False)
            operands = shape.operands(dtype, device)
            forms: dict[str, Attend] = {
                "chosen": partial(ours, causal=False),
                MATH: partial(with_back_end, causal=False, back_end=SDPBackend.MATH),
                **(_algorithms(operands) if device == "cuda" else {}),
            }
            failed: dict[str, Exception] = {}
            comparison = compare(forms, device=device, inputs=[tuple(operands)], seconds=seconds, failed=failed)
            for form in comparison.timings:
                time = comparison[form].quantity()
                values = {"time": time, "rate": time.per(shape.flops, "FLOP/s")}
                if MATH in comparison.timings:
                    values["speedup"] = comparison.speedup(form, over=MATH)
                yield Record("attention kernel", {**_labels(shape, dtype), "kernel": form}, values)
            for form, error in failed.items():
                yield Absence(f"attention's kernel {form} in {name_of(dtype)}", why_missing(error))


def _algorithms(operands: Sequence[Tensor]) -> Mapping[str, Attend]:
    named = {name: partial(_by_algorithm, number=number) for name, number in ALGORITHMS.items()}
    supported = {}
    for name, attend in named.items():
        try:
            attend(*operands)
        except RuntimeError as error:
            if lacks_memory(error):
                raise
            continue  # the kernel does not support this GPU
        supported[name] = attend
    return supported


def _by_algorithm(q: Tensor, k: Tensor, v: Tensor, *, number: int) -> Tensor:
    out: Tensor = torch.ops.custom_ops_kernels.flash_attention.algorithm(q, k, v, False, None, number)[0]
    return out


def score_bytes(length: int, *, head_size: int, width: int) -> int:
    """Bytes that :data:`MATH` takes at most in :func:`memory`: the scores and their gradients, in float32."""
    return 4 * 4 * max(width // head_size, 1) * length**2


def memory(
    device: Device, length: int, dtype: torch.dtype, form: str, *, head_size: int, width: int
) -> Iterator[Record]:
    """Measure the GPU memory of attention, forward and backward, in one of :data:`MEMORY_FORMS`: a record
    ``attention memory``.

    Yields:
        Labels ``dtype``, ``length`` and ``form`` (of torch's fused back ends the first that supports the operands);
        the values of :func:`custom_ops.bench.speed.peaks`.
    """
    shape = Shape(1, max(width // head_size, 1), length, head_size, causal=False)
    leaves = [x.requires_grad_() for x in shape.operands(dtype, device)]
    attend: Attend = partial(ours, causal=False)
    if form == FUSED_TORCH:
        form, attend = next(iter(fused(leaves, causal=False).items()))
    elif form == MATH:
        attend = partial(with_back_end, causal=False, back_end=SDPBackend.MATH)
    yield Record("attention memory", {**_labels(shape, dtype), "form": form}, peaks(partial(attend, *leaves), leaves))
